"""Draws docs/assets: what flows through error_feedback(powersgd(bf16(allreduce), rank=4)), the way of a gradient
through a step (architecture.md), and, from what `fnddp demo` and `fnddp bench` wrote, the
curves of the one and the steps of the other. The studies of losses draw the other pictures.

python benchmarks/pictures.py [folder]
"""

import json
import sys
from pathlib import Path
from typing import Any

from figures import INK, PAPER, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from fnddp.cli import report

ASSETS = Path(__file__).parent.parent / "docs" / "assets"
RESULTS = Path(__file__).parent / "results"
PEERS = {"ddp": "torch's DistributedDataParallel", "fp16_hook": "the same with torch's fp16_compress_hook"}
BOX = "#eceff1"
DOWN, MEAN, SENT = "#37474f", "#1565c0", "#d84315"  # encoded gradients; the answer; this rank's own contribution
LEFT, RIGHT = 2.9, 8.7  # the boxes' sides
DOWN_X, MEAN_X, SENT_X = 4.1, 6.3, 7.7
HEIGHT = 0.95

# Bottom of each box, its name, what it does.
LAYERS = [
    (7.0, "error_feedback", "↓  adds the residual          ↑  next residual = x - sent"),
    (4.9, "powersgd", "↓  P = M q,  then  Q = Mᵀ P̂          ↑  P̂ Qᵀ"),
    (2.8, "bf16", "↓  to bfloat16          ↑  back to float32"),
    (0.7, "allreduce", "divides by the number of ranks, then sums"),
]
# Between the boxes, from the top: what goes down, the mean and the contribution that come back.
FLOWS = [
    ("grads", "mean", "sent"),
    ("x = grads + residual", "P̂ (mean Q)ᵀ", "P̂ (own Q)ᵀ: x as the\nothers saw it"),
    ("P and biases,\nthen Q", "mean P, mean Q", "own P, own Q,\nas rounded"),
    ("the same,\nin bfloat16", "mean P, mean Q", "own P, own Q"),
]

# The way of a gradient, narrow, so that a phone shows it as it is. Left, bottom, width, height, name, what it does.
OBJECTS = [
    (3, 71.5, 13, 7.2, "output", "hook"),
    (19, 71.5, 11, 7.2, ".grad", ""),
    (33, 71.5, 14, 7.2, "parameter", "hook"),
    (1, 56, 36, 7.2, "Steps", "begins steps, checks, ends them"),
    (1, 43.5, 17, 7.2, "Engine", "outlives the steps"),
]
PIECES = [(2.5, "segment 0", "c0"), (14, "segment 1", "c1"), (25.5, "Vote", "vote"), (37, "last\nsegment", "")]
PIECE = 10.5  # the width of each
WAY = [  # of an arrow: its start and its end, and its colour; left of its middle a number, right of it a word
    ((9.5, 71.5), (9.5, 63.2), INK, 2, "begins"),
    ((9.5, 56), (9.5, 50.7), INK, 0, "begin"),
    ((9.5, 43.5), (9.5, 38), INK, 0, "makes"),
    ((43, 71.5), (43, 38), DOWN, 3, "put"),
    ((7.75, 17), (7.75, 7.9), DOWN, 4, "advance"),
    ((19.25, 17), (19.25, 7.9), DOWN, 4, ""),
    ((23, 56), (23, 38), SENT, 5, "agree"),
    ((30.75, 17), (30.75, 7.9), SENT, 5, "cast"),
    ((42.25, 6.6), (42.25, 17), MEAN, 6, ""),
    ((32.5, 38), (32.5, 56), MEAN, 6, "commit"),
    ((24.5, 63.2), (24.5, 71.5), MEAN, 7, "mean"),
]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save(anatomy, folder / "anatomy.svg")
    save(curves, folder / "curves.svg")
    save(step, folder / "step.svg")
    save(times, folder / "times.svg")


