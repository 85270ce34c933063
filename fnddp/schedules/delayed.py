"""The mean of the step before."""

from typing import NamedTuple

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.sync import Exchange, Replicated, State, Sync, transform
from fnddp.core.tree import Leaves, Tree, check_entries


class DelayedState(NamedTuple):
    """`step`: 0 before the first exchange, then 1. `last`: the mean of the last exchange, by leaf path."""

    step: Replicated[int]
    last: Replicated[Leaves]
    inner: State


@transform
class delayed(Sync):
    """Return the last step's mean now, and this step's in the next. In the first step no leaf has an update.

    Delayed by one step, communication could hide behind a whole forward and backward. **Today it does not**: engines
    end a step only when all of its collectives are complete, so this costs a copy of the gradients and the loss of a
    fresh mean, and saves no time. Use it to find out what a stale mean does to a training run. The wrong choice for
    anything else.

    `sent` is this rank's contribution to the next output, so memory outside remembers losses and not what is late: with
    it, the sum of all outputs, plus the mean residual, plus `last`, is the sum of all mean gradients.

    Raises:
        TypeError: `inner` has no update in some steps: write `every(n, delayed(...))`.

    Source: one step of delay as in Pipe-SGD (Li et al., NeurIPS 2018), Algorithm 1 with K = 2.

    >>> from fnddp import allreduce
    >>> sync = delayed(allreduce)
    >>> first, state = sync({"w": torch.ones(2)}, sync.init({"w": torch.ones(2)}))
    >>> second, state = sync({"w": torch.zeros(2)}, state)
    >>> first, second
    ({'w': None}, {'w': tensor([1., 1.])})
    """

    inner: Sync

    @property
    def skips(self) -> bool:
        return True

    @property
    def sent_is_exact(self) -> bool:
        return False

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        last = {path: torch.zeros_like(leaf) for path, leaf in leaves.items()}
        return DelayedState(0, last, self.inner.init(grads))

    def exchange(self, leaves: Leaves, state: DelayedState) -> Exchange:
        check_entries("delayed", state.last, {path: leaf.shape for path, leaf in leaves.items()})
        inner = self.inner.exchange(leaves, state.inner)
        # Copies: the caller may scale a mean in place, and gradients may be in memory that the next step reuses.
        mean = _copies(state.last) if state.step else {}
        return Exchange(mean, inner.sent, DelayedState(1, _copies(inner.mean), inner.state))


def _copies(leaves: Leaves) -> dict[str, Tensor]:
    return {path: leaf.clone() for path, leaf in leaves.items()}
