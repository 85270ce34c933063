"""Local SGD on several levels: near ranks average often, far ones seldom."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from fnddp.options import checked_int
from fnddp.outer.contract import Exchanges, Outer, outer, require_at_least, require_means
from fnddp.sync import Replicated, State, Sync, require_state
from fnddp.tree import Leaves, Tree, replaced, require_leaves

Levels: TypeAlias = Mapping[int, Sync] | tuple[tuple[int, Sync], ...]


class HierarchicalLocalSGDState(NamedTuple):
    """`step`: local steps so far. `inner`: the state of each level's pipeline, by its period."""

    step: Replicated[int]
    inner: dict[str, State]


@outer
class hierarchical_local_sgd(Outer):
    """Averages the parameters over the group of the largest period that divides the number of steps.

    `hierarchical_local_sgd({2: all_reduce("node"), 16: allreduce})`: inside a node after every second step, over all
    ranks after every sixteenth. After an average over a group, its parameters are equal to the bit; over all ranks, all
    are. The wrong choice with `simulate` for pipelines with replicated state, which differs by group.

    Args:
        levels: What takes the mean, by its period. The largest one is that of all ranks.
        start: Steps before the first average.

    Raises:
        TypeError: `levels` is not a dict of pipelines that take means, by period.
        ValueError: There are none, a period is less than 1 or occurs twice, or `start` is negative.

    Source: torch's `HierarchicalModelAverager(period_group_size_dict, warmup_steps)`; there steps are counted from 0,
    so that the first one of all is followed by an average, and here from 1.

    >>> from fnddp import all_reduce, allreduce
    >>> hierarchical_local_sgd({2: all_reduce("node"), 16: allreduce})
    hierarchical_local_sgd({2: all_reduce(group='node'), 16: allreduce})
    """

    levels: Levels
    start: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = "hierarchical_local_sgd"
        pairs: Any = self.levels.items() if isinstance(self.levels, Mapping) else self.levels
        if not isinstance(pairs, Iterable) or not all(
            isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], Sync) for pair in pairs
        ):
            raise TypeError(f"{owner}: levels must be a dict of pipelines by period, got {self.levels!r}")
        levels: list[tuple[int, Sync]] = sorted(
            ((checked_int(f"{owner}: a period", n), sync) for n, sync in pairs), key=lambda level: level[0]
        )
        periods = [period for period, _ in levels]
        if not periods or periods[0] < 1 or len(set(periods)) < len(periods):
            raise ValueError(f"{owner}: periods must be different and at least 1, at least one, got {periods}")
        require_at_least(owner, "start", self.start, 0)
        for _, sync in levels:
            require_means(owner, sync)
        object.__setattr__(self, "levels", tuple(levels))

    def __repr__(self) -> str:
        levels = ", ".join(f"{period!r}: {sync!r}" for period, sync in self._pairs)
        return f"hierarchical_local_sgd({{{levels}}}{f', start={self.start!r}' if self.start else ''})"

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
        return HierarchicalLocalSGDState(0, {str(period): sync.init(params) for period, sync in self._pairs})

    def step(self, params: Leaves, state: HierarchicalLocalSGDState, exchanges: Exchanges) -> tuple[Leaves, State]:
        require_leaves("hierarchical_local_sgd", params)
        require_state("hierarchical_local_sgd", state, HierarchicalLocalSGDState)
        done = replaced(state, step=state.step + 1)
        due = [(period, sync) for period, sync in self._pairs if done.step % period == 0]
        if done.step <= self.start or not due:
            return params, done
        period, sync = due[-1]
        mean, inner = exchanges.end(f"every {period}", sync, params, state.inner[str(period)])
        return {path: mean[path] for path in params}, replaced(done, inner={**state.inner, str(period): inner})