def curves() -> Figure:
    return report.curves(json.loads((RESULTS / "demo.json").read_text()))


def times() -> Figure:
    """Draw the median steps of README's table as bars, each with what it is of the first."""
    found = json.loads((RESULTS / "bench.json").read_text())
    arms = sorted(found["arms"], key=lambda arm: arm["median_seconds"])
    slowest = arms[-1]["median_seconds"]
    figure = Figure(figsize=(5.2, 2.7))
    axes = figure.subplots()
    for place, arm in enumerate(arms):
        seconds, name = arm["median_seconds"], PEERS.get(arm["arm"], arm["arm"])
        axes.barh(place, seconds, height=0.42, color=DOWN if arm["peer"] else MEAN)
        times = "" if seconds == slowest else f", {slowest / seconds:.1f} times as fast"
        write(axes, (0, place + 0.26), name, ha="left", va="bottom", size=9.5)
        write(axes, (seconds + 0.02, place), f"{seconds * 1e3:,.0f} ms{times}", ha="left", size=9.5)
    axes.set(xlim=(0, 1.45 * slowest), ylim=(-0.4, len(arms) - 0.2))
    axes.axis("off")
    return figure


def anatomy() -> Figure:
    figure = Figure(figsize=(10.6, 8.6))
    axes = figure.subplots()
    axes.set(xlim=(0.7, 12.0), ylim=(-0.45, 9.4), aspect="equal")
    axes.axis("off")
    draw_layers(axes)
    draw_flows(axes)
    draw_state(axes)
    draw_wire(axes)
    return figure


def draw_layers(axes: Axes) -> None:
    for bottom, name, does in LAYERS:
        shape = FancyBboxPatch(
            (LEFT, bottom), RIGHT - LEFT, HEIGHT, boxstyle="round,pad=0,rounding_size=0.12", fc=BOX, ec=INK, lw=1.4
        )
        axes.add_patch(shape)
        middle = (LEFT + RIGHT) / 2
        axes.text(middle, bottom + 0.64, name, ha="center", va="center", family="DejaVu Sans Mono", size=13, color=INK)
        axes.text(middle, bottom + 0.26, does, ha="center", va="center", size=9.5, color=INK)


def draw_flows(axes: Axes) -> None:
    tops = [bottom + HEIGHT for bottom, _, _ in LAYERS]
    above = [9.0, *(bottom for bottom, _, _ in LAYERS)]  # where the space over each box ends
    for top, ceiling, (down, mean, sent) in zip(tops, above, FLOWS, strict=False):
        arrow(axes, (DOWN_X, ceiling), (DOWN_X, top), DOWN)
        arrow(axes, (MEAN_X, top), (MEAN_X, ceiling), MEAN)
        arrow(axes, (SENT_X, top), (SENT_X, ceiling), SENT)
        middle = (top + ceiling) / 2
        axes.text(DOWN_X - 0.12, middle, down, ha="right", va="center", color=DOWN)
        axes.text(MEAN_X - 0.12, middle, mean, ha="right", va="center", color=MEAN)
        axes.text(SENT_X + 0.12, middle, sent, ha="left", va="center", color=SENT)


def draw_state(axes: Axes) -> None:
    # Solid: into the next step's state. Dashed: from the last step's.
    for bottom, name, kind, color in ((7.0, "residual", "local", SENT), (4.9, "q", "replicated", MEAN)):
        x, y = 9.9, bottom + 0.025
        axes.add_patch(
            FancyBboxPatch((x, y), 1.9, 0.9, boxstyle="round,pad=0,rounding_size=0.4", fc=PAPER, ec=color, lw=1.4)
        )
        axes.text(x + 0.95, y + 0.6, name, ha="center", va="center", family="DejaVu Sans Mono", size=11, color=color)
        axes.text(x + 0.95, y + 0.27, f"state, {kind}", ha="center", va="center", size=8.5, color=color)
        arrow(axes, (RIGHT, bottom + 0.66), (x, bottom + 0.66), color)
        arrow(axes, (x, bottom + 0.3), (RIGHT, bottom + 0.3), color, style="--")
        axes.text((RIGHT + x) / 2, bottom + 0.76, "next step", ha="center", va="bottom", size=8.5, color=color)
        axes.text((RIGHT + x) / 2, bottom + 0.18, "last step", ha="center", va="top", size=8.5, color=color)


