"""Local SGD on several levels: near ranks average often, far ranks seldom."""

import math
from collections.abc import Mapping
from typing import TypeAlias

from fnddp.core.options import checked_int, checked_pairs
from fnddp.core.sync import State, Sync, require_state
from fnddp.core.tree import Leaves, Tree
from fnddp.outer.contract import Exchanges, Outer, outer, require_options
from fnddp.outer.local_sgd import LocalSGDState

Levels: TypeAlias = Mapping[int, Sync] | tuple[tuple[int, Sync], ...]


@outer
class hierarchical_local_sgd(Outer):
    """Average the parameters over the group of the largest period that divides the number of steps.

    `hierarchical_local_sgd({2: all_reduce("node"), 16: allreduce})`: inside a node after every second step, over all
    ranks after every sixteenth. Parameters are then equal to the bit on the ranks of that group. The wrong choice with
    `simulate` for pipelines with replicated state, which differs by group.

    Args:
        levels: Pipelines that take the mean, by period. The largest period is that of all ranks.
        start: Steps before the first average.

    Raises:
        TypeError: `levels` is not a dict of pipelines that take means, by period.
        ValueError: There are none, a period is less than 1 or occurs twice, or `start` is negative.

    Source: torch's `HierarchicalModelAverager(period_group_size_dict, warmup_steps)`; there steps are counted from 0,
    so that an average follows the very first one, and here from 1.

    >>> from fnddp import all_reduce, allreduce
    >>> hierarchical_local_sgd({2: all_reduce("node"), 16: allreduce})
    hierarchical_local_sgd({2: all_reduce(group='node'), 16: allreduce})
    """

    levels: Levels
    start: int = 0

    tables = frozenset({"levels"})

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = "hierarchical_local_sgd"
        pairs = checked_pairs(f"{owner}: levels must be a dict of pipelines by period", self.levels, Sync)
        levels = sorted([(checked_int(f"{owner}: a period", n), sync) for n, sync in pairs], key=lambda pair: pair[0])
        periods = [period for period, _ in levels]
        if not periods or periods[0] < 1 or len(set(periods)) < len(periods):
            raise ValueError(f"{owner}: periods must be different and at least 1, at least one, got {periods}")
        require_options(self, *(sync for _, sync in levels), start=0)
        object.__setattr__(self, "levels", tuple(levels))

    @property
    def _pairs(self) -> tuple[tuple[int, Sync], ...]:
        assert isinstance(self.levels, tuple)  # __post_init__ has turned a dict into pairs
        return self.levels

    @property
    def period(self) -> int:
        return math.lcm(*(period for period, _ in self._pairs))

    @property
    def lead(self) -> int:
        return self.start

    def init(self, params: Tree) -> State:
        return LocalSGDState(0, {str(period): sync.init(params) for period, sync in self._pairs})

    def step(self, params: Leaves, state: LocalSGDState, exchanges: Exchanges) -> tuple[Leaves, State]:
        require_state("hierarchical_local_sgd", state, LocalSGDState)
        step, inner = state.step + 1, state.inner
        due = [(period, sync) for period, sync in self._pairs if step % period == 0 and step > self.start]
        if due:
            period, sync = due[-1]
            params, after = exchanges.end(f"every {period}", sync, params, inner[str(period)])
            inner = {**inner, str(period): after}
        return params, LocalSGDState(step, inner)
