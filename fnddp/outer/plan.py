"""The plan of an outer step: after which local steps what starts, what ends, and what travels."""

import math
from dataclasses import dataclass, field

import torch

from fnddp import tree
from fnddp.outer.contract import Outer
from fnddp.plan.lower import lower as lower_sync
from fnddp.plan.plan import Plan
from fnddp.plan.world import planned_world
from fnddp.show.text import count
from fnddp.sync import State, Sync
from fnddp.tree import Leaves, Tree
from fnddp.wire.groups import WorldSize, within


@dataclass(frozen=True)
class Planned:
    """One exchange of an outer step.

    Attributes:
        name: Of the fragment or the tree that it is of.
        starts: The local step of a period, counted from 1, after which it starts.
        ends: That after which it ends; above the period for the next one.
        plan: What it computes and sends, in one step of the pipeline.
    """

    name: str
    starts: int
    ends: int
    plan: Plan


@dataclass(frozen=True, repr=False)
class OuterPlan:
    """What an outer step does in a period of local steps: inert data that prints itself.

    Attributes:
        outer: The outer step.
        period: Local steps after which it recurs.
        lead: Local steps before the first period.
        exchanges: What a period has of them, in the order in which they start.
        nbytes: Of the leaves.
    """

    outer: Outer
    period: int
    lead: int
    exchanges: tuple[Planned, ...]
    nbytes: int

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that one rank hands to its collectives in a period."""
        return sum(each.plan.wire_bytes for each in self.exchanges)

    @property
    def bytes_per_step(self) -> float:
        """The same for each local step, on average."""
        return self.wire_bytes / self.period

    @property
    def peak_bytes_per_step(self) -> int:
        """The most that starts after one local step."""
        starts = {each.starts for each in self.exchanges}
        return max(sum(each.plan.wire_bytes for each in self.exchanges if each.starts == start) for start in starts)

    def __repr__(self) -> str:
        return f"<OuterPlan of {self.outer!r}: {len(self.exchanges)} exchanges in {self.period} steps>"

    def __str__(self) -> str:
        lead = f", from step {self.lead + 1} on" if self.lead else ""
        lines = [repr(self.outer), f"a period of {count(self.period, 'local step')}{lead}", ""]
        events = [(each.starts, 0, _starts(each)) for each in self.exchanges]
        events += [(each.ends, 1, _ends(each, self.period)) for each in self.exchanges if each.ends > each.starts]
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


def lower(outer: Outer, params: Tree, *, world_size: WorldSize | None = None) -> OuterPlan:
    """What `outer` does in a period: found by running it on tensors without values, exchange by exchange.

    Nothing is sent. The plan of each exchange prints, draws and costs itself: `plan.exchanges[0].plan.estimate(link)`.

    Args:
        outer: The outer step.
        params: Any pytree of parameters; meta tensors will do.
        world_size: As `fnddp.lower` takes it: of the group, or of each by name, {"node": 8, None: 1024}.

    Raises:
        LoweringError: A pipeline reads values or runs foreign code, so it has no static schedule.
        ValueError: `world_size` does not give the size of each group.

    >>> from fnddp import outer, quantize, two_shot
    >>> params = {f"layers.{i}.weight": torch.empty(256, 256, device="meta") for i in range(4)}
    >>> step = outer.streaming_diloco(quantize(two_shot, bits=4), every=10, fragments=2, delay=3)
    >>> print(lower(step, params, world_size=8))
    streaming_diloco(quantize(two_shot, bits=4), every=10, fragments=2, delay=3)
    a period of 10 local steps
    <BLANKLINE>
    step 5: start 0: 2 leaves, 131,072 parameters, 2 collectives in 2 rounds, 78,336 B
    step 8: end 0
    step 10: start 1: 2 leaves, 131,072 parameters, 2 collectives in 2 rounds, 78,336 B
    step 13 (3 of the next period): end 1
    <BLANKLINE>
    on the wire: 156,672 B per rank in a period, 15,667 B a step on average, 78,336 B at once
    the leaves themselves, in each step: 10,485,760 B, 66.9x as much
    """
    leaves = {path: torch.empty_like(leaf, device="meta") for path, leaf in tree.flatten(params)[0].items()}
    world = planned_world(outer, outer.groups, world_size)
    noted = _Noted()
    with torch.no_grad(), within(world):
        state = outer.init(leaves)
        # To where what has started in a whole period has ended as well.
        for noted.step in range(1, outer.lead + 3 * outer.period + 1):
            stepped, state = outer.step(leaves, state, noted)
            assert stepped.keys() == leaves.keys()
    first = outer.lead + 1
    exchanges = [
        Planned(
            each.name,
            each.starts - outer.lead,
            each.ends - outer.lead,
            lower_sync(each.sync, each.leaves, state=each.state, world_size=world.size_of(each.sync.groups)),
        )
        for each in sorted(noted.done, key=lambda each: (each.starts, each.ends))
        if first <= each.starts < first + outer.period
    ]
    nbytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves.values())
    return OuterPlan(outer, outer.period, outer.lead, tuple(exchanges), nbytes)


@dataclass
class _Exchange:
    name: str
    starts: int
    ends: int
    sync: Sync
    leaves: Leaves
    state: State


@dataclass
class _Noted:
    """Exchanges that are written down, with the local steps after which they start and end."""

    step: int = 0
    begun: dict[str, int] = field(default_factory=dict[str, int])
    done: list[_Exchange] = field(default_factory=list[_Exchange])

    def begin(self, name: str, sync: Sync, leaves: Leaves, state: State) -> None:
        self.begun[name] = self.step

    def end(self, name: str, sync: Sync, leaves: Leaves, state: State) -> tuple[Leaves, State]:
        starts = self.begun.pop(name, self.step)
        self.done.append(_Exchange(name, starts, self.step, sync, leaves, state))
        return leaves, state


def _starts(each: Planned) -> str:
    elements = sum(math.prod(leaf.shape) for leaf in each.plan.leaves.values())
    what = "start" if each.ends > each.starts else "exchange"
    collectives = count(len(each.plan.collectives), "collective")
    rounds = f" in {each.plan.rounds} rounds" if each.plan.rounds > 1 else ""
    leaves = count(len(each.plan.leaves), "leaf", "leaves")
    return (
        f"step {each.starts}: {what} {each.name}: {leaves}, {elements:,} parameters, {collectives}{rounds}, "
        f"{each.plan.wire_bytes:,} B"
    )


def _ends(each: Planned, period: int) -> str:
    late = f" ({each.ends - period} of the next period)" if each.ends > period else ""
    return f"step {each.ends}{late}: end {each.name}"
