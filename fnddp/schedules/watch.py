"""A pipeline that measures what another one loses."""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fnddp.core import collectives, tree
from fnddp.core.codec import wide
from fnddp.core.options import at_least
from fnddp.core.sync import Exchange, Local, Replicated, State, Sync, require_agreement, transform
from fnddp.core.tree import Leaves, Tree, is_inexact, replaced


class MeasureState(NamedTuple):
    """`step`: steps since the last measurement. `error`, `cosine`: its results, in float32; NaN before the first."""

    step: Replicated[int]
    error: Local[Tensor]
    cosine: Replicated[Tensor]
    inner: State


@transform
class measure(Sync):
    """Store in the state how far the result of `inner` is from its gradients; change nothing else.

    `error` is |g - sent| / |g| over all leaves: the part of this rank's gradient that was not sent. `cosine` is the
    cosine of the angle between the mean and the exact mean, over all leaves but integers: 1 without loss.

    `measure(error_feedback(topk(allgather)))` compares with the gradients. `error_feedback(measure(topk(allgather)))`
    compares with the input of the compressor: gradients plus residual. The exact mean costs an uncompressed
    all_reduce, so use `every_steps=1` only for a few steps. Reading a number waits for an accelerator.

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
                f"measure: {self.inner!r} takes no mean over one process group, so there is nothing to compare with; "
                "measure a part of it, such as one rule of partition({...})"
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
    """Return the inner product over all floating-point and complex leaves, on the device of `like`."""
    products: list[Tensor] = []
    for path, leaf in one.items():
        if is_inexact(leaf):
            a, b = leaf.to(wide(leaf.dtype)), other[path].to(wide(leaf.dtype))
            # Not a dot product of BLAS: its rounding depends on the alignment of its operands.
            products.append((a.conj() * b).real.sum().to(like.device))
    return torch.stack(products).sum() if products else like.new_zeros(())


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b == 0, torch.zeros_like(b), a / b).float()
