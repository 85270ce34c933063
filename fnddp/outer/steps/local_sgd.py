"""Local SGD: ranks train independently and average their parameters once in several steps, on one or several levels."""

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from fnddp.core.options import checked_int, checked_pairs
from fnddp.core.sync import Replicated, State, Sync, require_state
from fnddp.core.tree import Leaves, Tree
from fnddp.outer.contract import Exchanges, Outer, outer, require_options
from fnddp.reducers.all_reduce import allreduce, none
from fnddp.schedules.choose import switch

Levels: TypeAlias = Mapping[int, Sync] | tuple[tuple[int, Sync], ...]


class LocalSGDState(NamedTuple):
    """`step`: local steps (`local_sgd`: since the last average). `inner`: the pipeline's state, or states by period."""

    step: Replicated[int]
    inner: State


@outer
class local_sgd(Outer):
    """Average the parameters every `every` local steps.

    It stores no copy of the parameters. The wrong choice with lossy pipelines, because they round the parameters
    themselves (`diloco(sync, every, lr=1, momentum=0)` sends differences), and for many local steps with adaptive
    optimizers, where `diloco` trains better.

    Args:
        every: Local steps from one average to the next; at least 1.
        sync: The pipeline that takes the mean.

    Raises:
        TypeError, ValueError: `sync` does not average every leaf in every exchange, or `every` is below 1.

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

    def init(self, params: Tree) -> State:
        return LocalSGDState(0, self.sync.init(params))

    def step(self, params: Leaves, state: LocalSGDState, exchanges: Exchanges) -> tuple[Leaves, State]:
        require_state("local_sgd", state, LocalSGDState)
        if state.step + 1 < self.every:
            return params, LocalSGDState(state.step + 1, state.inner)
        mean, inner = exchanges.end("params", self.sync, params, state.inner)
        return mean, LocalSGDState(0, inner)


@outer
class post_local_sgd(Outer):
    """Average gradients until step `start`; from then on, average the parameters every `every` steps.

    Synchronize gradients with the pipeline `gradients`: `before` until `start`, then `intra`, such as the mean over the
    ranks of a node. The wrong choice if the first steps must save communication, too: use `local_sgd`.

    Args:
        start: The first step, counted from 0, without an average of gradients over all ranks.
        every: Steps from one average of the parameters to the next. The first follows step `start`, as in torch.
        sync: The pipeline that averages the parameters.
        before: The pipeline that averages gradients before `start`.
        intra: The pipeline of gradients from `start` on: `none`, or `all_reduce("node")`, with a group for each node.

    Raises:
        TypeError, ValueError: See `local_sgd`; or `start` is negative.

    Source: Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020. Equal to torch's
    `post_localSGD_hook` with a `PeriodicModelAverager(period=every, warmup_steps=start)`.

    >>> from fnddp import all_reduce
    >>> step = post_local_sgd(start=100, every=4, intra=all_reduce("node"))
    >>> step.gradients
    switch({0: allreduce, 100: all_reduce(group='node')})
    """

    start: int
    every: int
    sync: Sync = allreduce
    before: Sync = allreduce
    intra: Sync = none

    def __post_init__(self) -> None:
        super().__post_init__()
        require_options(self, self.sync, start=0, every=1)

    @property
    def gradients(self) -> Sync:
        """The pipeline of the gradients."""
        return switch({0: self.before, self.start: self.intra}) if self.start else self.intra

    @property
    def lead(self) -> int:
        return self.start

    def init(self, params: Tree) -> State:
        return LocalSGDState(0, self.sync.init(params))

    def step(self, params: Leaves, state: LocalSGDState, exchanges: Exchanges) -> tuple[Leaves, State]:
        require_state("post_local_sgd", state, LocalSGDState)
        if state.step < self.start or (state.step - self.start) % self.every:
            return params, LocalSGDState(state.step + 1, state.inner)
        mean, inner = exchanges.end("params", self.sync, params, state.inner)
        return mean, LocalSGDState(state.step + 1, inner)


@outer
class hierarchical_local_sgd(Outer):
    """Average the parameters over the group of the largest period that divides the number of steps.

    `hierarchical_local_sgd({2: all_reduce("node"), 16: allreduce})` averages over the ranks of a node after every
    second step, and over all ranks after every sixteenth. Parameters are then bit-identical on the ranks of that group.
    `simulate` refuses pipelines whose replicated state would differ between groups.

    Args:
        levels: Pipelines that average parameters, by period. The pipeline of the largest period is over all ranks.
        start: Steps before the first average.

    Raises:
        TypeError: `levels` is not a dict of averaging pipelines by period.
        ValueError: `levels` is empty, a period is less than 1 or occurs twice, or `start` is negative.

    Source: torch's `HierarchicalModelAverager(period_group_size_dict, warmup_steps)`. That counts steps from 0, so it
    averages after the first step; this counts from 1.

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
            raise ValueError(f"{owner}: periods must be one or more different numbers, at least 1, got {periods}")
        require_options(self, *(sync for _, sync in levels), start=0)
        object.__setattr__(self, "levels", tuple(levels))

    @property
    def period(self) -> int:
        return math.lcm(*dict(self.levels))

    @property
    def lead(self) -> int:
        return self.start

    def init(self, params: Tree) -> State:
        return LocalSGDState(0, {str(period): sync.init(params) for period, sync in dict(self.levels).items()})

    def step(self, params: Leaves, state: LocalSGDState, exchanges: Exchanges) -> tuple[Leaves, State]:
        require_state("hierarchical_local_sgd", state, LocalSGDState)
        step, inner = state.step + 1, state.inner
        due = [(period, sync) for period, sync in dict(self.levels).items() if step % period == 0 and step > self.start]
        if due:
            period, sync = due[-1]
            params, after = exchanges.end(f"every {period}", sync, params, inner[str(period)])
            inner = {**inner, str(period): after}
        return params, LocalSGDState(step, inner)
