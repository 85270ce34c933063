"""Findings of `fnddp doctor` as lines, a table, or JSON."""

import platform
from importlib.util import find_spec
from typing import Any

import torch

from fnddp.cli import examination
from fnddp.cli.checks import cores
from fnddp.cli.examination import Findings
from fnddp.cli.failures import EXTRA
from fnddp.cli.launcher import RankInfo
from fnddp.cli.terminal import Table, echo
from fnddp.cost.link import duration
from fnddp.show.text import count
from fnddp.simulate.tune import MARGIN, MEAN, SIXTEEN_BITS


def installed() -> list[str]:
    """Return lines about what is installed, and on which machine."""
    have = ", ".join(f"{name} {version}" for name, version in examination.versions().items())
    missing = ", ".join(name for name in EXTRA if find_spec(name) is None)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    counted = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "no GPU"
    return [
        f"installed: {have}",
        "extra demo: " + (f"not installed: {missing} (pip install 'fnddp[demo]')" if missing else "installed"),
        f"machine: {platform.system()} {platform.machine()}, {count(cores(), 'core')}, {counted}",
    ]


def show(findings: Findings, at: RankInfo | None, model: str, device: str) -> None:
    """Print the findings of the ranks."""
    echo("\n".join(lines(findings, at, device)))
    if findings.costs:
        echo("")
        table(findings, model).show()
        echo(verdict(findings))


def lines(findings: Findings, at: RankInfo | None, device: str) -> list[str]:
    """Return lines about ranks, whether they agree, and their links."""
    started = "started here" if at is None else f"started by {at.launcher}"
    backend = "NCCL" if device == "cuda" else "gloo"
    same = "ok: versions and devices are the same on all ranks"
    equal = f"ok: means are equal on all ranks, to the bit: {', '.join(examination.PROBES)}"
    unequal = f"PROBLEM: means are not equal on all ranks: {', '.join(findings.unequal)}"
    return [
        f"ranks: {len(findings.hosts)}, {started}, on {', '.join(dict.fromkeys(findings.hosts))}; {backend}",
        same if findings.disagreement is None else f"PROBLEM: {findings.disagreement}",
        unequal if findings.unequal else equal,
        *(
            f"link {between}: {link} (alpha {duration(link.latency)}, beta {1e9 / link.bandwidth:.3g} ns/B)"
            for between, link in findings.links.items()
        ),
    ]


def table(findings: Findings, model: str) -> Table:
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
    caption = (
        f"{model} on {count(len(findings.hosts), 'rank')}: forward {forward}, backward {backward} and codec, to encode "
        "and decode, measured by all ranks at once (the first one's); the rest predicted from the link above\n"
        "exposed: what is left to wait for; link: bytes that a rank sends in a step"
    )
    return Table("pipeline", {"step": 4, "exposed": 3, "codec": 2, "link B": 1}, rows, caption)


def verdict(findings: Findings) -> str:
    """Return whether compression can pay here, and which."""
    by_text = {each.pipeline: each for each in findings.costs}
    best = min(findings.costs, key=lambda each: each.seconds)
    half = min((by_text[text] for text in SIXTEEN_BITS), key=lambda each: each.seconds)
    plain = by_text[MEAN]
    if best.seconds > (1 - MARGIN) * plain.seconds:
        return f"Nothing can pay here: {MEAN} leaves {duration(plain.step.exposed_seconds)} of a step exposed"
    if best.seconds > (1 - MARGIN) * half.seconds:
        faster = plain.seconds / half.seconds
        return f"A 16-bit wire can pay here, and nothing beats it: {half.pipeline}, {faster:.2f}x as fast as {MEAN}"
    return (
        f"Compression can pay here: {best.pipeline}, {half.seconds / best.seconds:.2f}x as fast as {half.pipeline}. "
        "Whether it trains as well: fnddp tune"
    )


def as_json(findings: Findings, device: str) -> dict[str, Any]:
    """Return the same, for programs."""
    return {
        "versions": examination.versions(),
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
        "verdict": verdict(findings) if findings.costs else None,
    }
