"""The plan of an outer step: its exchanges, the local steps after which they start and end, and their bytes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fnddp.core import tree
from fnddp.core.sync import State, Sync
from fnddp.core.tree import Leaves, Tree
from fnddp.outer.contract import Exchanges, Outer, outer_of
from fnddp.plan.lower import lower as lower_sync
from fnddp.plan.lower import planned_world
from fnddp.plan.plan import Plan
from fnddp.show.text import count
from fnddp.wire.groups import WorldSize, within


@dataclass(frozen=True)
class PlannedExchange:
    """An exchange that starts after local step `starts` of a period, counted from 1, and ends after step `ends`.

    `ends` is above the period if the exchange ends in the next one.
    """

    name: str
    starts: int
    ends: int
    plan: Plan


@dataclass(frozen=True, repr=False)
class OuterPlan:
    """The exchanges of an outer step in a period of local steps: plain data with a printed form.

    Attributes:
        period, lead: See `Outer`.
        exchanges: The exchanges that start in a period, in this order.
        nbytes: Size of the leaves.
    """

    outer: Outer
    period: int
    lead: int
    exchanges: tuple[PlannedExchange, ...]
    nbytes: int

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that one rank passes to its collectives in a period."""
        return sum(each.plan.wire_bytes for each in self.exchanges)

    @property
    def bytes_per_step(self) -> float:
        """`wire_bytes` for each local step, on average."""
        return self.wire_bytes / self.period

    @property
    def peak_bytes_per_step(self) -> int:
        """Largest number of bytes in the exchanges that start after one local step."""
        starts = {each.starts for each in self.exchanges}
        return max(sum(each.plan.wire_bytes for each in self.exchanges if each.starts == start) for start in starts)

    def __repr__(self) -> str:
        return f"<OuterPlan of {self.outer!r}: {len(self.exchanges)} exchanges in {self.period} steps>"

    def __str__(self) -> str:
        lead = f", from step {self.lead + 1} on" if self.lead else ""
        lines = [repr(self.outer), f"a period of {count(self.period, 'local step')}{lead}", ""]
        events = [(each.starts, 0, _starts(each)) for each in self.exchanges]
        for each in self.exchanges:
            late = f" ({each.ends - self.period} of the next period)" if each.ends > self.period else ""
            if each.ends > each.starts:
                events.append((each.ends, 1, f"step {each.ends}{late}: end {each.name}"))
        lines += [line for _, _, line in sorted(events, key=lambda event: event[:2])]
        whole = self.period * self.nbytes
        reduction = f"{whole / self.wire_bytes:,.1f}x as much" if self.wire_bytes else "none here"
        lines += [
            "",
            f"on the wire: {self.wire_bytes:,} B per rank in a period, {self.bytes_per_step:,.0f} B a step on average, "
            f"{self.peak_bytes_per_step:,} B at once",
            f"the leaves themselves, in each step: {whole:,} B, {reduction}",
        ]
        return "\n".join(lines)


def lower(outer: Outer | str, params: Tree, *, world_size: WorldSize | None = None) -> OuterPlan:
    """Return the plan of a period of `outer`, found by running it on tensors without values.

    Nothing is sent. The plan of each exchange prints and costs itself: `plan.exchanges[0].plan.estimate(link)`.

    Args:
        outer: The outer step.
        params: Any pytree of parameters; meta tensors will do.
        world_size: Number of ranks of the group, or of each group by name, {"node": 8, None: 1024}; see `fnddp.lower`.

    Raises:
        LoweringError: A pipeline reads values or runs foreign code, so it has no static schedule.
        ValueError: `world_size` has no size for a group.

    >>> from fnddp import outer, quantize, two_shot
    >>> params = {f"layers.{i}.weight": torch.empty(256, 256, device="meta") for i in range(4)}
    >>> step = outer.streaming_diloco(quantize(two_shot, bits=4), every=10, fragments=2, delay=3)
    >>> plan = lower(step, params, world_size=8)
    >>> plan
    <OuterPlan of streaming_diloco(quantize(two_shot, bits=4), every=10, fragments=2, delay=3): 2 exchanges in 10 steps>
    >>> plan.exchanges[0].starts, plan.exchanges[0].ends, plan.bytes_per_step
    (5, 8, 15667.2)
    """
    outer = outer_of("outer.lower: outer", outer)
    leaves = {path: torch.empty_like(leaf, device="meta") for path, leaf in tree.flatten(params)[0].items()}
    world = planned_world(outer, outer.groups, world_size)
    recorded = Recorded()
    with torch.no_grad(), within(world):
        state = outer.init(leaves)
        # Until all exchanges that start within one whole period have ended.
        for recorded.step in range(1, outer.lead + 3 * outer.period + 1):
            _, state = outer.step(leaves, state, recorded)
    exchanges = [
        PlannedExchange(
            name,
            starts - outer.lead,
            ends - outer.lead,
            lower_sync(sync, each, state=state, world_size=world.size_of(sync.groups)),
        )
        for starts, ends, name, (sync, each, state) in sorted(recorded.done, key=lambda done: done[:2])
        if outer.lead < starts <= outer.lead + outer.period
    ]
    nbytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves.values())
    return OuterPlan(outer, outer.period, outer.lead, tuple(exchanges), nbytes)


class Recorded(Exchanges):
    """Exchanges that do not run: only the local steps of their starts and ends are recorded. `open`: open before."""

    def __init__(self, open: Iterable[str] = ()) -> None:
        self.step = 1
        self.begun = dict.fromkeys(open, 0)
        self.done: list[tuple[int, int, str, tuple[Sync, Leaves, State]]] = []

    @property
    def starts(self) -> bool:
        """True if an exchange has started in this step."""
        return self.step in [*self.begun.values(), *(starts for starts, *_ in self.done)]

    def begin(self, name: str, sync: Sync, leaves: Leaves, state: State) -> None:
        self.begun[name] = self.step

    def end(self, name: str, sync: Sync, leaves: Leaves, state: State) -> tuple[Leaves, State]:
        self.done.append((self.begun.pop(name, self.step), self.step, name, (sync, leaves, state)))
        return leaves, state


def _starts(each: PlannedExchange) -> str:
    elements = sum(math.prod(leaf.shape) for leaf in each.plan.leaves.values())
    what = "start" if each.ends > each.starts else "exchange"
    collectives = count(len(each.plan.collectives), "collective")
    rounds = f" in {each.plan.rounds} rounds" if each.plan.rounds > 1 else ""
    leaves = count(len(each.plan.leaves), "leaf", "leaves")
    return (
        f"step {each.starts}: {what} {each.name}: {leaves}, {elements:,} parameters, {collectives}{rounds}, "
        f"{each.plan.wire_bytes:,} B"
    )
