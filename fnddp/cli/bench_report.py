"""Results of a benchmark: a table, a picture of the paired ratios, and every raw time as JSON."""

import json
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fnddp.cli.bench_arms import Setup
from fnddp.cli.bench_profile import OPERATIONS, PARTS
from fnddp.cli.bench_rank import WARM_UP, Measured, Times
from fnddp.cli.report import COLOURS
from fnddp.cli.terminal import Table, say
from fnddp.show.text import count

RATIOS, RESULTS = "ratios.png", "results.json"


class Ratio(NamedTuple):
    """Quartiles of the ratio of two arms' times, taken round by round."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Run:
    """A benchmark that was run, and what it was run on."""

    setup: Setup  # what was asked for
    ranks: int  # number of ranks
    link: str | None  # rate of each rank's link; None for loopback
    parameters: int  # elements that are trained
    measured: Measured  # what it took, and where
    launcher: str | None = None  # who has started the ranks; None if they were started here

    @property
    def times(self) -> list[Times]:
        """Of each arm."""
        return self.measured.times

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(set(self.measured.hosts))

    def ratio(self, arm: int, peer: int) -> Ratio:
        """Return the time of `arm` over that of `peer`."""
        pairs = zip(self.times[arm].steps, self.times[peer].steps, strict=True)
        return Ratio(*map(float, np.percentile([ours / theirs for ours, theirs in pairs], (25, 50, 75))))

    def link_bytes(self, arm: int) -> float:
        """Bytes that a rank sends in a step through its network interface, or its share of a shared one: the median."""
        sharing = 1 if self.link else self.measured.hosts.count(self.measured.hosts[0])
        return median(self.times[arm].link_bytes) / sharing

    @property
    def peers(self) -> list[int]:
        """Which arms are peers."""
        return list(range(len(self.setup.pipelines), len(self.setup.names)))

    @property
    def conditions(self) -> dict[str, object]:
        """All that a reader has to know to repeat it."""
        return {
            "command": shlex.join(["fnddp", *sys.argv[1:]]),
            "model": self.setup.model,
            "parameters": self.parameters,
            "ranks": self.ranks,
            "hosts": self.hosts,
            "started_by": self.launcher or "fnddp",
            "threads": self.measured.threads,
            "link": self.link,
            "engine": "compiled" if self.setup.compiled else self.setup.engine,
            "run_by": self.setup.backend or "python",
            "device": torch.cuda.get_device_name() if self.setup.device == "cuda" else "cpu",
            "backend": "nccl" if self.setup.device == "cuda" else "gloo",
            "pairs": self.setup.pairs,
            "untimed_rounds": WARM_UP,
            "seed": self.setup.seed,
            "torch": torch.__version__,
            "machine": f"{platform.system()} {platform.machine()}, {_processor()}",
        }


def show(run: Run) -> None:
    """Print the conditions, the comparison, who wins, and where the time goes."""
    say(", ".join(f"{key}: {value}" for key, value in run.conditions.items()) + "\n")
    table(run).show()
    if said := verdict(run):
        say(f"{said}\n")
    if run.setup.is_profiled:
        profile_table(run).show()


def table(run: Run) -> Table:
    """Return the comparison, a row for each arm."""
    if run.link:
        interface = "through each rank's link"
    elif run.hosts > 1:
        interface = "by all that runs on the first host, over its ranks; not what InfiniBand carries by itself"
    else:
        interface = "through loopback, by all that runs on this machine, over the number of ranks"
    rows: list[tuple[str, ...]] = []
    for arm, (name, times) in enumerate(zip(run.setup.names, run.times, strict=True)):
        against = ["1" if peer == arm else str(run.ratio(arm, peer)) for peer in run.peers]
        bytes_sent = (f"{times.wire_bytes:,}", f"{run.link_bytes(arm):,.0f}")
        rows.append((name, f"{median(times.steps) * 1e3:.1f}", *against, *bytes_sent))
    ratios = {f"time /\n{run.setup.names[peer]}": 5 if peer == run.peers[0] else 3 for peer in run.peers}
    return Table(
        "arm",
        {"ms": 4, **ratios, "wire": 2, "link": 1},
        rows,
        caption="ms: median of the steps, until the last rank was done\n"
        "time / PEER: median and quartiles of the ratio in the same round; below 1 is faster than the peer\n"
        "wire: bytes that a rank hands to its collectives in one step, counted (papers count so)\n"
        f"link: bytes sent in a step, with headers, {interface}",
    )


def verdict(run: Run) -> str:
    """Say whether a pipeline beats the fastest peer that synchronizes, and which; nothing if there is no such peer."""
    pipelines = len(run.setup.pipelines)
    rivals = [arm for arm in run.peers if run.setup.peers[arm - pipelines] != "none"]
    sending = [arm for arm in range(pipelines) if run.times[arm].wire_bytes]
    if not rivals or not sending:
        return ""
    peer = min(rivals, key=lambda arm: median(run.times[arm].steps))
    # Those that were faster in most rounds go first, however fast others were in some.
    arm = min(sending, key=lambda arm: (run.ratio(arm, peer).high >= 1, run.ratio(arm, peer).median))
    ours, theirs, ratio = run.setup.names[arm], run.setup.names[peer], run.ratio(arm, peer)
    if ratio.high < 1:
        return f"Fastest: {ours}, in {ratio.median:.2f} of the time of {theirs}"
    if ratio.low > 1:
        return f"Nothing is faster than {theirs} here: {ours} comes closest, in {ratio.median:.2f} of its time"
    return f"As fast as {theirs}, for all that {count(run.setup.pairs, 'round')} can tell: {ours}"


def profile_table(run: Run) -> Table:
    """Return where the time of a step goes, a row for each arm."""
    rows: list[tuple[str, ...]] = []
    for name, times in zip(run.setup.names, run.times, strict=True):
        assert times.profile is not None
        spent = (f"{times.profile[part]:.2f}" for part in PARTS)
        rows.append((name, *spent, f"{times.profile[OPERATIONS]:,.0f}"))
    return Table(
        "arm",
        {**dict.fromkeys(PARTS, 2), OPERATIONS: 1},
        rows,
        caption="ms of the host in a step of rank 0, each without the parts within it; the profiler itself costs some\n"
        "hooks: what autograd does with a gradient of a parameter, and all that hangs on it: torch's reducer, too\n"
        "operations: of aten in a whole step, nested ones counted",
    )


def write(out: Path, run: Run) -> None:
    """Write the picture and the numbers behind it into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    picture(run).savefig(out / RATIOS, dpi=150)
    (out / RESULTS).write_text(json.dumps(as_json(run), indent=1) + "\n")


