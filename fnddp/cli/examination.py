"""The ranks' part of `fnddp doctor`: compare them with each other, measure links, and predict steps."""

import platform
import socket
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

import fnddp
from fnddp.cli.launch import Stage
from fnddp.cli.launcher import share_cores
from fnddp.cli.models import BATCH_SIZE, functional, load, trained
from fnddp.core.agreement import digest_of, first_difference
from fnddp.core.parse import parse
from fnddp.cost.link import Link
from fnddp.cost.measure import measure_link
from fnddp.cost.step import Compute
from fnddp.run.measure import measure_backward
from fnddp.simulate.tune import MEAN, SIXTEEN_BITS, Outcome, cost
from fnddp.wire import control

REQUIRED = ("torch", "numpy", "optree", "einops")
PROBES = (MEAN, "bf16(two_shot)", "error_feedback(powersgd(allreduce, rank=2))")
"""Pipelines whose means must be equal to the bit: sums by the backend, sums in rank order, and several rounds."""

COMPRESSED = (
    "bucketize(quantize(two_shot))",
    "bucketize(quantize(two_shot, bits=4))",
    "error_feedback(powersgd(bf16(allreduce), rank=4))",
)
BUCKET_CAP_MB = 25


@dataclass(frozen=True)
class Findings:
    """The findings of all ranks together."""

    hosts: list[str]  # of each rank
    disagreement: str | None  # what is not the same on all ranks; None if all is
    unequal: list[str]  # pipelines whose mean is not the same on all ranks
    links: dict[str, Link]  # by what they connect; none in a world of one
    costs: list[Outcome] = field(default_factory=list[Outcome])  # predicted on the slowest link, by the first rank
    compute: Compute = field(default_factory=Compute)  # measured by the first rank

    @property
    def is_sound(self) -> bool:
        """True where training would be right."""
        return self.disagreement is None and not self.unequal


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all ranks."""
    found = {"python": platform.python_version(), "fnddp": fnddp.__version__}
    found |= {name: metadata.version(name) for name in REQUIRED}
    return {**found, "cuda": str(torch.version.cuda), "byte order": sys.byteorder}


def examine(model: str, device: str) -> Iterator[Stage | Findings]:
    """Examine this rank and its place among the others, all of which must do so."""
    yield Stage("comparing ranks")
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
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
    costs, compute = (yield from predicted(list(links.values())[-1], model, device)) if links else ([], Compute())
    yield Findings(hosts, disagreement, unequal, links, costs, compute)


def _is_equal(text: str, device: str) -> bool:
    """Return whether the mean of `text` has the same bits on all ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    grads = {"weight": torch.randn(64, 48, generator=generator), "bias": torch.randn(48, generator=generator)}
    grads = {path: leaf.to(device) for path, leaf in grads.items()}
    sync = parse(text)
    mean, _ = sync(grads, sync.init(grads))
    return len(set(control.all_gather_object(digest_of(mean.values()), None))) == 1


def _groups(hosts: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield groups to measure, by what is between their ranks: within one host, across hosts, and all."""
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


def predicted(link: Link, model: str, device: str) -> Generator[Stage, None, tuple[list[Outcome], Compute]]:
    """Return costs of steps on `link`, and of backward: measured by all ranks at once, which share cores and caches."""
    costs: list[Outcome] = []
    yield Stage("timing backward")
    workload = load(model)
    network, task = workload.make(0).to(device), workload.task(BATCH_SIZE)
    batch = [part.to(device) for part in task.batch(0, 1, torch.Generator().manual_seed(0))]
    leaves = trained(network)
    control.all_gather_object(None, None)  # together, and a little at a time, so that none times out
    compute = measure_backward(functional(network, task.loss), leaves, *batch)
    texts = (MEAN, *SIXTEEN_BITS, *COMPRESSED)
    for i, text in enumerate(texts):
        yield Stage(f"timing {text}", i, len(texts))
        control.all_gather_object(None, None)
        costs.append(cost(parse(text), leaves, link, dist.get_world_size(), compute, BUCKET_CAP_MB))
    return costs, compute
