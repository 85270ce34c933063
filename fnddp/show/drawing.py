"""A plan as a picture: arriving gradients, computation and the wire, slot by slot, from left to right."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import TypeAlias

from fnddp.cost.estimate import Links, estimate
from fnddp.cost.link import duration
from fnddp.ir.plan_data import PlanData
from fnddp.ir.program import Collective
from fnddp.show.text import (
    Merged,
    collective,
    conditions_of,
    count,
    dtype,
    footer,
    header,
    runs,
    show,
    size,
    some,
    text,
)

MARGIN, GUTTER, GAP, SEAM = 20, 84, 10, 1  # a seam separates two bars
NARROWEST = 104  # the width of a box
SLOT = NARROWEST + 2 * GAP  # the distance between slots with one box each
CHARACTER = 0.6  # the width of a character, in units of the font's size; most are narrower
WIDEST = 1000  # the width at which rows of the picture wrap
LONGEST = WIDEST - MARGIN - GUTTER - SLOT  # of a bar in a row


INK, SOFT, LINE, PAPER = "#263238", "#546e7a", "#cfd8dc", "#ffffff"
ON_DARK = {INK: "#eceff1", SOFT: "#b0bec5", LINE: "#455a64", PAPER: "#1e2429"}
# Renderers without style sheets use the attributes of elements.
DARK = "<style>@media (prefers-color-scheme: dark) {{{}}}</style>".format(
    " ".join(
        f'.fnddp-plan [{where}="{light}"] {{{where}: {dark}}}'
        for light, dark in ON_DARK.items()
        for where in ("fill", "stroke")
    )
)
# Okabe and Ito's palette, distinct for colour-blind readers too: the buckets take turns.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")

LANE, WIRE = 76, 92  # heights of lanes: of boxes, of a wire
INSET, BOX, BAR = 12, 44, 18  # heights: the space above a box in its lane, a box, a collective's bar
BETWEEN, STUB = 44, 16  # heights: between rows, of an arrow from another row

Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A run of segments, drawn as a box."""

    run: Merged
    row: int
    left: float
    width: float

    @property
    def bucket(self) -> int | None:
        carriers = [*self.run.waits, *([] if self.run.launches is None else [self.run.launches])]
        return carriers[-1].bucket if carriers else None


@dataclass(frozen=True)
class Bar:
    """A collective, drawn as a bar on the wire with lines of text below."""

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
        """Position at which the next bar may begin: a queue has gaps only where labels below bars need them."""
        words = max(CHARACTER * 11 * len(line) for line in self.label)
        return self.left + max(self.width + SEAM, words + GAP)


@dataclass(frozen=True)
class Timeline:
    """The layout: slots, repeated in each row that they extend to; boxes; bars by index of the collective; rows."""

    slots: list[tuple[int, int, float]]  # number, row, left
    boxes: list[Box]
    bars: dict[int, Bar]
    rows: int
    right: float


def lay_out(plan: PlanData, link: Links | None) -> Timeline:
    """Place each run after the last run and its collectives, and each group's bars in a queue; wrap rows."""
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


def _lengths(plan: PlanData, link: Links | None) -> list[tuple[float, tuple[str, ...]]]:
    """Return the length of each bar, and its label: bytes, with a link also seconds."""
    labels = [(dtype(c), size(c.wire_bytes)) for c in plan.collectives]
    amounts: list[float] = [c.wire_bytes for c in plan.collectives]
    if link is not None:
        amounts = [cost.seconds for cost in estimate(plan.collectives, link).collectives]
        labels = [(nbytes, duration(seconds)) for (_, nbytes), seconds in zip(labels, amounts, strict=True)]
    # A bar of median length fills a slot, so that a wire that is always busy looks busy.
    scale = min(SLOT / (median(amounts) or 1), LONGEST / (max(amounts) or 1)) if amounts else 1.0
    return [(max(4.0, scale * amount), label) for amount, label in zip(amounts, labels, strict=True)]


def to_svg(plan: PlanData, link: Links | None = None) -> str:
    """See `Plan.to_svg`."""
    layout = lay_out(plan, link)
    title, facts = (_wrapped(lines, layout.right) for lines in (header(plan), footer(plan)))
    top = MARGIN + 20 * len(title) + 34
    lanes = Lanes(top, {group: 2 * LANE + i * WIRE for i, group in enumerate(plan.groups)})
    bottom = lanes.top_of(layout.rows) - BETWEEN * (layout.rows > 0)
    width, height = layout.right + MARGIN, bottom + 20 * len(facts) + MARGIN
    shapes = [
        *(_text(MARGIN, MARGIN + 14 + 20 * i, line, 13, SOFT if i else INK) for i, line in enumerate(title)),
        *_frame(plan, layout, lanes),
        *_boxes(plan, layout, lanes),
        *_collectives(plan, layout, lanes),
        *_arrows(layout, lanes),
        *(_text(MARGIN, bottom + 20 + 20 * i, line, 12, SOFT) for i, line in enumerate(facts)),
    ]
    # Its own background card, so that it is readable on light and on dark pages.
    card = f'<rect width="{width:.0f}" height="{height:.0f}" rx="10" fill="{PAPER}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" class="fnddp-plan" '
        f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'font-family="DejaVu Sans, Verdana, Arial, sans-serif">\n'
        + "\n".join([f"<title>{escape(f'The plan of {plan.sync!r}')}</title>", DARK, card, *shapes, "</svg>\n"])
    )


def to_html(plan: PlanData) -> str:
    """Return the picture, with the text folded away."""
    folded = f"<details><summary>as text</summary><pre>{escape(show(plan))}</pre></details>"
    return f'<div style="overflow-x: auto">{to_svg(plan)}</div>{folded}'