def as_json(run: Run) -> dict[str, object]:
    """Return conditions and raw times."""
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
                "profile": times.profile,
            }
            for arm, (name, times) in enumerate(zip(names, run.times, strict=True))
        ],
    }


def picture(run: Run) -> Figure:
    """Draw the paired ratios, a panel for each peer."""
    rows = len(run.times)
    widest = max(map(len, run.setup.names))
    figure = Figure(figsize=(1 + 0.08 * widest + 4 * len(run.peers), 1.9 + 0.42 * rows), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, len(run.peers), sharey=True, squeeze=False)[0]
    for axes, peer in zip(panels, run.peers, strict=True):
        ratios = [run.ratio(arm, peer) for arm in range(rows)]
        for arm, ratio in enumerate(ratios):
            _draw(axes, arm, ratio, COLOURS[arm % len(COLOURS)])
        axes.axvline(1, color="0.4", linewidth=1, linestyle=":")
        axes.set_xlim(0, 1.2 * max(ratio.high for ratio in ratios))  # room for the numbers
        axes.set_xlabel(f"time of a step / {run.setup.names[peer]}")
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(rows), run.setup.names, family="monospace", size=9)
    panels[0].invert_yaxis()
    link = f"{run.link} links" if run.link else f"{run.hosts} hosts" if run.hosts > 1 else "loopback"
    figure.suptitle(
        f"{run.setup.model}, {run.parameters / 1e6:.1f} M parameters, {count(run.ranks, 'rank')}, {link}: "
        f"median and quartiles of {run.setup.pairs} paired steps",
        size=10,
    )
    return figure


def _draw(axes: Axes, y: int, ratio: Ratio, colour: str) -> None:
    axes.barh(y, ratio.median, height=0.55, color=colour, alpha=0.35)
    axes.plot([ratio.low, ratio.high], [y, y], color=colour, linewidth=5, solid_capstyle="butt")
    axes.text(ratio.high, y, f" {ratio.median:.2f}", va="center", size=9)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown processor"
    )
