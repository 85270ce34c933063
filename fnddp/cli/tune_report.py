"""Results of `fnddp tune`: a table, a plot, and the same as JSON."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from fnddp.cli import picture
from fnddp.cli.report import COLOURS
from fnddp.cli.terminal import Table, say
from fnddp.cost.link import duration
from fnddp.simulate.tune import Outcome, Tuned

PLOT, RESULTS = "pareto.svg", "results.json"


@dataclass(frozen=True)
class Setting:
    """What was asked for."""

    model: str
    data: str | None
    link: str
    ranks: int
    steps: int
    seeds: int
    batch: int

    @property
    def on(self) -> str:
        """The data, in words."""
        named = "digits" if self.model == "digits" else "its own batches"
        return named if self.data in (None, "own") else self.data

    def __str__(self) -> str:
        return (
            f"{self.model} on {self.on}, {self.ranks} virtual ranks, {self.steps} steps, {self.seeds} seeds; "
            f"link {self.link}"
        )


def show(tuned: Tuned, setting: Setting) -> None:
    """Print a row for each pipeline, the fastest first, and the winner."""
    pareto, good = tuned.pareto, tuned.good
    rows = [
        (
            each.pipeline,
            f"{each.wire_bytes:,}",
            f"{each.link_bytes:,}",
            duration(each.seconds),
            duration(each.step.encode_seconds + each.step.decode_seconds),
            duration(each.step.exposed_seconds),
            f"{each.loss:.4f}",
            f"±{each.spread:.4f}",
            _mark(each, tuned, pareto, good),
        )
        for each in tuned.outcomes
    ]
    weights = {"wire B": 4, "link B": 1, "step": 8, "codec": 3, "exposed": 2, "loss": 7, "spread": 5, "mark": 6}
    forward, backward = map(duration, (tuned.compute.forward_seconds, tuned.compute.backward_seconds))
    caption = (
        f"step: with forward {forward}, backward {backward}, and codec, to encode and decode: measured here\n"
        "that is by one rank alone, on one core: ranks that share cores, caches or a GPU take longer to compute\n"
        "exposed: what is left to wait for on the link, predicted\n"
        "loss: at the end, simulated, the mean over seeds; spread: half of what lies between best and worst\n"
        "P: nothing else is as fast and as good; <- the fastest that is ok\n"
        f"ok: within {tuned.within:.1%} of the plain mean's loss, {tuned.threshold:.4f}"
    )
    say(f"{setting}\n")
    Table("pipeline", weights, rows, caption).show()
    for line in filter(None, (tuned.verdict, tuned.doubt and f"But {tuned.doubt}.")):
        say(line)


def _mark(each: Outcome, tuned: Tuned, pareto: tuple[Outcome, ...], good: tuple[Outcome, ...]) -> str:
    marks = ["P"] if each in pareto else []
    marks += ["ok"] if each in good else []
    return " ".join([*marks, "<-"] if each is tuned.winner and tuned.good else marks)


def write(out: Path, tuned: Tuned, setting: Setting) -> None:
    """Write the plot and the numbers behind it into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    picture.save(lambda: plot(tuned, setting), out / PLOT)
    (out / RESULTS).write_text(json.dumps(as_json(tuned, setting), indent=1) + "\n")


def as_json(tuned: Tuned, setting: Setting) -> dict[str, Any]:
    """Return the outcomes and how they came about."""
    return {
        **vars(setting),
        "data": setting.on,
        "torch": torch.__version__,
        "within": tuned.within,
        "threshold": tuned.threshold if math.isfinite(tuned.threshold) else None,
        "winner": tuned.winner.pipeline if tuned.good else None,
        "verdict": tuned.verdict,
        "doubt": tuned.doubt,
        "forward_seconds": tuned.compute.forward_seconds,
        "backward_seconds": tuned.compute.backward_seconds,
        "pipelines": [
            {
                "pipeline": each.pipeline,
                "wire_bytes": each.wire_bytes,
                "link_bytes": each.link_bytes,
                "step_seconds": each.seconds,
                "encode_seconds": each.step.encode_seconds,
                "decode_seconds": each.step.decode_seconds,
                "communication_seconds": each.step.communication_seconds,
                "exposed_seconds": each.step.exposed_seconds,
                "losses": [loss if math.isfinite(loss) else None for loss in each.losses],
                "pareto": each in tuned.pareto,
            }
            for each in tuned.outcomes
        ],
    }


def plot(tuned: Tuned, setting: Setting) -> Figure:
    """Draw loss against the time of a step, and against bytes."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    shown = [each for each in tuned.outcomes if math.isfinite(each.loss)]
    for axes, unit, amounts in (
        (by_time, "s", [each.seconds for each in shown]),
        (by_bytes, "B", [each.wire_bytes for each in shown]),
    ):
        for i, (each, amount) in enumerate(zip(shown, amounts, strict=True)):
            style = {"color": COLOURS[i % len(COLOURS)], "marker": "os^D"[i // len(COLOURS) % 4]}
            label = f"{each.pipeline}  {duration(each.seconds)}  {each.loss:.4f}" if axes is by_time else None
            axes.errorbar(amount, each.loss, yerr=each.spread, capsize=3, label=label, **style)
        if math.isfinite(tuned.threshold):
            axes.axhline(tuned.threshold, color="0.6", linestyle=":", linewidth=1)
        _dress(axes, unit)
    front = [each for each in tuned.pareto if math.isfinite(each.loss)]
    by_time.plot([each.seconds for each in front], [each.loss for each in front], color="0.7", zorder=0)
    by_time.set_xlabel("predicted time of a step")
    by_time.set_ylabel("final loss (bars: seeds)")
    by_bytes.set_xlabel("bytes that a rank hands over in a step")
    figure.suptitle(f"{setting}\ndotted: within {tuned.within:.1%} of the plain mean's loss; line: nothing is better")
    if shown:
        figure.legend(loc="outside lower center", frameon=False, prop={"family": "monospace", "size": 8})
    return figure


def _dress(axes: Axes, unit: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")  # what does not train is far above all that does
    axes.xaxis.set_major_formatter(EngFormatter(unit))
    axes.grid(alpha=0.3)
