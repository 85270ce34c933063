"""`fnddp doctor` and `fnddp trace`: compare ranks, measure links and steps, and predict steps from these."""

import math
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import fnddp
from fnddp.cli.checks import cores
from fnddp.cli.failures import EXTRA, WrongArgument
from fnddp.cli.launch import Ranks, Stage, share_cores
from fnddp.cli.models import load
from fnddp.cli.terminal import SIZES, Grid, echo
from fnddp.core.agreement import digest_of, first_difference
from fnddp.core.parse import parse
from fnddp.core.sync import Sync
from fnddp.cost.estimate import Compute
from fnddp.cost.link import Link, duration
from fnddp.cost.measure import measure_link
from fnddp.device import accelerator, built_for, device_of
from fnddp.run.choose import MARGIN, measured
from fnddp.run.measure import measure_backward, measure_segments
from fnddp.show.beside import STEP, beside
from fnddp.show.text import count
from fnddp.simulation.tune import MEAN, SIXTEEN_BITS, Outcome, cost, trained
from fnddp.wire import control

REQUIRED = ("torch", "numpy", "optree", "einops")
PROBES = (MEAN, "bf16(two_shot)", "error_feedback(powersgd(allreduce, rank=2))")
"""Pipelines with means that must be bitwise equal on all ranks: sums by the backend, in rank order, in rounds."""

COMPRESSED = (
    "bucketize(quantize(two_shot))",
    "bucketize(quantize(two_shot, bits=4))",
    "error_feedback(powersgd(bf16(allreduce), rank=4))",
)
WARM_UP = 3  # steps before one is recorded: the first one learns the order of gradients, the second one follows it


@dataclass(frozen=True)
class Findings:
    hosts: list[str]  # of each rank
    disagreement: str | None  # the first difference between ranks; None if there is none
    unequal: list[str]  # pipelines with different means on some ranks
    links: dict[str, Link]  # by the ranks that they connect; empty in a world of one
    costs: list[Outcome] = field(default_factory=list[Outcome])  # predicted on the link of all ranks, by rank 0
    compute: Compute = field(default_factory=Compute)  # measured by rank 0
    chosen: str = MEAN  # the choice of sync="auto" on the link of all ranks

    @property
    def is_sound(self) -> bool:
        """True if all ranks have the same versions and devices, and get equal means from each pipeline of `PROBES`."""
        return self.disagreement is None and not self.unequal


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all ranks."""
    found = {"python": platform.python_version(), "fnddp": fnddp.__version__}
    found |= {name: metadata.version(name) for name in REQUIRED}
    return {**found, "built for": built_for(), "byte order": sys.byteorder}


def examine(model: str, device: str) -> Iterator[Stage | Findings]:
    """Compare ranks, measure links and predict steps: yield each stage, then the findings. All ranks must call it."""
    yield Stage("comparing ranks")
    name = device_of(torch.device(device)).name
    here = {**versions(), "processor": platform.machine(), "device": name}
    everyone = control.all_gather_object((socket.gethostname(), here), None)
    hosts, facts = [host for host, _ in everyone], [about for _, about in everyone]
    share_cores(hosts)
    disagreement = None if all(about == facts[0] for about in facts) else first_difference(facts)
    unequal = [text for text in PROBES if not _is_equal(text, device)]
    links: dict[str, Link] = {}
    for between, group in _groups(hosts):
        yield Stage(f"measuring the link {between}")
        links[between] = measure_link(group)
    found = (yield from predicted(list(links.values())[-1], model, device)) if links else ([], Compute(), MEAN)
    yield Findings(hosts, disagreement, unequal, links, *found)


def _is_equal(text: str, device: str) -> bool:
    """Return whether the mean of `text` has the same bits on all ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    grads = {"weight": torch.randn(64, 48, generator=generator), "bias": torch.randn(48, generator=generator)}
    grads = {path: leaf.to(device) for path, leaf in grads.items()}
    sync = parse(text)
    mean, _ = sync(grads, sync.init(grads))
    return len(set(control.all_gather_object(digest_of(mean.values()), None))) == 1


