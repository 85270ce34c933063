"""A plan as a picture: what arrives, what is computed and what is on the wire, slot by slot, from left to right."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, TypeAlias

from fnddp.plan.cost import Links, estimate
from fnddp.plan.ir import Collective
from fnddp.plan.link import duration
from fnddp.plan.show import Run, count, dtype, footer, header, merged, runs, show, size, some, text

if TYPE_CHECKING:
    from fnddp.plan.plan import Plan

INK, SOFT, LINE, PAPER = "#263238", "#546e7a", "#cfd8dc", "#ffffff"
# Okabe and Ito's palette, distinct for colour-blind readers too: a colour for each bucket, over and over.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")

MARGIN, GUTTER, GAP = 20, 84, 10
LANE, INSET, BOX, BAR = 76, 12, 44, 18  # heights: a lane, what is free above a box in it, a box, a collective's bar
NARROWEST, LONGEST = 104, 260  # widths: of a box, of the longest bar
CHARACTER = 0.6  # the width of a character, in units of the font's size; most are narrower

Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class _Box:
    """Where a run is computed, from left to right."""

    run: Run
    left: float
    width: float

    @property
    def bucket(self) -> int | None:
        carriers = [*self.run.waits, *([] if self.run.launches is None else [self.run.launches])]
        return carriers[-1].bucket if carriers else None


@dataclass(frozen=True)
class _Bar:
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
class _Layout:
    slots: dict[int, float]
    boxes: list[_Box]
    bars: dict[int, _Bar]
    right: float


def to_svg(plan: "Plan", link: Links | None = None) -> str:
    """See `Plan.to_svg`."""
    layout = _lay_out(plan, _lengths(plan, link))
    title, facts = (_wrapped(lines, layout.right) for lines in (header(plan), footer(plan)))
    top = MARGIN + 20 * len(title) + 34
    groups = list(dict.fromkeys(c.group for c in plan.collectives))
    wires = {group: top + (2 + i) * LANE for i, group in enumerate(groups)}
    bottom = top + (2 + len(groups)) * LANE
    width, height = layout.right + MARGIN, bottom + 20 * len(facts) + MARGIN
    names = {top: "gradients", top + LANE: "compute"}
    names |= {y: "wire" if len(groups) == 1 else f"wire {group or 'default'}" for group, y in wires.items()}
    shapes = [
        *(_text(MARGIN, MARGIN + 14 + 20 * i, line, 13, SOFT if i else INK) for i, line in enumerate(title)),
        *_frame(plan, layout, names, top, bottom),
        *_gradients(plan, layout, top),
        *_compute(layout, top + LANE),
        *_collectives(layout, wires),
        *_arrows(layout, top, wires),
        *(_text(MARGIN, bottom + 20 + 20 * i, line, 12, SOFT) for i, line in enumerate(facts)),
    ]
    # A card of its own, so that it reads on light and on dark pages.
    card = f'<rect width="{width:.0f}" height="{height:.0f}" rx="10" fill="{PAPER}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="DejaVu Sans, Verdana, Arial, sans-serif">\n'
        + "\n".join([f"<title>{escape(f'The plan of {plan.sync!r}')}</title>", card, *shapes, "</svg>\n"])
    )


def to_html(plan: "Plan") -> str:
    """The picture, with the text folded away."""
    folded = f"<details><summary>as text</summary><pre>{escape(show(plan))}</pre></details>"
    return f'<div style="overflow-x: auto">{to_svg(plan)}</div>{folded}'


def _lengths(plan: "Plan", link: Links | None) -> list[tuple[float, str]]:
    """How long each collective is drawn, and what it says: bytes, with a link also seconds."""
    labels = [f"{dtype(c)}, {size(c.wire_bytes)}" for c in plan.collectives]
    amounts: list[float] = [c.wire_bytes for c in plan.collectives]
    if link is not None:
        amounts = [cost.seconds for cost in estimate(plan.collectives, link).collectives]
        labels = [f"{label}, {duration(seconds)}" for label, seconds in zip(labels, amounts, strict=True)]
    most = max(amounts, default=0) or 1
    return [(max(4.0, LONGEST * amount / most), label) for amount, label in zip(amounts, labels, strict=True)]


def _lay_out(plan: "Plan", lengths: Sequence[tuple[float, str]]) -> _Layout:
    """A run follows the one before it and what it waits for; the wire of each group is a queue."""
    slots: dict[int, float] = {}
    boxes: list[_Box] = []
    bars: dict[int, _Bar] = {}
    free: dict[str | None, float] = {}
    x: float = MARGIN + GUTTER
    for run in merged(runs(plan)):
        if run.slot not in slots:
            slots[run.slot] = x
            x += GAP
        x = max([x, *(bars[c.index].right + GAP for c in run.waits)])
        width = max(NARROWEST, CHARACTER * 12 * len(run.kind) + 2 * GAP)
        boxes.append(_Box(run, x, width))
        x += width + GAP
        if run.launches is not None:
            c, (length, label) = run.launches, lengths[run.launches.index]
            left = max(x - GAP, free.get(c.group, 0.0))
            bars[c.index] = _Bar(c, left, length, (f"{c.name}, round {c.depth + 1}", label))
            free[c.group] = bars[c.index].free_from
    return _Layout(slots, boxes, bars, max([x, *free.values(), MARGIN + GUTTER + 400]))


def _frame(plan: "Plan", layout: _Layout, names: Mapping[float, str], top: float, bottom: float) -> Iterator[str]:
    fits = int((GUTTER - 6) / (12 * CHARACTER))
    arriving = set(plan.buckets.values())
    for y, name in names.items():
        yield f'<path d="M{MARGIN} {y}H{layout.right:.0f}" stroke="{LINE}"/>'
        yield _text(MARGIN, y + 28, name if len(name) <= fits else f"{name[: fits - 1]}…", 12, SOFT)
    for slot, x in layout.slots.items():
        yield f'<path d="M{x:.1f} {top - 20}V{bottom - 4}" stroke="{LINE}" stroke-dasharray="3 3"/>'
        yield _text(x + 6, top - 8, f"slot {slot}" if slot in arriving else f"slot {slot}: drain", 12, SOFT)


def _gradients(plan: "Plan", layout: _Layout, y: float) -> Iterator[str]:
    needing = {box.run.slot: box for box in reversed(layout.boxes) if box.run.needs}
    for slot, box in sorted(needing.items()):
        nbytes = sum(plan.leaves[path].nbytes for path, bucket in plan.buckets.items() if bucket == slot)
        paths = [text(path) for path, bucket in plan.buckets.items() if bucket == slot]
        label = f"bucket {slot}", size(nbytes)
        yield _box((box.left, y + INSET), box.width, _colour(slot), label, some(paths, "gradients"))


def _compute(layout: _Layout, y: float) -> Iterator[str]:
    for box in layout.boxes:
        waits = [f"waits for {c.name}" for c in box.run.waits]
        needs = [f"needs {some(box.run.needs, 'gradients')}"] if box.run.needs else []
        label = box.run.kind, count(len(box.run.code), "operation")
        yield _box((box.left, y + INSET), box.width, _colour(box.bucket), label, "; ".join([*needs, *waits]))


def _box(corner: Point, width: float, colour: str, label: tuple[str, str], hover: str) -> str:
    x, y = corner
    return (
        f'<g><title>{escape(hover)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BOX}" rx="5" '
        f'fill="{colour}" fill-opacity="0.15" stroke="{colour}"/>'
        f"{_text(x + 8, y + 18, label[0], 12, INK)}{_text(x + 8, y + 35, label[1], 11, SOFT)}</g>"
    )


def _collectives(layout: _Layout, wires: Mapping[str | None, float]) -> Iterator[str]:
    for bar in layout.bars.values():
        c, y = bar.collective, wires[bar.collective.group] + 16
        labels = some([text(payload.label) for payload in c.payloads], "payloads")
        hover = f"{c.name}: {c.kind} {c.op} {dtype(c)}[{c.numel}], {c.wire_bytes:,} B, round {c.depth + 1}: {labels}"
        yield (
            f'<g class="collective"><title>{escape(hover)}</title><rect x="{bar.left:.1f}" y="{y:.1f}" '
            f'width="{bar.width:.1f}" height="{BAR}" rx="2" fill="{_colour(c.bucket)}"/>'
            f"{_text(bar.left, y + BAR + 14, bar.label[0], 11, INK)}"
            f"{_text(bar.left, y + BAR + 29, bar.label[1], 11, SOFT)}</g>"
        )


def _arrows(layout: _Layout, top: float, wires: Mapping[str | None, float]) -> Iterator[str]:
    """From gradients to what needs them, from there to the wire, and from the wire to what waits for it."""
    above, below = top + LANE + INSET, top + LANE + INSET + BOX
    for box in layout.boxes:
        if box.run.needs:
            yield _arrow((box.left + 16, top + INSET + BOX), (box.left + 16, above), _colour(box.run.slot))
        for i, c in enumerate(box.run.waits):
            start = layout.bars[c.index].right - 2, wires[c.group] + 16
            yield _arrow(start, (box.left + 16 + 12 * i, below), _colour(c.bucket))
        if box.run.launches is not None:
            c = box.run.launches
            end = layout.bars[c.index].left + 2, wires[c.group] + 16
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
