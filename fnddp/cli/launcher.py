"""Ranks of a command: those that a launcher has started, of which this process is one, or processes started here."""

import os
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fnddp.cli import terminal
from fnddp.cli.checks import check_processes, cores
from fnddp.cli.failures import FAILED, WrongArgument, stop
from fnddp.cli.launch import TIMEOUT, RankError, Stage, Work, run_ranks
from fnddp.cli.network import shaped_hosts
from fnddp.wire.groups import LAUNCHERS, is_slurm_shell

DEFAULT_RANKS = 2
HINT = (
    "If ranks cannot meet: MASTER_ADDR must be an address of the first one's host that all can reach, and MASTER_PORT "
    "be free there; with several network cards, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the one to use; "
    "with GPUs on some hosts only, all need --device cpu"
)


@dataclass(frozen=True)
class RankInfo:
    """This process among the ranks that a launcher has started."""

    launcher: str  # its name
    rank: int
    world_size: int
    local_rank: int  # on its host; 0 if the launcher does not set it


def rank_info() -> RankInfo | None:
    """Return this process' rank, from the environment; None if no launcher has started several ranks.

    Raises:
        WrongArgument: The launcher has set the number of ranks, but not the rank of this process.
    """
    for launcher, (rank, size, local) in LAUNCHERS.items():
        world_size = int(os.environ.get(size) or 1)
        if world_size == 1 and not (size == "WORLD_SIZE" and dist.is_torchelastic_launched()):
            continue
        if launcher == "SLURM" and is_slurm_shell():
            continue
        if rank not in os.environ:
            raise WrongArgument(f"{size}={world_size}, but {rank} is not set: it is the rank of this process")
        elastic = launcher != "torchrun" or dist.is_torchelastic_launched()
        named = launcher if elastic else "the environment"
        return RankInfo(named, int(os.environ[rank]), world_size, int(os.environ.get(local, 0)))
    return None


def reports(at: RankInfo | None) -> bool:
    """Return whether this process prints the results of all ranks: rank 0 does, or the parent of ranks."""
    return at is None or at.rank == 0


def stopped(command: str, code: int, message: object) -> int:
    """Print why `command` stops, and return `code`: on all ranks if it failed, else once on each host."""
    try:
        at = rank_info()
    except WrongArgument:  # probably the message
        at = None
    if at is not None and at.local_rank > 0 and code != FAILED:  # files and devices are those of a host
        return code
    return stop(command, code, message if reports(at) or at is None else f"rank {at.rank}: {message}")


def share_cores(hosts: Sequence[str]) -> None:
    """Give this rank its share of its host's cores, unless `OMP_NUM_THREADS` sets its number of threads."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // hosts.count(hosts[dist.get_rank()])))


def check_ranks(ranks: int | None, at: RankInfo | None, link: str | None = None) -> int:
    """Return the number of ranks to run on: `ranks`, or the launcher's, or the default.

    Raises:
        WrongArgument: A launcher has started another number, or has its own links, or they are too many to start.
    """
    if at is None:
        check_processes(ranks or DEFAULT_RANKS)
        return ranks or DEFAULT_RANKS
    if ranks not in (None, at.world_size):
        raise WrongArgument(f"--ranks {ranks}, but {at.launcher} has started {at.world_size}; leave --ranks out")
    if link is not None:
        raise WrongArgument(f"--link shapes ranks of this machine, and {at.launcher} has started its own")
    return at.world_size


def check_device(device: str, ranks: int, at: RankInfo | None) -> str:
    """Return "cpu" or "cuda", for `device` or "auto".

    Raises:
        WrongArgument: There is no GPU for each rank on this host.
    """
    gpus = torch.cuda.device_count()
    needed = ranks if at is None else at.local_rank + 1
    if device == "cuda" and gpus < needed:
        raise WrongArgument(f"--device cuda needs a GPU for each rank, and here are {gpus}; use --device cpu")
    return "cuda" if device != "cpu" and gpus >= needed else "cpu"


def run_on(
    at: RankInfo | None,
    ranks: int,
    work: Work,
    *arguments: Any,
    link: str | None = None,
    backend: str = "gloo",
    imports: Sequence[str] = (),
) -> list[Any]:
    """Run `work(*arguments)` on the ranks that a launcher has started, or on `ranks` processes (see `run_ranks`).

    With a `link`, each process has a network of its own, joined to the others by it. Show each `Stage` that `work`
    yields.

    Returns:
        Everything else that it yields on this rank of a launcher, or on the first process.
    """
    found: list[Any] = []
    with ExitStack() as stack:
        show = stack.enter_context(terminal.progress(quiet=not reports(at)))
        show("starting ranks" if at is None else "waiting for ranks")
        if at is None:
            hosts = stack.enter_context(shaped_hosts(ranks, link)) if link else ()
            started = run_ranks(ranks, work, *arguments, hosts=hosts, backend=backend, imports=imports)
            events = stack.enter_context(closing(started))
        else:
            stack.enter_context(joined(at, backend))
            events = work(*arguments)
        for event in events:
            if isinstance(event, Stage):
                show(event.text, event.done, event.of)
            else:
                found.append(event)
        if at is not None:
            dist.barrier()
    return found


@contextmanager
def joined(at: RankInfo, backend: str, timeout: timedelta = TIMEOUT) -> Generator[None]:
    """Run the block with the default process group of all ranks.

    Raises:
        WrongArgument: MASTER_ADDR is needed, and not set.
        RankError: The ranks have not met.
    """
    os.environ.setdefault("MASTER_PORT", "29500")  # torch's own
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get("MPI_LOCALNRANKS")
    if local == str(at.world_size) or os.environ.get("SLURM_NNODES") == "1":  # one host
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_ADDR" not in os.environ:
        raise WrongArgument(
            f"{at.world_size} ranks of {at.launcher} must meet somewhere: set MASTER_ADDR to the first one's host "
            "(with SLURM: export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1))"
        )
    if backend == "nccl":
        torch.cuda.set_device(at.local_rank % torch.cuda.device_count())
    try:
        dist.init_process_group(backend, rank=at.rank, world_size=at.world_size, timeout=timeout)
    except RuntimeError as error:
        first = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RankError(f"{at.world_size} ranks did not meet at {first}: {error}\n{HINT}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()