def _groups(hosts: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the process groups to measure, named by link: inside a host, between hosts, between all ranks."""
    here = hosts[dist.get_rank()]
    by_host = {host: [rank for rank, its in enumerate(hosts) if its == host] for host in hosts}
    sizes = set(map(len, by_host.values()))
    if len(by_host) > 1 and sizes != {1} and len(sizes) == 1:
        inside = [dist.new_group(ranks) for ranks in by_host.values()]
        yield "inside a host", inside[list(by_host).index(here)]
        across = [dist.new_group(list(ranks)) for ranks in zip(*by_host.values(), strict=True)]
        yield "between hosts", across[by_host[here].index(dist.get_rank())]
    if len(hosts) > 1:
        yield ("between hosts" if len(by_host) == len(hosts) else "between all ranks"), None


def predicted(link: Link, model: str, device: str) -> Generator[Stage, None, tuple[list[Outcome], Compute, str]]:
    """Time backward and codecs, on all ranks at once (they share cores and caches), and predict steps on `link`.

    The last part of the result is the choice of `sync="auto"` there.
    """
    costs: list[Outcome] = []
    yield Stage("timing backward")
    problem = load(model)
    network = problem.make(0).to(device)
    batch = [part.to(device) for part in problem.batch(0, 1, torch.Generator().manual_seed(0))]
    leaves = trained(network)
    control.all_gather_object(None, None)  # a barrier: ranks time together; one before each, so that none times out
    compute = measure_backward(problem.loss_of(network), leaves, *batch)
    yield Stage('timing codecs for sync="auto"')
    chosen = measured(leaves, None, link)[0].taken
    texts = tuple(dict.fromkeys((MEAN, *SIXTEEN_BITS, *COMPRESSED, chosen)))
    for i, text in enumerate(texts):
        yield Stage(f"timing {text}", i, len(texts))
        control.all_gather_object(None, None)
        costs.append(cost(parse(text), leaves, link, dist.get_world_size(), compute))
    return costs, compute, chosen


def installed() -> list[str]:
    """Return lines about the installed versions and the machine."""
    have = ", ".join(f"{name} {version}" for name, version in versions().items())
    missing = ", ".join(name for name in EXTRA if find_spec(name) is None)
    kind, number = accelerator(), torch.accelerator.device_count()
    names = [device_of(torch.device(kind, i)).name for i in range(number)] if kind else []
    counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no accelerator"
    return [
        f"installed: {have}",
        "extra demo: " + (f"not installed: {missing} (pip install 'fnddp[demo]')" if missing else "installed"),
        f"machine: {platform.system()} {platform.machine()}, {count(cores(), 'core')}, {counted}",
    ]


def show(findings: Findings, of: Ranks, model: str) -> None:
    echo("\n".join(lines(findings, of)))
    if findings.costs:
        echo("")
        table(findings, model).show()
        echo(verdict(findings))
        if len(set(findings.hosts)) == 1:
            cluster = "; on a cluster, run fnddp doctor under torchrun" if of.at is None else ""
            elsewhere = f"--link 200mbit --model {model}"
            echo(f"These ranks share a machine. For another link: fnddp plan auto --ranks N {elsewhere}{cluster}")
            echo(f"To time steps over an emulated link, as root: fnddp bench auto {elsewhere}")


def lines(findings: Findings, of: Ranks) -> list[str]:
    """Return lines about ranks, whether they agree, and their links."""
    started = "started here" if of.at is None else f"started by {of.at.launcher}"
    backend = device_of(torch.device(of.device)).backend
    same = "ok: versions and devices are the same on all ranks"
    equal = f"ok: means are equal on all ranks, bit for bit: {', '.join(PROBES)}"
    unequal = f"PROBLEM: means are not equal on all ranks: {', '.join(findings.unequal)}"
    return [
        f"ranks: {len(findings.hosts)}, {started}, on {', '.join(dict.fromkeys(findings.hosts))}; {backend}",
        same if findings.disagreement is None else f"PROBLEM: {findings.disagreement}",
        unequal if findings.unequal else equal,
        *(f"link {between}: {link}" for between, link in findings.links.items()),
    ]


def table(findings: Findings, model: str) -> Grid:
    """Return the predicted steps, the fastest first."""
    rows = [
        (
            each.pipeline,
            duration(each.seconds),
            duration(each.step.exposed_seconds),
            duration(each.step.encode_seconds + each.step.decode_seconds),
            f"{each.link_bytes:,}",
        )
        for each in sorted(findings.costs, key=lambda each: each.seconds)
    ]
    forward, backward = map(duration, (findings.compute.forward_seconds, findings.compute.backward_seconds))
    legend = {
        "step": f"of {model}: forward {forward}, backward {backward}, codec and exposed",
        "exposed": "time that a step waits for communication, predicted from the last link",
        "codec": "encoding and decoding",
        "link B": SIZES["link B"],
    }
    note = f"Forward, backward and codec are those of rank 0, timed on {count(len(findings.hosts), 'rank')} at once."
    return Grid("pipeline", {"step": 4, "exposed": 3, "codec": 2, "link B": 1}, rows, legend, note)


def verdict(findings: Findings) -> str:
    """Return the choice of `sync="auto"` here and its gain, and the fastest pipeline if it is much faster."""
    by_text = {each.pipeline: each for each in findings.costs}
    plain, auto = by_text[MEAN], by_text[findings.chosen]
    best = min(findings.costs, key=lambda each: each.seconds)
    pays = best.seconds <= (1 - MARGIN) * plain.seconds
    said = "Compression can pay here" if pays else "No compression saves a tenth of a step here"
    said += f': sync="auto" takes {auto.pipeline}'
    if auto is not plain:
        said += f", {plain.seconds / auto.seconds:.2f}x as fast as the plain mean"
    if auto is not plain and auto.seconds > (1 - MARGIN) * plain.seconds:
        said += "; it does not know how much communication backward hides"
    if best.seconds <= (1 - MARGIN) * auto.seconds:
        said += f". Faster: {best.pipeline}, {auto.seconds / best.seconds:.2f}x as fast as that"
        said += "" if best is plain else "; whether your model trains as well with it: fnddp tune"
    return said


def as_json(findings: Findings, device: str) -> dict[str, Any]:
    return {
        "versions": versions(),
        "hosts": findings.hosts,
        "device": device,
        "disagreement": findings.disagreement,
        "unequal": findings.unequal,
        "links": {
            between: {"bandwidth": link.bandwidth, "latency": link.latency} for between, link in findings.links.items()
        },
        "forward_seconds": findings.compute.forward_seconds,
        "backward_seconds": findings.compute.backward_seconds,
        "pipelines": [each.as_json() for each in findings.costs],
        "auto": findings.chosen,
        "verdict": verdict(findings) if findings.costs else None,
    }


def record(sync: Sync, name: str, seed: int) -> Iterator[Stage | tuple[str, Grid]]:
    """Train a few steps of the problem `name`, and yield one, measured and predicted, as JSON and as a table."""
    torch.set_num_threads(1)  # ranks share a machine
    rank, world_size = dist.get_rank(), dist.get_world_size()
    problem = load(name)
    network = problem.make(seed)
    generator = torch.Generator().manual_seed(seed * world_size + rank)
    yield Stage("measuring the link")
    link = measure_link() if world_size > 1 else None
    yield Stage("timing backward")
    batch = problem.batch(rank, world_size, generator)
    compute = measure_backward(problem.loss_of(network), trained(network), *batch)
    model = fnddp.DistributedDataParallel(network, sync=sync)
    model.sync_stats()  # from now on it measures

    def step() -> None:
        problem.loss(model, problem.batch(rank, world_size, generator)).backward()
        model.zero_grad()

    yield Stage("warming up")
    for _ in range(WARM_UP):
        step()
    if model.plan is None:
        raise WrongArgument(f"{sync!r} reads values or runs foreign code, so it has no plan to predict steps from")
    yield Stage("recording")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13 prints that a profile starts, and ends
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(STEP):
        begin = time.perf_counter()
        step()
        seconds = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/step.json")
        measured = Path(folder, "step.json").read_text()
    on, compute = link or Link(math.inf), replace(compute, segments=measure_segments(model.plan, model.sync_state))
    stats, predicted = model.sync_stats(), model.plan.predict(on, compute)
    pairs = {
        "step": (seconds, predicted.seconds),
        "encode": (stats["encode_seconds"], predicted.encode_seconds),
        "decode": (stats["decode_seconds"], predicted.decode_seconds),
        "exposed": (stats["exposed_seconds"], predicted.exposed_seconds),
    }
    rows = [(name, *(duration(each or 0.0) for each in pair)) for name, pair in pairs.items()]
    legend = {"predicted": "from what all ranks have measured at once"}
    note = f"{f'link {link}' if link else 'one rank'}; wire {stats['wire_bytes']:,} B"
    table = Grid("part", {"measured": 2, "predicted": 1}, rows, legend, note)
    yield beside(measured, model.plan.to_trace(on, compute)), table
