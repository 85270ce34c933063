"""Draws docs/assets: what flows through error_feedback(powersgd(fp16(allreduce), rank=4)), the plan of plan.md, and
the curves of the demo, from what it wrote (docs/assets/demo.json). The examples of convergence draw the others.

python docs/pictures.py [folder]
"""

import json
import sys
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from fnddp import allreduce, error_feedback, fp16, lower, powersgd
from fnddp.cli import picture, report
from fnddp.show.drawing import INK, PAPER

ASSETS = Path(__file__).parent / "assets"
BOX = "#eceff1"
DOWN, MEAN, SENT = "#37474f", "#1565c0", "#d84315"  # encoded gradients; the answer; this rank's own contribution
LEFT, RIGHT = 2.9, 8.7  # the boxes' sides
DOWN_X, MEAN_X, SENT_X = 4.1, 6.3, 7.7
HEIGHT = 0.95

# Bottom of each box, its name, what it does.
LAYERS = [
    (7.0, "error_feedback", "↓  adds the residual          ↑  next residual = x - sent"),
    (4.9, "powersgd", "↓  P = M q,  then  Q = Mᵀ P̂          ↑  P̂ Qᵀ"),
    (2.8, "fp16", "↓  to float16          ↑  back to float32"),
    (0.7, "allreduce", "divides by the number of ranks, then sums"),
]
# Between the boxes, from the top: what goes down, the mean and the contribution that come back.
FLOWS = [
    ("grads", "mean", "sent"),
    ("x = grads + residual", "P̂ (mean Q)ᵀ", "P̂ (own Q)ᵀ: x as the\nothers saw it"),
    ("P and biases,\nthen Q", "mean P, mean Q", "own P, own Q,\nas rounded"),
    ("the same,\nin float16", "mean P, mean Q", "own P, own Q"),
]


PARAMS = {
    "first.weight": (4096, 4096),
    "first.bias": (4096,),
    "second.weight": (4096, 4096),
    "second.bias": (4096,),
    "third.weight": (1000, 4096),
    "third.bias": (1000,),
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    picture.save(anatomy, folder / "anatomy.svg")
    picture.save(curves, folder / "curves.svg")
    draw_plan(folder / "plan.svg")


def draw_plan(file: Path) -> None:
    params = {path: torch.empty(shape, device="meta") for path, shape in PARAMS.items()}
    sync = error_feedback(powersgd(fp16(allreduce), rank=4))
    file.write_text(lower(sync, params, world_size=4).to_svg())


def curves() -> Figure:
    return report.curves(json.loads((ASSETS / "demo.json").read_text()))


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


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, style: str = "-") -> None:
    head, line = (style, "-") if "|" in style else ("-|>", style)
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle=head, mutation_scale=14, lw=1.8, ls=line, color=color, shrinkA=1, shrinkB=1
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ASSETS)