def draw_wire(axes: Axes) -> None:
    axes.plot([0.9, 11.8], [0.0, 0.0], color=INK, lw=5, solid_capstyle="round", zorder=1)
    middle = (LEFT + RIGHT) / 2
    arrow(axes, (middle, LAYERS[-1][0]), (middle, 0.06), INK, style="<|-|>")
    axes.text(0.9, -0.32, "the other ranks", ha="left", va="center", color=INK)
    axes.text(11.8, -0.32, "two rounds a step: P and biases, then Q", ha="right", va="center", color=INK)


def step() -> Figure:
    figure = Figure(figsize=(5.0, 8.4))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 50), ylim=(0, 84))
    axes.axis("off")
    box(axes, (1, 70, 48, 13), PAPER)
    write(axes, (25, 80.8), "the wrapped module")
    for left, bottom, width, height, name, does in OBJECTS:
        box(axes, (left, bottom, width, height))
        middle, top = left + width / 2, bottom + height
        write(axes, (middle, top - (2.3 if does else height / 2)), name, family="DejaVu Sans Mono")
        write(axes, (middle, top - 5), does)
    draw_program(axes)
    for start, end, color, number, word in WAY:
        arrow(axes, start, end, color)
        x, y = start[0], (start[1] + end[1]) / 2
        write(axes, (x + 1, y), word, color=color, ha="left")
        draw_number(axes, (x - 2.5, y), number, color)
    draw_number(axes, (5, 73.4), 1, INK)
    return figure


def draw_program(axes: Axes) -> None:
    """Draw what a step runs, in the order of time, and the wire below."""
    box(axes, (1, 14, 48, 24), PAPER)
    write(axes, (25, 35.5), "Step", family="DejaVu Sans Mono")
    write(axes, (25, 32.6), "values, countdown, works, status")
    write(axes, (25, 27.5), "runs segments of the plan, and the vote:")
    axes.plot([2, 48], [6, 6], color=INK, lw=5, solid_capstyle="round", zorder=1)
    for left, name, sent in PIECES:
        middle = left + PIECE / 2
        box(axes, (left, 17, PIECE, 7))
        write(axes, (middle, 20.5), name)
        if sent:
            box(axes, (middle - 3.5, 4.1, 7, 3.8), PAPER)
            write(axes, (middle, 6), sent)
    write(axes, (25, 1.6), "the wire, and the other ranks")


def draw_number(axes: Axes, at: tuple[float, float], number: int, color: str) -> None:
    if number:
        axes.scatter(*at, s=210, color=color, zorder=3)
        write(axes, at, str(number), color=PAPER, weight="bold", zorder=4)


def write(axes: Axes, at: tuple[float, float], text: str, **style: Any) -> None:
    given: dict[str, Any] = {"ha": "center", "va": "center", "size": 10.5, "color": INK, **style}
    axes.text(*at, text, **given)


def box(axes: Axes, place: tuple[float, float, float, float], color: str = BOX) -> None:
    left, bottom, width, height = place
    shape = FancyBboxPatch(
        (left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.9", fc=color, ec=INK, lw=1.3
    )
    axes.add_patch(shape)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, style: str = "-") -> None:
    head, line = (style, "-") if "|" in style else ("-|>", style)
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle=head, mutation_scale=14, lw=1.8, ls=line, color=color, shrinkA=1, shrinkB=1
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ASSETS)
