"""An exchange in each n-th step only."""

from typing import ClassVar, NamedTuple

import torch

from fnddp.core.options import at_least
from fnddp.core.sync import Exchange, Replicated, State, Sync, transform
from fnddp.core.tree import Leaves, Tree, replaced


class EveryState(NamedTuple):
    """`step`: steps since the last exchange, below n."""

    step: Replicated[int]
    inner: State


@transform
class every(Sync):
    """Exchange in each n-th step; in the others, no leaf has an update.

    No update is not an update of zeros: the pipeline returns None for those leaves, and adapters leave `.grad` None, on
    all ranks alike, so that Adam's moments and weight decay stand still.

    By itself it **loses** the gradients of the other steps. With memory outside they add up, and the n-th step sends
    the sum: `error_feedback(every(4, topk(allgather, ratio=0.01)))`. The update is then about n times as large, as that
    of n accumulated losses. The wrong choice where a loop may wait: gradient accumulation (`no_sync`) does the same
    without memory. A lowered step has two phases, and two plans.

    Args:
        n: Exchange in the steps n, 2 n, 3 n, ...; at least 1.

    Source: the period of communication of Qsparse-local-SGD (Basu et al., NeurIPS 2019, Algorithm 1) with one set of
    parameters: here they stand still in between.

    >>> from fnddp import allreduce, error_feedback
    >>> sync = error_feedback(every(2, allreduce))
    >>> grads = {"w": torch.ones(2)}
    >>> first, state = sync(grads, sync.init(grads))
    >>> second, state = sync(grads, state)
    >>> first, second
    ({'w': None}, {'w': tensor([2., 2.])})
    """

    n: int
    inner: Sync

    wraps_skipping: ClassVar[bool] = True
    limits: ClassVar = {"n": at_least(1)}

    @property
    def skips(self) -> bool:
        return self.n > 1 or super().skips

    def init(self, grads: Tree) -> State:
        return EveryState(0, self.inner.init(grads))

    def exchange(self, leaves: Leaves, state: EveryState) -> Exchange:
        if state.step + 1 < self.n:
            nothing = {path: torch.zeros_like(leaf) for path, leaf in leaves.items()}
            return Exchange({}, nothing, EveryState(state.step + 1, state.inner))
        inner = self.inner.exchange(leaves, state.inner)
        return replaced(inner, state=EveryState(0, inner.state))
