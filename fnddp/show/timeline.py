"""Where everything is in the picture of a plan, from left to right."""

from dataclasses import dataclass

from fnddp.cost.estimate import estimate
from fnddp.cost.link import duration
from fnddp.cost.queue import Links
from fnddp.plan.ir import Collective
from fnddp.plan.schedule import Schedule
from fnddp.show.names import dtype
from fnddp.show.runs import Run, merged, runs
from fnddp.show.text import size

MARGIN, GUTTER, GAP = 20, 84, 10
NARROWEST, LONGEST = 104, 140  # widths: of a box, of the longest bar
CHARACTER = 0.6  # the width of a character, in units of the font's size; most are narrower


@dataclass(frozen=True)
class Box:
    """Where a run is computed, from left to right."""

    run: Run
    left: float
    width: float

    @property
    def bucket(self) -> int | None:
        carriers = [*self.run.waits, *([] if self.run.launches is None else [self.run.launches])]
        return carriers[-1].bucket if carriers else None


@dataclass(frozen=True)
class Bar:
    """Where a collective is on the wire, and what stands below it."""

    collective: Collective
    left: float
    width: float
    label: tuple[str, str]

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def free_from(self) -> float:
        return self.left + max(self.width, *(CHARACTER * 11 * len(line) for line in self.label)) + GAP


@dataclass(frozen=True)
class Timeline:
    """Where slots begin, the boxes, the bars by their collective's index, and where all of it ends."""

    slots: dict[int, float]
    boxes: list[Box]
    bars: dict[int, Bar]
    right: float


def lay_out(plan: Schedule, link: Links | None) -> Timeline:
    """A run follows the one before it and what it waits for; the wire of each group is a queue."""
    lengths = _lengths(plan, link)
    slots: dict[int, float] = {}
    boxes: list[Box] = []
    bars: dict[int, Bar] = {}
    free: dict[str | None, float] = {}
    x: float = MARGIN + GUTTER
    for run in merged(runs(plan)):
        if run.slot not in slots:
            slots[run.slot] = x
            x += GAP
        x = max([x, *(bars[c.index].right + GAP for c in run.waits)])
        width = max(NARROWEST, CHARACTER * 12 * len(run.kind) + 2 * GAP)
        boxes.append(Box(run, x, width))
        x += width + GAP
        if run.launches is not None:
            c, (length, label) = run.launches, lengths[run.launches.index]
            left = max(x - GAP, free.get(c.group, 0.0))
            bars[c.index] = Bar(c, left, length, (f"{c.name}, round {c.depth + 1}", label))
            free[c.group] = bars[c.index].free_from
    return Timeline(slots, boxes, bars, max([x, *free.values(), MARGIN + GUTTER + 400]))


def _lengths(plan: Schedule, link: Links | None) -> list[tuple[float, str]]:
    """How long each collective is drawn, and what it says: bytes, with a link also seconds."""
    labels = [f"{dtype(c)}, {size(c.wire_bytes)}" for c in plan.collectives]
    amounts: list[float] = [c.wire_bytes for c in plan.collectives]
    if link is not None:
        amounts = [cost.seconds for cost in estimate(plan.collectives, link).collectives]
        labels = [f"{label}, {duration(seconds)}" for label, seconds in zip(labels, amounts, strict=True)]
    most = max(amounts, default=0) or 1
    return [(max(4.0, LONGEST * amount / most), label) for amount, label in zip(amounts, labels, strict=True)]
