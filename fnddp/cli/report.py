"""Results of the demo, in the form of results.json: a table and curves."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from fnddp.cli.picture import COLOURS, dress, label
from fnddp.cli.terminal import SIZES, Grid, echo
from fnddp.cli.train import Result
from fnddp.show.text import count

CURVES = "curves.png"
SMOOTHING = 15  # steps


def title(model: str) -> str:
    return "Handwritten digits" if model == "digits" else f"{model} on its own batch"


def show(results: Sequence[Result]) -> None:
    """Print the comparison, a row for each pipeline."""
    rows = [
        (
            result["pipeline"],
            f"{result['bytes_per_step']:,}",
            "-" if result["reduction"] is None else f"{result['reduction']:.1f}x",
            f"{result['bytes_total'] / 1e6:.2f}",
            _score(result),
            f"{result['step_seconds_median'] * 1e3:.1f}",
        )
        for result in results
    ]
    score = "final loss" if any(result["test_accuracy"] is None for result in results) else "accuracy"
    columns = {"bytes/step": 5, "reduction": 2, "MB sent": 1, score: 4, "ms/step": 3}
    legend = {
        "bytes/step": f"{SIZES['wire B']}, counted in the last one",
        "reduction": "times fewer wire bytes than a plain mean of float32",
        "MB sent": "by a rank, in all steps",
        "ms/step": "median; fewer bytes pay on slow links, hardly ever within one machine",
    }
    Grid("pipeline", columns, rows, legend).show()
    echo("With each pipeline the final parameters are the same on all ranks, bit for bit.")


def _score(result: Result) -> str:
    accuracy = result["test_accuracy"]
    return f"{result['loss_by_step'][-1]:.4f}" if accuracy is None else f"{accuracy:.2%}"


def curves(found: dict[str, Any]) -> Figure:
    """Draw training loss against steps, and against bytes sent."""
    results: list[Result] = found["pipelines"]
    score = "test accuracy" if found["model"] == "digits" else "final loss"
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    widest = max(len(result["pipeline"]) for result in results)
    for i, result in enumerate(results):
        losses = smooth(result["loss_by_step"])
        # Pipelines that lose nothing overlap: the first are drawn wide, the later ones thin on top.
        style = {"color": COLOURS[i % len(COLOURS)], "linewidth": max(1.2, 4.2 - i)}
        by_step.plot(range(1, len(losses) + 1), losses, **style)
        text = f"{result['pipeline']:<{widest}}  {_score(result):>7}  {result['bytes_total'] / 1e6:9.2f} MB"
        by_bytes.plot(result["bytes_sent_by_step"], losses, label=text, **style)
    is_positive = not any(loss <= 0 for result in results for loss in result["loss_by_step"])
    for axes in (by_step, by_bytes):
        axes.set_yscale("log" if is_positive else "linear")
        dress(axes, which="major")
    by_bytes.set_xscale("log" if any(result["bytes_total"] for result in results) else "linear")
    by_step.set_xlabel("steps")
    label(by_step.yaxis, f"training loss (running mean of {SMOOTHING} steps)")
    label(by_bytes.xaxis, "bytes sent by one rank", "B")
    what = f"{title(found['model'])}, {count(found['ranks'], 'rank')}"
    figure.suptitle(f"{what}: the same training with less on the wire")
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
