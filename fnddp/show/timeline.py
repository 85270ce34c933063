"""The layout of a plan's picture, from left to right."""

from dataclasses import dataclass
from statistics import median

from fnddp.cost.estimate import estimate
from fnddp.cost.link import duration
from fnddp.cost.queue import Links
from fnddp.ir.program import Collective
from fnddp.ir.schedule import Schedule
from fnddp.show.names import dtype
from fnddp.show.runs import Run, runs
from fnddp.show.text import size

MARGIN, GUTTER, GAP, SEAM = 20, 84, 10, 1  # a seam separates one bar from the next
NARROWEST = 104  # the width of a box
SLOT = NARROWEST + 2 * GAP  # how far apart slots with a box each begin
CHARACTER = 0.6  # the width of a character, in units of the font's size; most are narrower
WIDEST = 1000  # where a line of the picture ends, and the next one begins
LONGEST = WIDEST - MARGIN - GUTTER - SLOT  # of a bar in a row


@dataclass(frozen=True)
class Box:
    """A run that is computed."""

    run: Run
    row: int
    left: float
    width: float

    @property
    def bucket(self) -> int | None:
        carriers = [*self.run.waits, *([] if self.run.launches is None else [self.run.launches])]
        return carriers[-1].bucket if carriers else None


@dataclass(frozen=True)
class Bar:
    """A collective on the wire, and the words below it."""

    collective: Collective
    row: int
    left: float
    width: float
    label: tuple[str, ...]

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def free_from(self) -> float:
        """Position at which the next bar may begin: a queue has gaps only where the words below bars need them."""
        words = max(CHARACTER * 11 * len(line) for line in self.label)
        return self.left + max(self.width + SEAM, words + GAP)


@dataclass(frozen=True)
class Timeline:
    """Slots, which begin again in the row in which they go on; boxes; bars by their collective's index; and rows."""

    slots: list[tuple[int, int, float]]  # number, row, left
    boxes: list[Box]
    bars: dict[int, Bar]
    rows: int
    right: float


def lay_out(plan: Schedule, link: Links | None) -> Timeline:
    """Place each run after the one before it and what it waits for, and each group's bars in a queue; wrap rows."""
    start: float = MARGIN + GUTTER
    lengths = _lengths(plan, link)
    slots: list[tuple[int, int, float]] = []
    boxes: list[Box] = []
    bars: dict[int, Bar] = {}
    free: dict[str | None, float] = {}  # in this row
    row, x, right = 0, start, MARGIN + GUTTER + 400.0

    def bar_of(c: Collective, earliest: float) -> Bar:
        length, label = lengths[c.index]
        return Bar(c, row, max(earliest, free.get(c.group, 0.0)), length, (f"{c.name}, round {c.depth + 1}", *label))

    for run in runs(plan):
        waited = [bars[c.index].right + GAP for c in run.waits if bars[c.index].row == row]
        width = max(NARROWEST, CHARACTER * 12 * len(run.kind) + 2 * GAP)
        begins = not slots or slots[-1][0] != run.slot
        left = max([x + GAP * begins, *waited])
        end = 0.0 if run.launches is None else bar_of(run.launches, left + width).free_from
        if max(left + width, end) > WIDEST and x > start:
            row, x, free, begins = row + 1, start, {}, True
            left = x + GAP
        if begins:
            slots.append((run.slot, row, x))
        boxes.append(Box(run, row, left, width))
        x = left + width + GAP
        if run.launches is not None:
            bar = bars[run.launches.index] = bar_of(run.launches, left + width)
            free[run.launches.group] = bar.free_from
        right = max([right, x, *free.values()])
    return Timeline(slots, boxes, bars, row + 1, right)


def _lengths(plan: Schedule, link: Links | None) -> list[tuple[float, tuple[str, ...]]]:
    """Return the length of each bar, and its label: bytes, with a link also seconds."""
    labels = [(dtype(c), size(c.wire_bytes)) for c in plan.collectives]
    amounts: list[float] = [c.wire_bytes for c in plan.collectives]
    if link is not None:
        amounts = [cost.seconds for cost in estimate(plan.collectives, link).collectives]
        labels = [(nbytes, duration(seconds)) for (_, nbytes), seconds in zip(labels, amounts, strict=True)]
    # A bar like most fills the time of a slot, so that a wire that is always busy looks so.
    scale = min(SLOT / (median(amounts) or 1), LONGEST / (max(amounts) or 1)) if amounts else 1.0
    return [(max(4.0, scale * amount), label) for amount, label in zip(amounts, labels, strict=True)]
