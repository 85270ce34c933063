"""What one rank does for `fnddp doctor`: compare with the others, measure links, and predict steps."""

import platform
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

import fnddp
from fnddp.cli.launcher import share_cores
from fnddp.cli.models import BATCH_SIZE, functional, load, trained
from fnddp.cli.rank import Stage
from fnddp.core.agreement import digest_of, first_difference
from fnddp.core.parse import parse
from fnddp.cost.link import Link
from fnddp.cost.measure import measure_link
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
    """What the ranks have found together."""

    hosts: list[str]  # of each rank
    disagreement: str | None  # what is not the same on all ranks; None if all is
    unequal: list[str]  # pipelines whose mean is not the same on all ranks
    links: dict[str, Link]  # by what they connect; none in a world of one
    costs: list[Outcome] = field(default_factory=list[Outcome])  # predicted on the slowest link, by the first rank
    forward_seconds: float = 0.0  # measured by the first rank
    backward_seconds: float = 0.0  # measured by the first rank

    @property
    def is_sound(self) -> bool:
        """Whether training would be right."""
        return self.disagreement is None and not self.unequal


def versions() -> dict[str, str]:
    """Return the versions of what decides whether ranks compute alike."""
    found = {"python": platform.python_version(), "fnddp": fnddp.__version__}
    found |= {name: metadata.version(name) for name in REQUIRED}
    return {**found, "cuda": str(torch.version.cuda), "byte order": sys.byteorder}


def examine(model: str, device: str) -> Iterator[Stage | Findings]:
    """Examine this rank and its place among the others, all of which must do so."""
    yield Stage("comparing ranks")
    here = {**versions(), "processor": platform.machine(), "device": _device_name(device)}
    everyone = control.all_gather_object((socket.gethostname(), here), None)
    hosts, facts = [host for host, _ in everyone], [about for _, about in everyone]
    share_cores(hosts)
    disagreement = None if all(about == facts[0] for about in facts) else first_difference(facts)
    unequal = [text for text in PROBES if not _is_equal(text, device)]
    links: dict[str, Link] = {}
    for between, group in _groups(hosts):
        yield Stage(f"measuring the link {between}")
        links[between] = measure_link(group)
    findings = Findings(hosts, disagreement, unequal, links)
    if links:
        yield from _predicted(findings, model, device)
    else:
        yield findings


def _is_equal(text: str, device: str) -> bool:
    """Return whether the mean of `text` has the same bits on all ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    grads = {"weight": torch.randn(64, 48, generator=generator), "bias": torch.randn(48, generator=generator)}
    grads = {path: leaf.to(device) for path, leaf in grads.items()}
    sync = parse(text)
    mean, _ = sync(grads, sync.init(grads))
    return len(set(control.all_gather_object(digest_of(mean.values()), None))) == 1


def _groups(hosts: list[str]) -> Iterator[tuple[str, Any]]:
    """Groups to measure, by what is between their ranks: within one host, across hosts, and all."""
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


def _predicted(findings: Findings, model: str, device: str) -> Iterator[Stage | Findings]:
    """`findings`, with predicted steps. All ranks measure at once, as they share cores and caches when they train."""
    link, ranks = list(findings.links.values())[-1], len(findings.hosts)
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
        costs.append(cost(parse(text), leaves, link, ranks, compute, BUCKET_CAP_MB))
    yield replace(
        findings, costs=costs, forward_seconds=compute.forward_seconds, backward_seconds=compute.backward_seconds
    )


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"