@dataclass(frozen=True)
class Lanes:
    """The tops of the lanes of each row: gradients, compute, and the wire of each group."""

    top: float
    wires: Mapping[str | None, float]  # below the top of a row

    def top_of(self, row: int) -> float:
        return self.top + row * (2 * LANE + len(self.wires) * WIRE + BETWEEN)

    def wire(self, row: int, group: str | None) -> float:
        return self.top_of(row) + self.wires[group]


def _frame(plan: PlanData, layout: Timeline, lanes: Lanes) -> Iterator[str]:
    fits = int((GUTTER - 6) / (12 * CHARACTER))
    arriving = set(plan.buckets.values())
    wires = {y: "wire" if len(lanes.wires) == 1 else f"wire {group or 'default'}" for group, y in lanes.wires.items()}
    for row in range(layout.rows):
        for below, name in {0: "gradients", LANE: "compute", **wires}.items():
            y = lanes.top_of(row) + below
            yield f'<path d="M{MARGIN} {y}H{layout.right:.0f}" stroke="{LINE}"/>'
            yield _text(MARGIN, y + 28, name if len(name) <= fits else f"{name[: fits - 1]}…", 12, SOFT)
    for slot, row, x in layout.slots:
        top = lanes.top_of(row)
        yield f'<path d="M{x:.1f} {top - 20}V{top + 2 * LANE}" stroke="{LINE}" stroke-dasharray="3 3"/>'
        yield _text(x + 6, top - 8, f"slot {slot}" if slot in arriving else f"slot {slot}: drain", 12, SOFT)


def _boxes(plan: PlanData, layout: Timeline, lanes: Lanes) -> Iterator[str]:
    for box in layout.boxes:
        run, y = box.run, lanes.top_of(box.row) + INSET
        if run.needs:
            first, last = plan.buckets[run.needs[0]], plan.buckets[run.needs[-1]]
            label = f"bucket {first}" if first == last else f"buckets {first}-{last}"
            nbytes = size(sum(plan.leaves[path].nbytes for path in run.needs))
            hover = some([text(path) for path in run.needs], "gradients")
            yield _box((box.left, y), box.width, _colour(first), (label, nbytes), hover)
            yield _arrow((box.left + 16, y + BOX), (box.left + 16, y + LANE), _colour(first))
        label = run.kind, count(len(run.operations), "operation")
        yield _box((box.left, y + LANE), box.width, _colour(box.bucket), label, "; ".join(conditions_of(run)))


def _box(corner: Point, width: float, colour: str, label: tuple[str, str], hover: str) -> str:
    x, y = corner
    return (
        f'<g><title>{escape(hover)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BOX}" rx="5" '
        f'fill="{colour}" fill-opacity="0.15" stroke="{colour}"/>'
        f"{_text(x + 8, y + 18, label[0], 12, INK)}{_text(x + 8, y + 35, label[1], 11, SOFT)}</g>"
    )


def _collectives(plan: PlanData, layout: Timeline, lanes: Lanes) -> Iterator[str]:
    for bar in layout.bars.values():
        c, y = bar.collective, lanes.wire(bar.row, bar.collective.group) + 16
        words = list(enumerate(bar.label))
        yield (
            f'<g class="collective"><title>{escape(collective(c, plan))}</title><rect x="{bar.left:.1f}" y="{y:.1f}" '
            f'width="{bar.width:.1f}" height="{BAR}" rx="2" fill="{_colour(c.bucket)}"/>'
            + "".join(_text(bar.left, y + BAR + 14 + 15 * i, line, 11, SOFT if i else INK) for i, line in words)
            + "</g>"
        )


def _arrows(layout: Timeline, lanes: Lanes) -> Iterator[str]:
    """Yield arrows to the wire, and from it to waiting boxes; of arrows between rows only the ends."""
    for box in layout.boxes:
        below = lanes.top_of(box.row) + LANE + INSET + BOX
        apart = min(12.0, (box.width - 44) / max(1, len(box.run.waits) - 1))
        for i, c in enumerate(box.run.waits):
            bar, x = layout.bars[c.index], box.left + 16 + apart * i
            start = (bar.right - 2, lanes.wire(bar.row, c.group) + 16) if bar.row == box.row else (x, below + STUB)
            yield _arrow(start, (x, below), _colour(c.bucket))
        if box.run.launches is not None:
            c = box.run.launches
            end = layout.bars[c.index].left + 2, lanes.wire(box.row, c.group) + 16
            yield _arrow((box.left + box.width - 10, below), end, _colour(c.bucket))


def _arrow(start: Point, end: Point, colour: str) -> str:
    (x, y), (to_x, to_y) = start, end
    tip = 5 if to_y > y else -5  # down or up
    middle = (y + to_y - tip) / 2
    return (
        f'<path d="M{x:.1f} {y:.1f}C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y - tip:.1f}" '
        f'fill="none" stroke="{colour}" stroke-width="1.6"/>'
        f'<path d="M{to_x - 4:.1f} {to_y - tip:.1f}h8l-4 {tip}z" fill="{colour}"/>'
    )


def _colour(bucket: int | None) -> str:
    return SOFT if bucket is None else COLOURS[bucket % len(COLOURS)]


def _wrapped(lines: Sequence[str], right: float) -> list[str]:
    fits = int((right - MARGIN) / (13 * CHARACTER))
    return [part for line in lines for part in textwrap.wrap(line, fits)]


def _text(x: float, y: float, line: str, height: int, colour: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{height}" fill="{colour}">{escape(line)}</text>'
