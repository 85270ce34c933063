"""Results of a benchmark: a table, a picture of the paired ratios, and every raw time as JSON."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fnddp.cli.bench_rank import Run
from fnddp.cli.checks import cores
from fnddp.cli.picture import COLOURS, dress
from fnddp.cli.terminal import SIZES, Grid, echo
from fnddp.run.choose import AUTO
from fnddp.show.text import count

RATIOS = "ratios.png"
LEAST = 3  # rounds needed for meaningful quartiles
BUSY = 0.5  # load for each core above which times are noisy


def show(run: Run) -> None:
    """Print the conditions, the comparison, and the verdict."""
    echo(", ".join(f"{key}: {value}" for key, value in run.conditions.items() if value is not None) + "\n")
    table(run).show()
    if line := verdict(run):
        echo(f"{line}\n")
    if run.setup.load > BUSY * cores():
        echo(f"The load average was {run.setup.load:.1f} on {count(cores(), 'core')} at the start: raise --pairs\n")


def table(run: Run) -> Grid:
    """Return the comparison, a row for each arm."""
    if run.setup.ranks.link:
        interface = "through each rank's link"
    elif len(set(run.hosts)) > 1:
        interface = "by all that runs on the first host, over its ranks; not what InfiniBand carries by itself"
    else:
        interface = "through loopback, by all that runs on this machine, over the number of ranks"
    names = run.setup.names
    rows: list[tuple[str, ...]] = []
    for arm, (name, times) in enumerate(zip(names, run.times, strict=True)):
        against = ["1" if peer == arm else str(run.ratio(arm, peer)) for peer in run.peers]
        bytes_sent = (f"{times.wire_bytes:,}", f"{run.link_bytes(arm):,.0f}")
        name = f"{name}: {run.taken}" if name == AUTO and run.taken else name
        rows.append((name, f"{median(times.steps) * 1e3:.1f}", *against, *bytes_sent))
    legend = {
        "ms": "median of the steps, until the last rank was done",
        "time": "over the peer's in the same round, median and quartiles; below 1 is faster",
        "wire": f"{SIZES['wire B']}, counted",
        "link": f"bytes sent in a step, measured with headers {interface}",
    }
    ratios = {f"time /\n{names[peer]}": 5 if peer == run.peers[0] else 3 for peer in run.peers}
    return Grid("arm", {"ms": 4, **ratios, "wire": 2, "link": 1}, rows, legend)


def verdict(run: Run) -> str:
    """Return a sentence about the pipeline that beats the fastest synchronizing peer; "" without such a peer."""
    pipelines = len(run.setup.pipelines)
    rivals = [arm for arm in run.peers if run.setup.peers[arm - pipelines] != "none"]
    sending = [arm for arm in range(pipelines) if run.times[arm].wire_bytes]
    if not rivals or not sending:
        return ""
    peer = min(rivals, key=lambda arm: median(run.times[arm].steps))
    # Arms that were faster in most rounds go first, even if others were faster in some.
    arm = min(sending, key=lambda arm: (run.ratio(arm, peer).high >= 1, run.ratio(arm, peer).median))
    ours, theirs, ratio = run.setup.names[arm], run.setup.names[peer], run.ratio(arm, peer)
    if run.setup.pairs < LEAST:
        return f"{count(run.setup.pairs, 'round')} cannot tell whether {ours} is faster than {theirs}: raise --pairs"
    if ratio.high < 1:
        fastest = run.setup.names[min(sending, key=lambda arm: run.ratio(arm, peer).median)]
        if fastest == ours:
            return f"Fastest: {ours}, in {ratio.median:.2f} of the time of {theirs}"
        said = f"Surely faster than {theirs}: {ours}, in {ratio.median:.2f} of its time"
        return f"{said}; {fastest} has the least median, of rounds that differ too much to tell"
    if ratio.low > 1:
        return f"Nothing is faster than {theirs} here: {ours} comes closest, in {ratio.median:.2f} of its time"
    return f"As fast as {theirs}, as far as {count(run.setup.pairs, 'round')} can show: {ours}"


def as_json(run: Run) -> dict[str, Any]:
    names = run.setup.names
    return {
        **run.conditions,
        "verdict": verdict(run),
        "arms": [
            {
                "arm": name,
                "peer": arm in run.peers,
                "median_seconds": median(times.steps),
                "ratios": {names[peer]: run.ratio(arm, peer)._asdict() for peer in run.peers},
                "wire_bytes": times.wire_bytes,
                "link_bytes": run.link_bytes(arm),
                "interface_bytes_by_step": times.link_bytes,
                "seconds_by_rank_and_step": times.seconds,
            }
            for arm, (name, times) in enumerate(zip(names, run.times, strict=True))
        ],
    }


def draw(run: Run) -> Figure:
    """Draw the paired ratios, a panel for each peer."""
    setup, rows, hosts = run.setup, len(run.times), len(set(run.hosts))
    widest = max(map(len, setup.names))
    figure = Figure(figsize=(1 + 0.08 * widest + 4 * len(run.peers), 1.9 + 0.42 * rows), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, len(run.peers), sharey=True, squeeze=False)[0]
    for axes, peer in zip(panels, run.peers, strict=True):
        ratios = [run.ratio(arm, peer) for arm in range(rows)]
        for y, ratio in enumerate(ratios):
            colour = COLOURS[y % len(COLOURS)]
            axes.barh(y, ratio.median, height=0.55, color=colour, alpha=0.35)
            axes.plot([ratio.low, ratio.high], [y, y], color=colour, linewidth=5, solid_capstyle="butt")
            axes.text(ratio.high, y, f" {ratio.median:.2f}", va="center", size=9)
        axes.axvline(1, color="0.4", linewidth=1, linestyle=":")
        axes.set_xlim(0, 1.2 * max(ratio.high for ratio in ratios))  # room for the numbers
        axes.set_xlabel(f"time of a step / {setup.names[peer]}")
        dress(axes, axis="x")
    panels[0].set_yticks(range(rows), setup.names, family="monospace", size=9)
    panels[0].invert_yaxis()
    link = f"{setup.ranks.link} links" if setup.ranks.link else f"{hosts} hosts" if hosts > 1 else "loopback"
    figure.suptitle(
        f"{setup.model}, {setup.parameters:,} parameters, {count(setup.ranks.count, 'rank')}, {link}: "
        f"median and quartiles of {setup.pairs} paired steps",
        size=10,
    )
    return figure
