"""The steps that a pipeline repeats in the long run, with a plan for each kind of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnddp.core import tree
from fnddp.core.state import AFTER_ALL_WARM_UPS
from fnddp.core.sync import State, Sync
from fnddp.core.tree import Tree
from fnddp.plan.lower import lower
from fnddp.plan.plan import Plan
from fnddp.plan.world import planned_world
from fnddp.wire.groups import WorldSize, within, world_size

LONGEST = 10_000
"""Steps within which counters come back to where they were. Where they do not, they are the period."""
AHEAD = 64
"""Steps looked ahead to find that a counter selects no phase."""


@dataclass(frozen=True)
class Recurring:
    """Steps of a period that are alike: their number, their plan, and a state with the counters of one of them."""

    plan: Plan
    state: State
    steps: int


def period(
    sync: Sync,
    params: Tree,
    *,
    world_size: WorldSize | None = None,
    arrival: Sequence[str] | None = None,
    bucket_cap_mb: float = 25,
) -> tuple[Recurring, ...]:
    """Return the steps that a pipeline repeats after all warm-ups, each kind once, as they first come.

    Most pipelines do the same in every step. `every(10, ...)` does not, nor do the `refresh` of `powersgd` and
    `measure`: they cost a mean over the period, which no single step does. The wrong choice for the first steps of a
    training: lower those, with their state.

    Args:
        sync, params, world_size, arrival, bucket_cap_mb: As `lower` takes them.

    Raises:
        LoweringError, ValueError: As `lower`.

    >>> import torch
    >>> from fnddp import allreduce, error_feedback, every
    >>> params = {"w": torch.empty(1000, device="meta")}
    >>> for each in period(error_feedback(every(10, allreduce)), params, world_size=8):
    ...     print(each.steps, each.plan.wire_bytes)
    9 0
    1 4000
    """
    walk = _Walk(sync, params, world_size, arrival, bucket_cap_mb)
    late = [AFTER_ALL_WARM_UPS for _ in walk.first]
    reached = walk.until_it_repeats(late)
    # Where warm-ups are over for good stays late; what starts again does so from its own first step.
    begin = [first if any(at[i] < late[i] for at in reached) else late[i] for i, first in enumerate(walk.first)]
    repeated = walk.that_repeat(walk.until_it_repeats(begin))
    chosen = [walk.index(at) for at in repeated]
    return tuple(
        Recurring(walk.plans[index], walk.state(repeated[chosen.index(index)]), steps)
        for index, steps in Counter(chosen).items()
    )


class _Walk:
    """Counters from step to step, and the plans that they lead to."""

    def __init__(
        self, sync: Sync, params: Tree, size: WorldSize | None, arrival: Sequence[str] | None, bucket_cap_mb: float
    ) -> None:
        self._world, self._sync, self._params = planned_world(sync, sync.groups, size), sync, params
        self._options: Any = {"world_size": size, "arrival": arrival, "bucket_cap_mb": bucket_cap_mb}
        leaves, _ = tree.flatten(params)
        with within(self._world):
            self._parts, self._spec = tree.flatten_any(sync.init(leaves))
        self.first: list[int] = [part for part in self._parts if not isinstance(part, Tensor)]
        self.plans: list[Plan] = []

    def state(self, counters: Sequence[int]) -> State:
        left = iter(counters)
        return tree.unflatten_any(self._spec, [p if isinstance(p, Tensor) else next(left) for p in self._parts])

    def index(self, counters: Sequence[int]) -> int:
        """Return the place among `plans` of the one for these counters."""
        for index, plan in enumerate(self.plans):
            if plan.phase.holds(self._numbers(plan, counters)):
                return index
        self.plans.append(lower(self._sync, self._params, state=self.state(counters), **self._options))
        return len(self.plans) - 1

    def until_it_repeats(self, counters: Sequence[int]) -> list[Sequence[int]]:
        """Return the counters of each step from these on, the last like one before."""
        walked, seen = [counters], {self._key(counters)}
        while len(walked) <= LONGEST:
            plan = self.plans[self.index(walked[-1])]
            walked.append(plan.following(self._numbers(plan, walked[-1])))
            if (key := self._key(walked[-1])) in seen:
                break
            seen.add(key)
        return walked

    def that_repeat(self, walked: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the steps from the one that is like the last on, without the last."""
        keys = [self._key(at) for at in walked]
        return walked[keys.index(keys[-1]) : -1] or walked[:-1]

    def _key(self, counters: Sequence[int]) -> tuple[int | None, ...]:
        """Return a key that is equal for steps from which all goes on alike."""
        plan = self.plans[self.index(counters)]
        return tuple(None if self._only_grows(plan, counters, i) else at for i, at in enumerate(counters))

    def _only_grows(self, plan: Plan, counters: Sequence[int], i: int) -> bool:
        """Return whether counter `i` is past all warm-ups and selects no phase (it may draw random numbers)."""
        if counters[i] < AFTER_ALL_WARM_UPS:
            return False
        later = ([*counters[:i], counters[i] + k, *counters[i + 1 :]] for k in range(1, AHEAD))
        return all(plan.phase.holds(self._numbers(plan, each)) for each in later)

    def _numbers(self, plan: Plan, counters: Sequence[int]) -> list[int]:
        with within(self._world):
            return [*counters, *map(world_size, plan.phase.groups)]
