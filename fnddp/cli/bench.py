"""`fnddp bench`: check what was asked for, time real training steps on all ranks, report."""

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

from fnddp.cli import bench_report, launcher, terminal
from fnddp.cli.bars import progress
from fnddp.cli.bench_arms import PEERS, Setup, why_not
from fnddp.cli.bench_rank import WARM_UP, Event, Measured, Round, measure
from fnddp.cli.bench_report import Run
from fnddp.cli.checks import check_folder, check_imports, check_link, check_pipeline
from fnddp.cli.failures import WrongArgument
from fnddp.cli.launcher import Place, check_device, check_no_link, check_ranks, on_ranks
from fnddp.cli.models import load
from fnddp.cli.network import shaped_hosts
from fnddp.options import did_you_mean


def run(
    pipelines: Sequence[str],
    *,
    ranks: int | None,
    link: str | None,
    against: str,
    model: str,
    pairs: int,
    engine: str,
    compiled: bool,
    device: str,
    out: Path,
    seed: int,
    is_profiled: bool,
    backend: str | None,
    imports: Sequence[str],
) -> int:
    """Times training steps with each of `pipelines` and each peer, prints a table, writes `ratios.png`, `results.json`.

    Args:
        pipelines: As `fnddp.parse` reads them.
        ranks: Number of processes to start; None for 2, or for those that a launcher has started.
        link: Each rank's link, as `Link.parse` reads it; None for loopback.
        against: Peers, with commas between them.
        model: As `fnddp.cli.models.load` takes it.
        pairs: Timed rounds.
        engine: How a pipeline is run.
        compiled: Compile all steps.
        device: "cpu" or "cuda".
        out: Folder for the files, made if need be.
        seed: Of initial parameters and the order of arms.
        is_profiled: Also say where the time of a step goes.
        backend: Who runs the segments of plans.
        imports: Modules that register transforms.

    Returns:
        The exit code of the command.
    """

    def work(at: Place | None) -> int:
        count = check_ranks(ranks, at)
        if link is not None:
            check_link(link)
            check_no_link(at)
        check_imports(imports)
        parameters = check_model(model)
        syncs = [check_pipeline(text, parameters) for text in pipelines]
        check_machine(device, link)
        if device == "cuda" and at is not None:
            check_device(device, count, at)
        check_backend(backend, device, compiled)
        peers, left_out = check_peers(against, device, count)
        if launcher.reports(at):
            check_folder(out)
            print("".join(f"{name} is left out: {reason}\n" for name, reason in left_out.items()), end="", flush=True)
        setup = Setup(model, syncs, peers, engine, compiled, device, pairs, seed, is_profiled, backend)
        measured = _measure(setup, count, at, link, imports)
        if not launcher.reports(at):
            return 0
        size = sum(p.numel() for p in parameters.values())
        done = Run(setup, count, link, size, shlex.join(["fnddp", *sys.argv[1:]]), measured, at and at.launcher)
        conditions = ", ".join(f"{key}: {value}" for key, value in done.conditions.items())
        print(f"{terminal.folded(conditions)}\n")
        bench_report.table(done).show()
        if said := bench_report.verdict(done):
            print(f"{terminal.folded(said)}\n")
        if is_profiled:
            bench_report.profile_table(done).show()
        bench_report.write(out, done)
        print(f"Wrote {out / bench_report.RATIOS} and {out / bench_report.RESULTS}")
        return 0

    return launcher.at_place("bench", work)


def check_model(model: str) -> dict[str, Tensor]:
    """The parameters of the workload `model`, without values.

    Raises:
        ModelError: There is no such workload, or there is nothing to train it on.
    """
    workload = load(model)
    workload.task()
    return workload.parameters()


def check_machine(device: str, link: str | None) -> None:
    """Raises a WrongArgument if the ranks cannot be started as asked for."""
    if device == "cuda" and not torch.cuda.is_available():
        raise WrongArgument("--device cuda, but there is no CUDA device here")
    if device == "cuda" and link is not None:
        raise WrongArgument("--link shapes what gloo sends; leave it out with --device cuda")


def check_backend(backend: str | None, device: str, compiled: bool) -> None:
    """Raises a WrongArgument if `backend` would not be used."""
    if backend is not None and compiled:
        raise WrongArgument("--backend is for what plans compute, and steps that are compiled whole have none")
    if backend == "cudagraphs" and device != "cuda":
        raise WrongArgument("--backend cudagraphs needs --device cuda")


def check_peers(against: str, device: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """The peers in `against` that can run on `device` and so many ranks; and which cannot, and why.

    Raises:
        WrongArgument: One is unknown, or none is left.
    """
    names = [name.strip() for name in against.split(",")]
    if unknown := [name for name in names if name not in PEERS]:
        hint = did_you_mean(unknown[0], PEERS) or f"; known ones are {', '.join(PEERS)}"
        raise WrongArgument(f"--against: unknown peer {unknown[0]!r}{hint}")
    left_out = {name: reason for name in names if (reason := why_not(name, device, ranks)) is not None}
    peers = [name for name in names if name not in left_out]
    if not peers:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in left_out.items())
        raise WrongArgument(f"--against {against}: no peer is left to compare with; add ddp{reasons}")
    return peers, left_out


def _measure(setup: Setup, ranks: int, at: Place | None, link: str | None, imports: Sequence[str]) -> Measured:
    with ExitStack() as stack:
        hosts = stack.enter_context(shaped_hosts(ranks, link)) if link else []
        backend = "nccl" if setup.device == "cuda" else "gloo"
        if setup.is_profiled:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13 says that a profile starts, and ends
        ran = on_ranks(at, ranks, measure, setup, at, hosts=hosts, backend=backend, imports=imports)
        events = stack.enter_context(closing(ran))
        return _show_progress(events, WARM_UP + setup.pairs, quiet=not launcher.reports(at))


def _show_progress(events: Iterable[Event], rounds: int, quiet: bool) -> Measured:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("rounds"), TimeElapsedColumn())
    measured: Measured | None = None
    with progress(*columns, quiet=quiet) as bars:
        task = bars.add_task("", total=rounds)
        for event in events:
            if isinstance(event, Round):
                bars.update(task, completed=event.done)
            else:
                measured = event
    assert measured is not None
    return measured
