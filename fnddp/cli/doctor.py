"""`fnddp doctor`: what is here, whether ranks agree, how fast their links are, and what can pay."""

import json
import platform
from contextlib import closing
from importlib import metadata

import torch

from fnddp.cli import examination, launcher, lessons, terminal
from fnddp.cli.checks import cores
from fnddp.cli.examination import Findings, Stage, examine
from fnddp.cli.failures import FAILED
from fnddp.cli.launch import RankError
from fnddp.cli.launcher import HINT, Place, check_device, check_ranks, on_ranks
from fnddp.cli.table import Column, Table
from fnddp.cost.link import duration
from fnddp.show.text import count
from fnddp.tune import MARGIN, MEAN, SIXTEEN_BITS

EXTRAS = {"demo": ("rich", "matplotlib", "scikit-learn")}


def run(*, ranks: int | None, model: str, device: str, as_json: bool) -> int:
    """Examines this installation, its ranks and their links, and prints what it has found.

    Args:
        ranks: Number of processes to start; None for 2, or for those that a launcher has started.
        model: Whose steps are predicted, as `fnddp.cli.lessons.lesson` takes it.
        device: "cpu", "cuda", or "auto".
        as_json: Print JSON, and nothing else.

    Returns:
        The exit code of the command: 1 if ranks disagree.
    """

    def work(at: Place | None) -> int:
        reports = launcher.reports(at)
        lessons.parameters(model)
        world_size = check_ranks(ranks, at)
        on = check_device(device, world_size, at)
        if reports and not as_json:
            print("\n".join(_installed()), flush=True)
        findings = _examined(world_size, at, model, on)
        if reports:
            print(json.dumps(_as_dict(findings, on), indent=1) if as_json else _told(findings, at, on))
        if reports and not as_json and findings.costs:
            _show_steps(findings, model)
        return 0 if findings.is_sound else FAILED

    return launcher.at_place("doctor", work)


def _examined(ranks: int, at: Place | None, model: str, device: str) -> Findings:
    backend = "nccl" if device == "cuda" else "gloo"
    found: Findings | None = None
    try:
        with (
            terminal.status() as status,
            closing(on_ranks(at, ranks, examine, model, device, backend=backend)) as events,
        ):
            for event in events:
                if isinstance(event, Stage):
                    status.show(event.text)
                else:
                    found = event
    except RankError:
        raise
    except (OSError, RuntimeError) as error:
        raise RankError(f"{error}\n{HINT}") from error
    assert found is not None
    return found


def _installed() -> list[str]:
    have = ", ".join(f"{name} {version}" for name, version in examination.versions().items())
    lines = [f"installed: {have}"]
    for extra, names in EXTRAS.items():
        missing = [name for name in names if not _has(name)]
        said = f"not installed: {', '.join(missing)} (pip install 'fnddp[{extra}]')" if missing else "installed"
        lines.append(f"extra {extra}: {said}")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines.append(f"machine: {platform.system()} {platform.machine()}, {count(cores(), 'core')}, {_counted(gpus)}")
    return lines


def _counted(gpus: list[str]) -> str:
    return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "no GPU"


def _has(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _told(findings: Findings, at: Place | None, device: str) -> str:
    hosts = list(dict.fromkeys(findings.hosts))
    started = "started here" if at is None else f"started by {at.launcher}"
    backend = "NCCL" if device == "cuda" else "gloo"
    lines = [f"ranks: {len(findings.hosts)}, {started}, on {', '.join(hosts)}; {backend}"]
    same = "ok: versions and devices are the same on all ranks"
    lines.append(same if findings.disagreement is None else f"PROBLEM: {findings.disagreement}")
    equal = f"ok: means are equal on all ranks, to the bit: {', '.join(examination.PROBES)}"
    unequal = f"PROBLEM: means are not equal on all ranks: {', '.join(findings.unequal)}"
    lines.append(unequal if findings.unequal else equal)
    for between, link in findings.links.items():
        alpha, beta = duration(link.latency), 1e9 / link.bandwidth
        lines.append(f"link {between}: {link} (alpha {alpha}, beta {beta:.3g} ns/B)")
    return "\n".join(lines)


def _show_steps(findings: Findings, model: str) -> None:
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
    forward, backward = map(duration, (findings.forward_seconds, findings.backward_seconds))
    columns = [Column("step", 4), Column("exposed", 3), Column("codec", 2), Column("link B", 1)]
    caption = (
        f"{model} on {count(len(findings.hosts), 'rank')}: forward {forward}, backward {backward} and codec, to encode "
        "and decode, measured by all ranks at once (the first one's); the rest predicted from the link above\n"
        "exposed: what is left to wait for; link: bytes that a rank sends in a step"
    )
    print()
    Table("pipeline", columns, rows, caption).show()
    print(terminal.folded(verdict(findings)))


def verdict(findings: Findings) -> str:
    """Whether compression can pay here, and which."""
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


def _as_dict(findings: Findings, device: str) -> dict[str, object]:
    return {
        "versions": examination.versions(),
        "hosts": findings.hosts,
        "device": device,
        "disagreement": findings.disagreement,
        "unequal": findings.unequal,
        "links": {
            between: {"bandwidth": link.bandwidth, "latency": link.latency} for between, link in findings.links.items()
        },
        "forward_seconds": findings.forward_seconds,
        "backward_seconds": findings.backward_seconds,
        "pipelines": [
            {
                "pipeline": each.pipeline,
                "step_seconds": each.seconds,
                "exposed_seconds": each.step.exposed_seconds,
                "link_bytes": each.link_bytes,
            }
            for each in findings.costs
        ],
        "verdict": verdict(findings) if findings.costs else None,
    }
