"""Who has started this process: a launcher, as one of several ranks, or nobody."""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fnddp.cli.checks import check_processes, cores
from fnddp.cli.failures import FAILED, INTERRUPTED, WRONG_ARGUMENTS, WrongArgument, stop
from fnddp.cli.launch import RankError, run_ranks
from fnddp.cli.models import ModelError
from fnddp.cli.network import Host, NetworkError
from fnddp.cli.rank import TIMEOUT, Work
from fnddp.wire.groups import is_slurm_shell

# What each launcher sets, the most telling first: torchrun may run within a step of SLURM.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
PORT = "29500"  # torch's own
DEFAULT_RANKS = 2
HINT = (
    "If ranks cannot meet: MASTER_ADDR must be an address of the first one's host that all can reach, and MASTER_PORT "
    "be free there; with several network cards, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the one to use; "
    "with GPUs on some hosts only, all must be told --device cpu"
)


class LauncherError(ValueError):
    """What the launcher has set is not enough; the message is for the user."""


@dataclass(frozen=True)
class Place:
    """This process among the ranks that a launcher has started.

    Attributes:
        launcher: Its name.
        rank: Of this process.
        world_size: Number of ranks.
        local_rank: Of this process on its host; 0 if the launcher does not say.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int


def reports(at: Place | None) -> bool:
    """Whether this process prints what the ranks have found: the first one does, or who has started them."""
    return at is None or at.rank == 0


def stopped(at: Place | None, command: str, code: int, message: object) -> int:
    """`stop` on a rank: on all of them for what failed there, else once on each host, since files and devices differ.

    Returns:
        `code`.
    """
    if at is not None and at.local_rank > 0 and code != FAILED:
        return code
    if at is None or at.rank == 0 or isinstance(message, BrokenPipeError):
        return stop(command, code, message)
    return stop(command, code, f"rank {at.rank}: {message}")


def at_place(command: str, work: Callable[[Place | None], int]) -> int:
    """Calls `work` with this process' place, and says in a line what it raises.

    Returns:
        The exit code of `command`: what `work` returns, or that of the error.
    """
    at: Place | None = None
    try:
        at = place()
        return work(at)
    except (WrongArgument, ModelError, LauncherError) as error:
        return stopped(at, command, WRONG_ARGUMENTS, error)
    except (RankError, NetworkError, OSError) as error:
        return stopped(at, command, FAILED, error)
    except KeyboardInterrupt:
        return stopped(at, command, INTERRUPTED, "interrupted; all ranks are ended")


def share_cores(hosts: Sequence[str]) -> None:
    """Gives this rank its share of its host's cores, unless `OMP_NUM_THREADS` says how many threads it has.

    Args:
        hosts: Of each rank.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // hosts.count(hosts[dist.get_rank()])))


def place() -> Place | None:
    """This process' place, from the environment; None if no launcher has started several ranks.

    Raises:
        LauncherError: There are several ranks, but not which one this is.
    """
    for launcher, rank, size, local in _LAUNCHERS:
        world_size = int(os.environ.get(size) or 1)
        if world_size == 1 and not (size == "WORLD_SIZE" and dist.is_torchelastic_launched()):
            continue
        if launcher == "SLURM" and is_slurm_shell():
            continue
        if rank not in os.environ:
            raise LauncherError(f"{size}={world_size}, but {rank} is not set: it says which of the ranks this is")
        elastic = launcher != "torchrun" or dist.is_torchelastic_launched()
        named = launcher if elastic else "the environment"
        return Place(named, int(os.environ[rank]), world_size, int(os.environ.get(local, 0)))
    return None


def check_ranks(ranks: int | None, at: Place | None) -> int:
    """The number of ranks to run on: `ranks`, or what is usual.

    Raises:
        WrongArgument: A launcher has started another number, or they are too many to start.
    """
    if at is None:
        check_processes(ranks or DEFAULT_RANKS)
        return ranks or DEFAULT_RANKS
    if ranks not in (None, at.world_size):
        raise WrongArgument(f"--ranks {ranks}, but {at.launcher} has started {at.world_size}; leave --ranks out")
    return at.world_size


def check_device(device: str, ranks: int, at: Place | None) -> str:
    """ "cpu" or "cuda".

    Raises:
        WrongArgument: There is no GPU for each rank on this host.
    """
    gpus = torch.cuda.device_count()
    needed = ranks if at is None else at.local_rank + 1
    if device == "cuda" and gpus < needed:
        raise WrongArgument(f"--device cuda needs a GPU for each rank, and here are {gpus}; use --device cpu")
    return "cuda" if device == "cuda" or (device == "auto" and gpus >= needed) else "cpu"


def check_no_link(at: Place | None) -> None:
    """Raises a WrongArgument if a launcher has started the ranks: their links are what they are."""
    if at is not None:
        raise WrongArgument(f"--link shapes ranks of this machine, and {at.launcher} has started its own")


def on_ranks(
    at: Place | None,
    ranks: int,
    work: Work,
    *arguments: Any,
    hosts: Sequence[Host] = (),
    backend: str = "gloo",
    imports: Sequence[str] = (),
) -> Generator[Any]:
    """Runs `work(*arguments)` on the ranks that a launcher has started, or on `ranks` processes of this machine.

    Returns:
        What this rank's iterable yields, or the first one's.
    """
    if at is None:
        yield from run_ranks(ranks, work, *arguments, hosts=hosts, backend=backend, imports=imports)
        return
    with joined(at, backend):
        yield from work(*arguments)
        dist.barrier()


@contextmanager
def joined(at: Place, backend: str, timeout: timedelta = TIMEOUT) -> Generator[None]:
    """The block runs with the default process group of all ranks.

    Raises:
        LauncherError: It is not known where they meet.
        RankError: They have not met.
    """
    os.environ.setdefault("MASTER_PORT", PORT)
    if "MASTER_ADDR" not in os.environ:
        if not _is_one_host(at):
            raise LauncherError(
                f"{at.world_size} ranks of {at.launcher} must meet somewhere: set MASTER_ADDR to the first one's host "
                "(with SLURM: export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1))"
            )
        os.environ["MASTER_ADDR"] = "127.0.0.1"
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


def _is_one_host(at: Place) -> bool:
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get("MPI_LOCALNRANKS")
    return local == str(at.world_size) or os.environ.get("SLURM_NNODES") == "1"
