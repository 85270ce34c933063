"""Results of `fnddp tune`: a table, a plot, and the same as JSON."""

import math
from typing import Any

import torch
from matplotlib.figure import Figure

from fnddp.cli.picture import COLOURS, dress, label
from fnddp.cli.terminal import SIZES, Grid, echo
from fnddp.cost.link import duration
from fnddp.show.text import count
from fnddp.simulation.tune import Gap, Tuned

PLOT = "pareto.svg"


def title(found: dict[str, Any]) -> str:
    numbers = f"{found['ranks']} virtual ranks, {found['steps']} steps, {count(found['seeds'], 'seed')}"
    data = "" if found["model"] == found["data"] else f" on {found['data']}"
    return f"{found['model']}{data}, {numbers}; link {found['link']}"


def show(tuned: Tuned, found: dict[str, Any]) -> None:
    """Print a row for each pipeline, the fastest first, and the winner."""
    chosen = [each for each in tuned.outcomes if each.pipeline == tuned.chosen]
    marks = {"P": tuned.pareto, "ok": tuned.good, "?": tuned.unclear, "<-": [tuned.winner], "auto": chosen}
    rows = [
        (
            each.pipeline,
            f"{each.wire_bytes:,}",
            f"{each.link_bytes:,}",
            duration(each.seconds),
            duration(each.step.encode_seconds + each.step.decode_seconds),
            duration(each.step.exposed_seconds),
            f"{each.loss:.4f}",
            _excess(tuned.gap(each)),
            " ".join(mark for mark, those in marks.items() if each in those),
        )
        for each in tuned.outcomes
    ]
    columns = {"wire B": 4, "link B": 1, "step": 8, "codec": 3, "exposed": 2, "loss": 7, "above": 5, "mark": 6}
    forward, backward = map(duration, (tuned.compute.forward_seconds, tuned.compute.backward_seconds))
    legend = {
        **SIZES,
        "step": f"forward {forward}, backward {backward} and codec, measured, and exposed, predicted",
        "codec": "encoding and decoding",
        "exposed": "time that a step waits for the link",
        "loss": "at the end, simulated, the mean over seeds",
        "above": f"that of {tuned.kind.called}, with the interval of 95 % confidence: pairs of trainings from one seed",
        "mark": f"P: nothing else is as fast and as good; ok: seeds rule out that it ends more than {tuned.within:.3g} "
        f"above; ?: seeds do not decide; <-: take this one; auto: the choice of {tuned.kind.chooser}",
    }
    note = "Measured by one rank alone, on one core: ranks that share cores, caches or a GPU take longer to compute."
    echo(f"{title(found)}\n")
    Grid("pipeline", columns, rows, legend, note).show()
    for line in (tuned.verdict, *tuned.notes):
        echo(f"{line}.")
    if found["one_batch"]:
        echo(
            f"Warning: all ranks trained on one batch in every step, since {found['model']} returns one: its losses do "
            "not predict those of a training. Return a Problem with batches of its own, or give --data"
        )
    if tuned.winner is not None:
        echo(f"To use it: {tuned.usage(tuned.winner)}")


def _excess(gap: Gap) -> str:
    return f"{gap.mean:+.4f} ±{gap.half:.4f}" if any(gap.gaps) else "0"


def as_json(tuned: Tuned, setting: dict[str, Any]) -> dict[str, Any]:
    return {
        **setting,
        "torch": torch.__version__,
        "within": tuned.within,
        "auto": tuned.chosen,
        "winner": tuned.winner and tuned.winner.pipeline,
        "verdict": tuned.verdict,
        "doubt": tuned.doubt,
        "forward_seconds": tuned.compute.forward_seconds,
        "backward_seconds": tuned.compute.backward_seconds,
        "pipelines": [
            {**each.as_json(), "losses": each.losses, "pareto": each in tuned.pareto} for each in tuned.outcomes
        ],
    }


def plot(tuned: Tuned, found: dict[str, Any]) -> Figure:
    """Draw loss against the time of a step, and against bytes."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    shown = [each for each in tuned.outcomes if math.isfinite(each.loss)]
    for i, each in enumerate(shown):
        style = {"color": COLOURS[i % len(COLOURS)], "marker": "os^D"[i // len(COLOURS) % 4], "capsize": 3}
        text = f"{each.pipeline}  {duration(each.seconds)}  {each.loss:.4f}"
        by_time.errorbar(each.seconds, each.loss, yerr=each.spread, label=text, **style)
        by_bytes.errorbar(each.link_bytes, each.loss, yerr=each.spread, **style)
    for axes in (by_time, by_bytes):
        if math.isfinite(tuned.mean.loss):
            axes.axhline(tuned.mean.loss + tuned.within, color="0.6", linestyle=":", linewidth=1)
        if axes is by_time or tuned.mean.link_bytes:  # one rank sends no bytes
            axes.set_xscale("log")
        if all(each.loss > 0 for each in shown):
            axes.set_yscale("log")  # losses of failed trainings are far above all others
        dress(axes)
    front = [each for each in tuned.pareto if math.isfinite(each.loss)]
    by_time.plot([each.seconds for each in front], [each.loss for each in front], color="0.7", zorder=0)
    label(by_time.xaxis, "predicted time of a step", "s")
    label(by_time.yaxis, "final loss (bars: seeds)")
    label(by_bytes.xaxis, "link bytes: what a rank sends over its link in a step", "B")
    within = f"dotted: {tuned.within:.3g} above the loss of {tuned.kind.called}; line: nothing is better"
    figure.suptitle(f"{title(found)}\n{within}")
    if shown:
        figure.legend(loc="outside lower center", frameon=False, prop={"family": "monospace", "size": 8})
    return figure
