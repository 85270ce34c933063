"""Pipelines that read values: they measure what is lost, or keep infinite and NaN gradients out of the state."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fnddp.core import collectives, tree
from fnddp.core.codec import wide
from fnddp.core.options import at_least
from fnddp.core.sync import Exchange, Local, Replicated, State, Sync, groups_of, require_agreement, transform
from fnddp.core.tree import Leaves, Tree, is_inexact, paired, replaced


class MeasureState(NamedTuple):
    """`step`: steps since the last measurement. `error`, `cosine`: its results, in float32; NaN before the first."""

    step: Replicated[int]
    error: Local[Tensor]
    cosine: Replicated[Tensor]
    inner: State


@transform
class measure(Sync):
    """Keep in the state how far the result of `inner` is from its gradients; change nothing else.

    `error` is |g - sent| / |g| over all leaves, the part of this rank's gradient that was not sent. `cosine` is the
    cosine of the angle between the mean and the exact mean, over all leaves: 1 without loss. Integers do not count.

    `measure(error_feedback(topk(allgather)))` compares with the gradients, `error_feedback(measure(topk(allgather)))`
    with the input of the compressor, gradients and residual. The exact mean takes an uncompressed all_reduce, so
    `every_steps=1` is the wrong choice for more than a few steps. Reading a number waits for an accelerator.

    Args:
        inner: The pipeline: a mean over one process group, the same on all ranks, in every step.
        every_steps: Measure in the first step, and then once in this number of steps; at least 1.

    >>> from fnddp import allgather, topk
    >>> sync = measure(topk(allgather, ratio=0.5), every_steps=100)
    >>> grads = {"w": torch.tensor([3.0, 4.0])}
    >>> mean, state = sync(grads, sync.init(grads))
    >>> state.error, state.cosine
    (tensor(0.6000), tensor(0.8000))
    """

    inner: Sync
    every_steps: int = 1

    limits: ClassVar = {"every_steps": at_least(1)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.ops != {"mean"} or self.inner.groups is None or len(self.inner.groups) != 1:
            raise TypeError(
                f"measure: {self.inner!r} takes no mean over one process group to compare with; "
                "measure a part of it, such as a rule of partition({...})"
            )
        require_agreement("measure", self.inner)

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        device = next((leaf.device for leaf in leaves.values()), None)
        error, cosine = (torch.full((), torch.nan, dtype=torch.float32, device=device) for _ in range(2))
        return MeasureState(0, error, cosine, self.inner.init(grads))

    def exchange(self, leaves: Leaves, state: MeasureState) -> Exchange:
        inner = self.inner.exchange(leaves, state.inner)
        error, cosine = state.error, state.cosine
        if state.step == 0:
            (group,) = self.inner.groups or {None}
            given = {path: leaf.to(wide(leaf.dtype)) for path, leaf in leaves.items() if is_inexact(leaf)}
            exact = collectives.all_reduce(given, "mean", group)
            lost = {path: leaf - inner.sent[path] for path, leaf in given.items()}
            error = _ratio(_dot(lost, lost, error).sqrt(), _dot(given, given, error).sqrt())
            lengths = (_dot(inner.mean, inner.mean, cosine) * _dot(exact, exact, cosine)).sqrt()
            cosine = _ratio(_dot(exact, inner.mean, cosine), lengths)
        step = state.step + 1 if state.step + 1 < self.every_steps else 0
        return replaced(inner, state=MeasureState(step, error, cosine, inner.state))


def _dot(one: Leaves, other: Leaves, like: Tensor) -> Tensor:
    """Return the inner product over all leaves that hold fractions, on the device of `like`."""
    products: list[Tensor] = []
    for path, leaf in one.items():
        if is_inexact(leaf):
            a, b = leaf.to(wide(leaf.dtype)), other[path].to(wide(leaf.dtype))
            # Not a dot product of BLAS, whose rounding depends on the alignment of its operands.
            products.append((a.conj() * b).real.sum().to(like.device))
    return torch.stack(products).sum() if products else like.new_zeros(())


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b == 0, torch.zeros_like(b), a / b).float()


class SkipNonfiniteState(NamedTuple):
    """`skipped`: steps so far whose gradients or mean were not finite, an int64 scalar."""

    skipped: Replicated[Tensor]
    inner: State


@transform
class skip_nonfinite(Sync):
    """Keep gradients that are infinite or NaN on any rank out of the state of `inner`, and show them to all ranks.

    In such a step the tensors of `inner`'s state stay as they were, on all ranks: no residual becomes NaN. The mean is
    NaN in all of its fractional leaves, also where a codec would hide it (rounded to 8 bits, a NaN is a number). So
    guards of an optimizer work: `torch.amp.GradScaler` skips the step and lowers its scale, as with plain DDP, and
    `torch.nn.utils.clip_grad_norm_(..., error_if_nonfinite=True)` raises on all ranks. An optimizer without a guard
    gets NaN: plans do not depend on values, so the step cannot be left out here.

    Ranks of all groups, which `inner` must name, agree by one more number in the last bucket. The price is a pass over
    gradients, means and state. The wrong choice inside of memory: `error_feedback(skip_nonfinite(...))` remembers
    the NaN; write `skip_nonfinite(error_feedback(...))`. Counters, which are Python ints, go on.

    Around `delayed` the delayed mean is kept one step longer; after a skipped first step there is none, and the mean is
    zeros. A mean that overflows on the wire counts in the step that makes it, not in the one that returns it:
    ranks agree on that by a second number.

    Source: the skipped step of Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.

    >>> from fnddp import allreduce, error_feedback, fp16
    >>> sync = skip_nonfinite(error_feedback(fp16(allreduce)))
    >>> mean, state = sync({"w": torch.tensor([float("nan"), 1.0])}, sync.init({"w": torch.ones(2)}))
    >>> mean, state.skipped, state.inner.residual
    ({'w': tensor([nan, nan])}, tensor(1), {'w': tensor([0., 0.])})
    """

    inner: Sync

    wraps_skipping: ClassVar[bool] = True
    wants_whole_leaves: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.groups is None:
            raise TypeError(
                f"skip_nonfinite: {self.inner!r} does not name the groups it reduces over, and their ranks must agree"
            )

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        device = next((leaf.device for leaf in leaves.values()), None)
        return SkipNonfiniteState(torch.zeros((), dtype=torch.int64, device=device), self.inner.init(grads))

    def exchange(self, leaves: Leaves, state: SkipNonfiniteState) -> Exchange:
        inner = self.inner.exchange(leaves, state.inner)
        groups = groups_of(self.inner)
        is_bad = _on_any_rank(_is_bad(leaves, state.skipped), groups)
        in_mean = _is_bad(inner.mean, state.skipped)
        if not self.inner.sent_is_exact:  # its state may hold a mean, which would skip all later steps
            in_mean = in_mean | _became_nonfinite(state.inner, inner.state, state.skipped)
        sees_the_same = self.inner.agrees and self.inner.sent_is_exact
        is_bad = is_bad | (in_mean if sees_the_same else _on_any_rank(in_mean, groups))

        def rolled_back(before: Any, after: Any) -> Any:
            return torch.where(is_bad.to(after.device), before, after) if isinstance(after, Tensor) else after

        mean = dict(inner.mean)
        for path, leaf in inner.mean.items():
            if is_inexact(leaf):
                mean[path] = torch.where(is_bad.to(leaf.device), torch.nan, leaf)
        kept = paired(rolled_back, state.inner, inner.state)
        return Exchange(mean, inner.sent, SkipNonfiniteState(state.skipped + is_bad, kept))


def _is_bad(leaves: Leaves, like: Tensor) -> Tensor:
    """Return True, on the device of `like`, if an element is not finite."""
    finite = [leaf.isfinite().all().to(like.device) for leaf in leaves.values() if is_inexact(leaf)]
    return ~torch.stack(finite).all() if finite else like.new_zeros((), dtype=torch.bool)


def _became_nonfinite(before: Any, after: Any, like: Tensor) -> Tensor:
    """Return True if a part of a state was finite and no longer is; `measure` has parts that begin as NaN."""
    found: list[Tensor] = []

    def look(old: Any, new: Any) -> None:
        if isinstance(old, Tensor) and isinstance(new, Tensor) and is_inexact(new):
            found.append((~new.isfinite().all() & old.isfinite().all()).to(like.device))

    paired(look, before, after)
    return torch.stack(found).any() if found else like.new_zeros((), dtype=torch.bool)


def _on_any_rank(flag: Tensor, groups: tuple[str | None, ...]) -> Tensor:
    for group in groups:  # ranks may be laid out in several dimensions: agree along one after the other
        # As a mean in float32, which shares a message with gradients.
        flag = collectives.all_reduce({"": flag.float()}, "mean", group)[""] > 0
    return flag
