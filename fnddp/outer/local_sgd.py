"""Local SGD: ranks train apart and average their parameters once in several steps."""

from typing import NamedTuple

from fnddp.outer.contract import Exchanges, Outer, outer, require_options
from fnddp.reducers.all_reduce import allreduce
from fnddp.sync import Replicated, State, Sync, require_state
from fnddp.tree import Leaves, Tree, require_leaves


class LocalSGDState(NamedTuple):
    """Counts local steps: for `local_sgd` since the last average, otherwise since the first step.

    `inner`: the pipeline's state; for `hierarchical_local_sgd` a dict of them by period.
    """

    step: Replicated[int]
    inner: State


@outer
class local_sgd(Outer):
    """Average the parameters every `every` local steps.

    The pipeline is given parameters, not differences: a lossy one loses digits of the parameters themselves. For
    compressed exchanges take `diloco(sync, every, lr=1, momentum=0)`, which sends differences. It keeps no copy of the
    parameters. The wrong choice for many local steps with adaptive optimizers, where `diloco` does better.

    Args:
        every: Local steps from one average to the next; at least 1.
        sync: Takes the mean.

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
        require_options(self, self.sync, every=1)

    @property
    def period(self) -> int:
        return self.every

    def init(self, params: Tree) -> State:
        return LocalSGDState(0, self.sync.init(params))

    def step(self, params: Leaves, state: LocalSGDState, exchanges: Exchanges) -> tuple[Leaves, State]:
        require_leaves("local_sgd", params)
        require_state("local_sgd", state, LocalSGDState)
        if state.step + 1 < self.every:
            return params, LocalSGDState(state.step + 1, state.inner)
        mean, inner = exchanges.end("params", self.sync, params, state.inner)
        return mean, LocalSGDState(0, inner)
