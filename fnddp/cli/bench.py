"""`fnddp bench`: check what was asked for, time real training steps on all ranks, report."""

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

from fnddp.cli import bench_report
from fnddp.cli.bars import progress
from fnddp.cli.bench_arms import PEERS, Setup, why_not
from fnddp.cli.bench_rank import WARM_UP, Event, Round, Times, measure
from fnddp.cli.bench_report import Run
from fnddp.cli.checks import check_folder, check_imports, check_link, check_pipeline, check_processes
from fnddp.cli.failures import FAILED, INTERRUPTED, WRONG_ARGUMENTS, WrongArgument, stop
from fnddp.cli.launch import RankError, run_ranks
from fnddp.cli.models import ModelError, load
from fnddp.cli.network import NetworkError, shaped_hosts
from fnddp.options import did_you_mean


def run(
    pipelines: Sequence[str],
    *,
    ranks: int,
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
        ranks: Number of processes to start.
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
    try:
        if link is not None:
            check_link(link)
        check_processes(ranks)
        check_imports(imports)
        parameters = check_model(model)
        syncs = [check_pipeline(text, parameters) for text in pipelines]
        check_machine(device, link)
        check_backend(backend, device, compiled)
        peers = check_peers(against, device, ranks)
        check_folder(out)
        setup = Setup(model, syncs, peers, engine, compiled, device, pairs, seed, is_profiled, backend)
        times = _measure(setup, ranks, link, imports)
        size = sum(p.numel() for p in parameters.values())
        done = Run(setup, ranks, link, size, shlex.join(["fnddp", *sys.argv[1:]]), times)
        print(", ".join(f"{key}: {value}" for key, value in done.conditions.items()), end="\n\n")
        bench_report.table(done).show()
        if is_profiled:
            bench_report.profile_table(done).show()
        bench_report.write(out, done)
        print(f"Wrote {out / bench_report.RATIOS} and {out / bench_report.RESULTS}")
        return 0
    except (WrongArgument, ModelError) as error:
        return stop("bench", WRONG_ARGUMENTS, error)
    except (RankError, NetworkError, OSError) as error:
        return stop("bench", FAILED, error)
    except KeyboardInterrupt:
        return stop("bench", INTERRUPTED, "interrupted; all ranks are ended")


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
    if dist.is_torchelastic_launched():
        raise WrongArgument("it starts its own ranks; run it without a launcher")
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


def check_peers(against: str, device: str, ranks: int) -> list[str]:
    """The peers in `against` that can run on `device` and so many ranks; says which cannot, and why.

    Raises:
        WrongArgument: One is unknown, or none is left.
    """
    names = [name.strip() for name in against.split(",")]
    if unknown := [name for name in names if name not in PEERS]:
        hint = did_you_mean(unknown[0], PEERS) or f"; known ones are {', '.join(PEERS)}"
        raise WrongArgument(f"--against: unknown peer {unknown[0]!r}{hint}")
    reasons = {name: why_not(name, device, ranks) for name in names}
    for name, reason in reasons.items():
        if reason is not None:
            print(f"{name} is left out: {reason}")
    peers = [name for name, reason in reasons.items() if reason is None]
    if not peers:
        raise WrongArgument(f"--against {against}: no peer is left to compare with; add ddp")
    return peers


def _measure(setup: Setup, ranks: int, link: str | None, imports: Sequence[str]) -> list[Times]:
    with ExitStack() as stack:
        hosts = stack.enter_context(shaped_hosts(ranks, link)) if link else []
        backend = "nccl" if setup.device == "cuda" else "gloo"
        if setup.is_profiled:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13 says that a profile starts, and ends
        events = stack.enter_context(
            closing(run_ranks(ranks, measure, setup, hosts=hosts, backend=backend, imports=imports))
        )
        return _show_progress(events, WARM_UP + setup.pairs)


def _show_progress(events: Iterable[Event], rounds: int) -> list[Times]:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("rounds"), TimeElapsedColumn())
    times: list[Times] = []
    with progress(*columns) as bars:
        task = bars.add_task("", total=rounds)
        for event in events:
            if isinstance(event, Round):
                bars.update(task, completed=event.done)
            else:
                times = event
    return times
