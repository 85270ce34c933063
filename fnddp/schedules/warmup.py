"""A first phase with another pipeline."""

from typing import ClassVar, NamedTuple

from fnddp.core.options import at_least
from fnddp.core.sync import Exchange, Replicated, State, Sync, transform
from fnddp.core.tree import Leaves, Tree, replaced
from fnddp.reducers.all_reduce import allreduce


class WarmupState(NamedTuple):
    """`step`: exchanges done so far, at most the number of warm-up steps."""

    step: Replicated[int]
    before: State
    inner: State


@transform
class warmup(Sync):
    """Run `before` for the first `steps` exchanges, then `inner`.

    The first steps of a training run tolerate compression badly (torch's `start_powerSGD_iter`). Put memory inside,
    `warmup(error_feedback(...), 100)`, unless `before` is lossy too.

    >>> import torch
    >>> from fnddp import fp16
    >>> sync = warmup(fp16(allreduce), steps=1)
    >>> grads = {"w": torch.tensor([1 + 2**-20])}
    >>> first, state = sync(grads, sync.init(grads))
    >>> second, state = sync(grads, state)
    >>> bool(first["w"] == grads["w"]), second["w"].item(), state.step
    (True, 1.0, 1)
    """

    inner: Sync
    steps: int
    before: Sync = allreduce

    wraps_skipping: ClassVar[bool] = True
    limits: ClassVar = {"steps": at_least(0)}

    def init(self, grads: Tree) -> State:
        return WarmupState(0, self.before.init(grads), self.inner.init(grads))

    def exchange(self, leaves: Leaves, state: WarmupState) -> Exchange:
        if state.step < self.steps:
            before = self.before.exchange(leaves, state.before)
            return replaced(before, state=WarmupState(state.step + 1, before.state, state.inner))
        inner = self.inner.exchange(leaves, state.inner)
        return replaced(inner, state=WarmupState(state.step, state.before, inner.state))
