"""What the demo shows: a table, curves, and the same as JSON."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from rich.table import Table

from fnddp.cli import table as tables
from fnddp.cli import train
from fnddp.cli.train import Result

CURVES, RESULTS = "curves.png", "results.json"
SMOOTHING = 15  # steps
# Okabe and Ito's palette: distinct for colour-blind readers too.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")


def table(names: Sequence[str], results: Sequence[Result]) -> Table:
    """The comparison, a row for each pipeline."""
    rows = [
        (
            name,
            f"{result.step_bytes:,}",
            "-" if result.reduction is None else f"{result.reduction:.1f}x",
            f"{result.sent[-1] / 1e6:.2f}",
            f"{result.accuracy:.2%}",
            f"{result.step_seconds * 1e3:.1f}",
        )
        for name, result in zip(names, results, strict=True)
    ]
    return tables.table(
        ("pipeline", "bytes/step", "reduction", "MB sent", "accuracy", "ms/step"),
        rows,
        caption="bytes: what one rank hands to its collectives in the last step, counted\n"
        "reduction: against 4 bytes for each parameter; MB sent: in all steps together\n"
        "ms/step: median; fewer bytes pay on slow links, hardly ever within one machine",
    )


def write(out: Path, names: Sequence[str], results: Sequence[Result], *, ranks: int, seed: int) -> None:
    """Writes the curves and the numbers behind them into the folder `out`.

    Raises:
        OSError: It cannot be written to.
    """
    out.mkdir(parents=True, exist_ok=True)
    curves(names, results, ranks=ranks).savefig(out / CURVES, dpi=150)
    (out / RESULTS).write_text(json.dumps(as_json(names, results, ranks=ranks, seed=seed), indent=1) + "\n")


def as_json(names: Sequence[str], results: Sequence[Result], *, ranks: int, seed: int) -> dict[str, object]:
    """The results and what they were measured with."""
    return {
        "data": "scikit-learn digits",
        "torch": torch.__version__,
        "ranks": ranks,
        "seed": seed,
        "steps": len(results[0].losses),
        "batch_size_per_rank": train.BATCH_SIZE,
        "parameters": results[0].parameters,
        "pipelines": [
            {
                "pipeline": name,
                "bytes_per_step": result.step_bytes,
                "reduction": result.reduction,
                "bytes_total": result.sent[-1],
                "test_accuracy": result.accuracy,
                "step_seconds_median": result.step_seconds,
                "loss_by_step": [loss if math.isfinite(loss) else None for loss in result.losses],
                "bytes_sent_by_step": result.sent,
            }
            for name, result in zip(names, results, strict=True)
        ],
    }


def curves(names: Sequence[str], results: Sequence[Result], *, ranks: int) -> Figure:
    """Training loss against steps, and against bytes sent."""
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for i, (name, result) in enumerate(zip(names, results, strict=True)):
        losses = smooth(result.losses)
        # Pipelines that lose nothing lie on one another: the first are drawn wide, the later ones thin on top.
        style = {"color": COLOURS[i % len(COLOURS)], "linewidth": max(1.2, 4.2 - i)}
        by_step.plot(range(1, len(losses) + 1), losses, **style)
        label = f"{name:<{max(map(len, names))}}  {result.accuracy:7.2%}  {result.sent[-1] / 1e6:9.2f} MB"
        by_bytes.plot(result.sent, losses, label=label, **style)
    _dress(by_step, "steps")
    _dress(by_bytes, "bytes sent by one rank")
    by_bytes.set_xscale("log")
    by_bytes.xaxis.set_major_formatter(EngFormatter("B"))
    by_step.set_ylabel(f"training loss (running mean of {SMOOTHING} steps)")
    figure.suptitle(f"Handwritten digits, world size {ranks}: the same training with less on the wire")
    figure.legend(
        loc="outside lower center",
        frameon=False,
        prop={"family": "monospace", "size": 9},
        title="pipeline, test accuracy, bytes sent by one rank in all",
        title_fontsize=9,
    )
    return figure


def smooth(losses: Sequence[float]) -> list[float]:
    """The running mean of the last `SMOOTHING` values."""
    windows = [losses[max(0, end - SMOOTHING) : end] for end in range(1, len(losses) + 1)]
    return [sum(window) / len(window) for window in windows]


def _dress(axes: Axes, x: str) -> None:
    axes.set_xlabel(x)
    axes.set_yscale("log")
    axes.grid(which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
