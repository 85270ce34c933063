"""The period of a pipeline: the steps that it repeats in the long run, and a plan for each kind of step."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnddp.core import tree
from fnddp.core.parse import pipeline_of
from fnddp.core.state import AFTER_ALL_WARM_UPS
from fnddp.core.sync import State, Sync
from fnddp.core.tree import Tree
from fnddp.ir.plan_data import LONGEST
from fnddp.plan.lower import lower, planned_world
from fnddp.plan.plan import Plan
from fnddp.wire.groups import WorldSize, within

AHEAD = 64
"""Number of steps. A counter that does not change the phase in so many steps counts as independent of the phase."""


@dataclass(frozen=True)
class Recurring:
    """The steps of a period that share a plan: the plan, the state before the first of them, and their number."""

    plan: Plan
    state: State
    steps: int


def period(
    sync: Sync | str,
    params: Tree,
    *,
    world_size: WorldSize | None = None,
    arrival: Sequence[str] | None = None,
    bucket_cap_mb: float = 25,
) -> tuple[Recurring, ...]:
    """Return each kind of step that a pipeline repeats after all warm-ups, in order of occurrence; see `lower`.

    Most pipelines do the same in every step. `every(10, ...)` does not, nor do `powersgd` and `measure` with `refresh`:
    their cost is the mean over the period, not the cost of one step. For the first steps of a training, call `lower`
    with their state instead.

    >>> import torch
    >>> from fnddp import allreduce, error_feedback, every
    >>> params = {"w": torch.empty(1000, device="meta")}
    >>> for each in period(error_feedback(every(10, allreduce)), params, world_size=8):
    ...     print(each.steps, each.plan.wire_bytes)
    9 0
    1 4000
    """
    walk = _Walk(pipeline_of("period: sync", sync), params, world_size, arrival, bucket_cap_mb)
    late = AFTER_ALL_WARM_UPS
    reached, _ = walk.until_it_repeats([late for _ in walk.first])
    # Counters that only grow begin past all warm-ups; counters that restart begin at their own first number.
    begin = [first if any(at[i] < late for at in reached) else late for i, first in enumerate(walk.first)]
    walked, start = walk.until_it_repeats(begin)
    repeated = walked[start:]
    chosen = [walk.index(at) for at in repeated]
    return tuple(
        Recurring(walk.plans[index], walk.state(repeated[chosen.index(index)]), steps)
        for index, steps in Counter(chosen).items()
    )


class _Walk:
    """A walk that follows the counters of a pipeline from step to step, and makes the plans that they select."""

    def __init__(
        self, sync: Sync, params: Tree, size: WorldSize | None, arrival: Sequence[str] | None, bucket_cap_mb: float
    ) -> None:
        self._sync, self._params = sync, params
        self._options: Any = {"world_size": size, "arrival": arrival, "bucket_cap_mb": bucket_cap_mb}
        leaves, _ = tree.flatten(params)
        with within(planned_world(sync, sync.groups, size)):
            self._parts, self._spec = tree.flatten_any(sync.init(leaves))
        self.first: list[int] = [part for part in self._parts if not isinstance(part, Tensor)]
        self.plans: list[Plan] = []

    def state(self, counters: Sequence[int]) -> State:
        left = iter(counters)
        return tree.unflatten_any(self._spec, [p if isinstance(p, Tensor) else next(left) for p in self._parts])

    def index(self, counters: Sequence[int]) -> int:
        """Return the index in `plans` of the plan for these counters; add the plan if it is new."""
        for index, plan in enumerate(self.plans):
            if plan.phase.holds(self._numbers(plan, counters)):
                return index
        self.plans.append(lower(self._sync, self._params, state=self.state(counters), **self._options))
        return len(self.plans) - 1

    def until_it_repeats(self, counters: Sequence[int]) -> tuple[Sequence[Sequence[int]], int]:
        """Return the counters of each step from `counters` on, before the first repetition, and the index it repeats.

        If no step recurs within `LONGEST` steps, the index is 0.
        """
        walked: dict[Any, Sequence[int]] = {}
        while len(walked) < LONGEST and (key := self._key(counters)) not in walked:
            walked[key] = counters
            plan = self.plans[self.index(counters)]
            counters = plan.following(self._numbers(plan, counters))
        key = self._key(counters)
        return list(walked.values()), list(walked).index(key) if key in walked else 0

    def _key(self, counters: Sequence[int]) -> tuple[int | None, ...]:
        """Return a key that is equal for two steps if they are followed by the same steps."""
        plan = self.plans[self.index(counters)]
        return tuple(None if self._only_grows(plan, counters, i) else at for i, at in enumerate(counters))

    def _only_grows(self, plan: Plan, counters: Sequence[int], i: int) -> bool:
        """Return True if counter `i` is past all warm-ups and selects no phase. (It may seed random numbers.)"""
        if counters[i] < AFTER_ALL_WARM_UPS:
            return False
        later = ([*counters[:i], counters[i] + k, *counters[i + 1 :]] for k in range(1, AHEAD))
        return all(plan.phase.holds(self._numbers(plan, each)) for each in later)

    def _numbers(self, plan: Plan, counters: Sequence[int]) -> list[int]:
        return [*counters, *plan.numbers[len(counters) :]]
