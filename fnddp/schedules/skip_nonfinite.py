"""Protection of the state from gradients that are infinite or NaN."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fnddp.core import collectives, tree
from fnddp.core.sync import Exchange, Replicated, State, Sync, groups_of, transform
from fnddp.core.tree import Leaves, Tree, is_inexact, paired


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

    Around `delayed` the mean that is held is held one step longer; after a first step that was skipped there is none,
    and zeros come. A mean that overflows on the wire counts in the step that makes it, not in the one that returns it:
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
        if not self.inner.sent_is_exact:  # it holds a mean, for which, if not finite, all later steps would be skipped
            in_mean = in_mean | _has_spoilt(state.inner, inner.state, state.skipped)
        sees_the_same = self.inner.agrees and self.inner.sent_is_exact
        is_bad = is_bad | (in_mean if sees_the_same else _on_any_rank(in_mean, groups))

        def rolled_back(before: Any, after: Any) -> Any:
            return torch.where(is_bad.to(after.device), before, after) if isinstance(after, Tensor) else after

        mean = {path: _spoilt(leaf, is_bad) for path, leaf in inner.mean.items()}
        kept = paired(rolled_back, state.inner, inner.state)
        return Exchange(mean, inner.sent, SkipNonfiniteState(state.skipped + is_bad, kept))


def _is_bad(leaves: Leaves, like: Tensor) -> Tensor:
    """Return True, on the device of `like`, if an element is not finite."""
    finite = [leaf.isfinite().all().to(like.device) for leaf in leaves.values() if is_inexact(leaf)]
    return ~torch.stack(finite).all() if finite else like.new_zeros((), dtype=torch.bool)


def _has_spoilt(before: Any, after: Any, like: Tensor) -> Tensor:
    """Return True if a part of a state was finite and no longer is; `measure` has parts that begin as NaN."""
    found: list[Tensor] = []

    def look(old: Any, new: Any) -> None:
        if isinstance(old, Tensor) and isinstance(new, Tensor) and is_inexact(new):
            found.append((~new.isfinite().all() & old.isfinite().all()).to(like.device))

    paired(look, before, after)
    return torch.stack(found).any() if found else like.new_zeros((), dtype=torch.bool)


def _on_any_rank(flag: Tensor, groups: tuple[str | None, ...]) -> Tensor:
    for group in groups:  # of ranks laid out in several dimensions: along one after the other
        # As a mean in float32, which shares a message with gradients.
        flag = collectives.all_reduce({"": flag.float()}, "mean", group)[""] > 0
    return flag


def _spoilt(leaf: Tensor, is_bad: Tensor) -> Tensor:
    return torch.where(is_bad.to(leaf.device), torch.nan, leaf) if is_inexact(leaf) else leaf
