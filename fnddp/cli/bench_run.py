"""The configuration of a benchmark, and its results: times of all arms on all ranks, and what follows from them."""

import platform
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from fnddp.core.sync import Sync
from fnddp.device import device_of
from fnddp.run.choose import Auto

# DDP rebuilds its buckets after the first step, and torch's PowerSGD starts in the third.
WARM_UP = 4


@dataclass(frozen=True)
class Setup:
    """The configuration of a benchmark."""

    model: str  # as `fnddp.cli.models.load` takes it
    pipelines: list[Sync | Auto]  # ours
    peers: list[str]  # to compare with, of `PEERS`
    ranks: int
    parameters: int  # elements that are trained
    engine: str = "ddp"  # how a pipeline is run: "ddp", "register" or "value_and_grad"
    compiled: bool = False  # compile the step. Ours are then functional, whatever the engine
    device: str = "cpu"  # its kind
    pairs: int = 30  # timed rounds; each runs every arm once
    seed: int = 0  # of the parameters and of the order of arms in a round
    is_profiled: bool = False  # measure where the time of a step goes, too
    backend: str | None = None  # that runs the segments of our plans
    link: str | None = None  # rate of each rank's link; None for loopback
    launcher: str | None = None  # that has started the ranks; None if they were started here

    @property
    def names(self) -> list[str]:
        """The arms, in order: ours, then the peers. One that occurs twice is numbered."""
        texts = [*map(str, self.pipelines), *self.peers]
        return [f"{text} #{n}" if (n := texts[: i + 1].count(text)) > 1 else text for i, text in enumerate(texts)]

    @property
    def functional(self) -> bool:
        """True where ours are functions of parameters, and not modules."""
        return self.compiled or self.engine == "value_and_grad"


@dataclass(frozen=True)
class Times:
    """Times and bytes of one arm."""

    seconds: list[list[float]]  # of each timed step (inner) on each rank (outer)
    wire_bytes: int  # that rank 0 passed to its collectives in one more step, counted
    link_bytes: list[int]  # of each timed step: what left through the network interface of rank 0
    profile: dict[str, float] | None = None  # milliseconds of a step of rank 0, by purpose

    @property
    def steps(self) -> list[float]:
        """Seconds of each timed step, until the last rank was done."""
        return [max(ranks) for ranks in zip(*self.seconds, strict=True)]


class Ratio(NamedTuple):
    """Quartiles of the ratio of two arms' times, taken round by round."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Run:
    """The results of a benchmark."""

    setup: Setup
    times: list[Times]  # of each arm
    hosts: list[str]  # of each rank
    threads: int  # of each rank on the CPU

    def ratio(self, arm: int, peer: int) -> Ratio:
        """Return the time of `arm` over that of `peer`."""
        pairs = zip(self.times[arm].steps, self.times[peer].steps, strict=True)
        return Ratio(*map(float, np.percentile([ours / theirs for ours, theirs in pairs], (25, 50, 75))))

    def link_bytes(self, arm: int) -> float:
        """Return the median bytes that a rank sends in a step through its interface, or its share of a shared one."""
        sharing = 1 if self.setup.link else self.hosts.count(self.hosts[0])
        return median(self.times[arm].link_bytes) / sharing

    @property
    def peers(self) -> list[int]:
        """The arms that are peers."""
        return list(range(len(self.setup.pipelines), len(self.setup.names)))

    @property
    def conditions(self) -> dict[str, object]:
        """All that a reader has to know to repeat it."""
        setup = self.setup
        return {
            "command": shlex.join(["fnddp", *sys.argv[1:]]),
            "model": setup.model,
            "parameters": setup.parameters,
            "ranks": setup.ranks,
            "hosts": len(set(self.hosts)),
            "started_by": setup.launcher or "fnddp",
            "threads": self.threads,
            "link": setup.link,
            "engine": "compiled" if setup.compiled else setup.engine,
            "run_by": setup.backend or "python",
            "device": device_of(torch.device(setup.device)).name,
            "backend": device_of(torch.device(setup.device)).backend,
            "pairs": setup.pairs,
            "untimed_rounds": WARM_UP,
            "seed": setup.seed,
            "torch": torch.__version__,
            "machine": f"{platform.system()} {platform.machine()}, {_processor()}",
        }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown processor")
