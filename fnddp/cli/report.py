"""Results of the demo: a table, curves, and the same as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from fnddp.cli.models import BATCH_SIZE
from fnddp.cli.terminal import Table, say
from fnddp.cli.train import Result
from fnddp.show import drawing
from fnddp.show.text import count

CURVES, RESULTS = "curves.png", "results.json"
DIGITS = "digits"
SMOOTHING = 15  # steps
COLOURS = ("#000000", *drawing.COLOURS, "#F0E442")


@dataclass(frozen=True)
class Setting:
    """What was asked for."""

    model: str
    ranks: int
    steps: int
    seed: int

    @property
    def title(self) -> str:
        """What is trained, in words."""
        return "Handwritten digits" if self.model == DIGITS else f"{self.model} on its own batch"

    def __str__(self) -> str:
        return f"{self.title}; ranks: {self.ranks}, steps with each pipeline: {self.steps}, seed: {self.seed}"


def show(results: Sequence[Result]) -> None:
    """Print the comparison, a row for each pipeline."""
    rows = [
        (
            result.pipeline,
            f"{result.step_bytes:,}",
            "-" if result.reduction is None else f"{result.reduction:.1f}x",
            f"{result.sent[-1] / 1e6:.2f}",
            _score(result),
            f"{result.step_seconds * 1e3:.1f}",
        )
        for result in results
    ]
    score = "final loss" if any(result.accuracy is None for result in results) else "accuracy"
    weights = {"bytes/step": 5, "reduction": 2, "MB sent": 1, score: 4, "ms/step": 3}
    caption = (
        "bytes: what one rank hands to its collectives in the last step, counted\n"
        "reduction: against 4 bytes for each parameter; MB sent: in all steps together\n"
        "ms/step: median; fewer bytes pay on slow links, hardly ever within one machine"
    )
    Table("pipeline", weights, rows, caption).show()
    say("With each pipeline the final parameters are the same on all ranks, to the bit.")


def _score(result: Result) -> str:
    return f"{result.losses[-1]:.4f}" if result.accuracy is None else f"{result.accuracy:.2%}"


def write(out: Path, results: Sequence[Result], setting: Setting) -> None:
    """Write the curves and the numbers behind them into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    curves(results, setting).savefig(out / CURVES, dpi=150)
    (out / RESULTS).write_text(json.dumps(as_json(results, setting), indent=1) + "\n")


def as_json(results: Sequence[Result], setting: Setting) -> dict[str, object]:
    """Return the results and what they were measured with."""
    return {
        "model": setting.model,
        "data": "scikit-learn digits" if setting.model == DIGITS else "the model's own batch",
        "torch": torch.__version__,
        "ranks": setting.ranks,
        "seed": setting.seed,
        "steps": setting.steps,
        "batch_size_per_rank": BATCH_SIZE if setting.model == DIGITS else None,
        "parameters": results[0].parameters,
        "pipelines": [
            {
                "pipeline": result.pipeline,
                "bytes_per_step": result.step_bytes,
                "reduction": result.reduction,
                "bytes_total": result.sent[-1],
                "test_accuracy": result.accuracy,
                "step_seconds_median": result.step_seconds,
                "loss_by_step": [loss if math.isfinite(loss) else None for loss in result.losses],
                "bytes_sent_by_step": result.sent,
            }
            for result in results
        ],
    }


def curves(results: Sequence[Result], setting: Setting) -> Figure:
    """Draw training loss against steps, and against bytes sent."""
    score = "test accuracy" if setting.model == DIGITS else "final loss"
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    widest = max(len(result.pipeline) for result in results)
    for i, result in enumerate(results):
        losses = smooth(result.losses)
        # Pipelines that lose nothing lie on one another: the first are drawn wide, the later ones thin on top.
        style = {"color": COLOURS[i % len(COLOURS)], "linewidth": max(1.2, 4.2 - i)}
        by_step.plot(range(1, len(losses) + 1), losses, **style)
        label = f"{result.pipeline:<{widest}}  {_score(result):>7}  {result.sent[-1] / 1e6:9.2f} MB"
        by_bytes.plot(result.sent, losses, label=label, **style)
    _dress(by_step, "steps")
    _dress(by_bytes, "bytes sent by one rank")
    by_bytes.set_xscale("log")
    by_bytes.xaxis.set_major_formatter(EngFormatter("B"))
    by_step.set_ylabel(f"training loss (running mean of {SMOOTHING} steps)")
    figure.suptitle(f"{setting.title}, {count(setting.ranks, 'rank')}: the same training with less on the wire")
    figure.legend(
        loc="outside lower center",
        frameon=False,
        prop={"family": "monospace", "size": 9},
        title=f"pipeline, {score}, bytes sent by one rank in all",
        title_fontsize=9,
    )
    return figure


def smooth(losses: Sequence[float]) -> list[float]:
    """Return the running mean of the last `SMOOTHING` values."""
    windows = [losses[max(0, end - SMOOTHING) : end] for end in range(1, len(losses) + 1)]
    return [sum(window) / len(window) for window in windows]


def _dress(axes: Axes, x: str) -> None:
    axes.set_xlabel(x)
    axes.set_yscale("log")
    axes.grid(which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
