"""Local SGD: ranks train apart and average their parameters now and then."""

from typing import NamedTuple

from fnddp.outer.contract import Exchanges, Outer, outer, require_at_least, require_means
from fnddp.reducers.all_reduce import allreduce
from fnddp.sync import Replicated, State, Sync, require_state
from fnddp.tree import Leaves, Tree, replaced, require_leaves


class LocalSGDState(NamedTuple):
    """`step`: local steps since the last average, below `every`."""

    step: Replicated[int]
    inner: State


@outer
class local_sgd(Outer):
    """Averages the parameters after every so many local steps.

    The pipeline is given parameters, not differences: a lossy one loses digits of the parameters themselves. For
    compressed exchanges take `diloco(sync, every, lr=1, momentum=0)`, which sends differences. It keeps no copy of the
    parameters. The wrong choice for many local steps with adaptive optimizers, where `diloco` does better.

    Args:
        every: Local steps from one average to the next; at least 1.
        sync: What takes the mean.

    Raises:
        TypeError: `sync` takes no mean, or not of every leaf in every exchange.
        ValueError: `every` is less than 1.

    Source: Stich, "Local SGD converges fast and communicates little", ICLR 2019, Algorithm 1.

    >>> from fnddp import bf16, two_shot
    >>> local_sgd(every=8, sync=bf16(two_shot))
    local_sgd(every=8, sync=bf16(two_shot))
    """

    every: int
    sync: Sync = allreduce

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("local_sgd", "every", self.every, 1)
        require_means("local_sgd", self.sync)

    @property
    def period(self) -> int:
        return self.every

    def init(self, params: Tree) -> State:
        return LocalSGDState(0, self.sync.init(params))

    def step(self, params: Leaves, state: LocalSGDState, exchanges: Exchanges) -> tuple[Leaves, State]:
        require_leaves("local_sgd", params)
        require_state("local_sgd", state, LocalSGDState)
        if state.step + 1 < self.every:
            return params, replaced(state, step=state.step + 1)
        mean, inner = exchanges.end("params", self.sync, params, state.inner)
        return {path: mean[path] for path in params}, LocalSGDState(0, inner)
