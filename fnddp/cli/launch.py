"""Ranks of a command: processes of this machine, watched by the parent, or processes started by a launcher."""

import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from fnddp import device as devices
from fnddp.cli import checks, models, terminal
from fnddp.cli.failures import FAILED, Failure, WrongArgument, print_error
from fnddp.cli.network import Host, loopback_device, shaped_hosts, signals_held
from fnddp.show.text import count
from fnddp.wire.groups import LAUNCHERS, is_slurm_shell

TIMEOUT = timedelta(minutes=2)  # of a collective: a rank that hangs, or is stopped, ends the run
SETTLE_SECONDS = 1.0

Work = Callable[..., Iterable[Any]]
DEFAULT_RANKS, RANKS_PER_CORE = 2, 8
HINT = (
    "If ranks cannot connect: MASTER_ADDR must be an address of rank 0's host that all can reach, and MASTER_PORT must "
    "be free there; with several network cards, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the one to use; "
    "with GPUs on some hosts only, all need --device cpu"
)


class RankError(Failure, RuntimeError):
    """A rank ended before its work was done; the message names it and gives the cause."""


@dataclass(frozen=True)
class Stage:
    """Progress of the ranks: their present task, and the part of it that is done, if known."""

    text: str
    done: int = 0
    of: int | None = None


def run_ranks(
    world_size: int,
    work: Work,
    *arguments: Any,
    hosts: Sequence[Host] = (),
    device: str = "cpu",
    imports: Sequence[str] = (),
) -> Generator[Any]:
    """Run `work(*arguments)` on ranks in separate processes, and yield the values that it yields on rank 0.

    `work` is a module-level function, called with the default process group set up and `imports` imported; arguments
    are picklable. Closing the iterator, or any exception at it (Ctrl-C), ends the ranks.
    """
    folder = tempfile.TemporaryDirectory(prefix="fnddp-ranks-")
    context, store = fresh(), f"{folder.name}/store"
    packed = pickle.dumps((work, arguments))
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    resource_tracker.ensure_running()  # the first process would start it, and Python 3.11 lets SIGINT through then
    try:
        with signals_held(signal.SIGINT):  # only the parent handles it
            for rank, host in zip(range(world_size), hosts or [None] * world_size, strict=True):
                pipe, remote = context.Pipe()
                given = (rank, world_size, store, remote, host, device, tuple(imports), packed)
                process = context.Process(target=_run_rank, args=given, name=f"rank {rank}")
                process.start()
                remote.close()  # now only the rank holds it, so the pipe ends when the rank does
                processes.append(process)
                pipes.append(pipe)
        yield from _watch(processes, pipes)
    finally:
        with signals_held(signal.SIGINT):
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for each in (*processes, *pipes):
                each.close()
            folder.cleanup()


def fresh() -> SpawnContext:
    """Return the start method: spawn, because a process with threads or an accelerator must not be forked."""
    return multiprocessing.get_context("spawn")


def _run_rank(
    rank: int, n: int, file: str, pipe: Connection, host: Host | None, device: str, imports: Sequence[str], job: bytes
) -> None:
    """Run the work, send its events and its outcome to the parent, and exit."""
    try:
        for name in imports:  # first: arguments may be instances of their classes
            models.imported(name)
        work, arguments = pickle.loads(job)
        if host is not None:
            host.enter()
        store = dist.FileStore(file)  # hosts have the same files, and no network that leads to the parent
        # Ranks of one machine meet on the loopback device, whatever the host's name resolves to.
        os.environ["GLOO_SOCKET_IFNAME"] = loopback_device() if host is None else host.interface
        devices.select(device, rank, n)
        backend = devices.device_of(torch.device(device)).backend
        dist.init_process_group(backend, rank=rank, world_size=n, store=store, timeout=TIMEOUT)
        for event in work(*arguments):
            pipe.send(event)
        outcome = None
    except WrongArgument as error:
        outcome = error
    except BaseException as error:
        what = "".join(traceback.format_exception_only(error)).strip()
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename}:{where.lineno}, in {where.name}: {where.line}"
        outcome = RankError(f"rank {rank} raised {what}\n  at {place}")
    with suppress(OSError, EOFError):  # the parent has gone
        pipe.send(outcome)
        pipe.recv()  # waits until the parent ends this process: exiting would break connections that others still read
    os._exit(1)  # at once: a process group in use may not come down


def _watch(processes: list[BaseProcess], pipes: list[Connection]) -> Iterator[Any]:
    working = list(pipes)
    while working:
        for pipe in wait(working):
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except (EOFError, ConnectionResetError):
                message = RankError("a rank was terminated")
            if isinstance(message, Failure):
                # A rank that crashes breaks the others' connections: report that rank, even if other errors come first.
                by_sentinel: dict[Any, BaseProcess] = {process.sentinel: process for process in processes}
                for sentinel in wait(list(by_sentinel), SETTLE_SECONDS):
                    by_sentinel[sentinel].join()
                    message = RankError(how_it_ended(by_sentinel[sentinel].name, by_sentinel[sentinel].exitcode or 0))
                raise message
            if message is None:
                working.remove(pipe)
            elif pipe is pipes[0]:
                yield message


def how_it_ended(name: str, code: int) -> str:
    """Describe how the process `name` ended, from its exit code."""
    if code < 0:
        return f"{name} was ended by {signal.Signals(-code).name} ({signal.strsignal(-code)})"
    return f"{name} exited with code {code} before it was done"


@dataclass(frozen=True)
class RankInfo:
    """This process's rank among the ranks that a launcher has started."""

    launcher: str  # its name
    rank: int
    world_size: int
    local_rank: int  # on its host; 0 if the launcher does not set it


def rank_info() -> RankInfo | None:
    """Return this process's rank, from the environment; None unless a launcher has started several ranks."""
    for launcher, (rank, size, local) in LAUNCHERS.items():
        world_size = int(os.environ.get(size) or 1)
        if world_size == 1 and not (size == "WORLD_SIZE" and dist.is_torchelastic_launched()):
            continue
        if launcher == "SLURM" and is_slurm_shell():
            continue
        if rank not in os.environ:
            raise WrongArgument(f"{size}={world_size}, but {rank} is not set: set it to the rank of this process")
        named = "the environment" if launcher == "torchrun" and not dist.is_torchelastic_launched() else launcher
        return RankInfo(named, int(os.environ[rank]), world_size, int(os.environ.get(local, 0)))
    return None


def print_error_once(command: str, code: int, message: object) -> int:
    """Print the reason why `command` stops, and return `code`: on all ranks if it failed, else once on each host."""
    at = None
    with suppress(WrongArgument):  # probably the error that `message` reports
        at = rank_info()
    if at is not None and at.local_rank > 0 and code != FAILED:  # files and devices are those of a host
        return code
    return print_error(command, code, message if at is None or at.rank == 0 else f"rank {at.rank}: {message}")


def share_cores(hosts: Sequence[str]) -> None:
    """Give this rank its share of its host's cores, unless `OMP_NUM_THREADS` sets its number of threads."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, checks.cores() // hosts.count(hosts[dist.get_rank()])))


@dataclass(frozen=True)
class Ranks:
    """The ranks of a command: processes that it starts, or those that a launcher has started."""

    at: RankInfo | None  # this process among a launcher's
    count: int
    device: str = "cpu"  # its kind
    link: str | None = None  # between processes with separate networks; None for loopback
    imports: tuple[str, ...] = ()  # modules that processes import first

    @property
    def report(self) -> bool:
        """True in the process that prints the results of all ranks: rank 0, or the parent of the processes."""
        return self.at is None or self.at.rank == 0

    def run(self, work: Work, *arguments: Any) -> list[Any]:
        """Run `work` on all ranks, show each `Stage`, and return the other values of this rank or the first."""
        found: list[Any] = []
        with ExitStack() as stack:
            does = "starting" if self.at is None else "waiting for"
            show = stack.enter_context(terminal.progress(f"{does} {count(self.count, 'rank')}"))
            if self.at is None:
                hosts = stack.enter_context(shaped_hosts(self.count, self.link)) if self.link else ()
                options: Any = {"hosts": hosts, "device": self.device, "imports": self.imports}
                events = stack.enter_context(closing(run_ranks(self.count, work, *arguments, **options)))
            else:
                stack.enter_context(joined(self.at, self.device))
                events = work(*arguments)
            for event in events:
                if isinstance(event, Stage):
                    show(event.text, event.done, event.of)
                else:
                    found.append(event)
        return found


def check_ranks(
    ranks: int | None,
    device: str = "cpu",
    link: str = "loopback",
    imports: Iterable[str] | None = None,
    *,
    is_shared: bool = False,
) -> Ranks:
    """Return the ranks that the options request: `ranks`, or the launcher's ranks, or two.

    Each has its own `device` ("auto": an accelerator if there are enough); with `is_shared`, processes share one.
    """
    at, shaped = rank_info(), None if link == "loopback" else link
    if shaped is not None:
        checks.check_link(shaped)
    number, most = ranks or DEFAULT_RANKS if at is None else at.world_size, RANKS_PER_CORE * checks.cores()
    if at is None and number > most:
        raise WrongArgument(
            f"--ranks {ranks}: at most {most} are started here; to use virtual ranks in one process: fnddp tune"
        )
    if at is not None and ranks not in (None, at.world_size):
        raise WrongArgument(f"--ranks {ranks}, but {at.launcher} has started {at.world_size}; remove --ranks")
    if at is not None and shaped is not None:
        raise WrongArgument(f"--link only shapes ranks that fnddp starts, but {at.launcher} started these; remove it")
    needed = (1 if is_shared else number) if at is None else at.local_rank + 1
    return Ranks(at, number, _device(device, needed), shaped, checks.check_imports(imports))


def _device(device: str, needed: int) -> str:
    here, number = devices.accelerator(), torch.accelerator.device_count()
    if device == "auto":
        return here if here is not None and number >= needed else "cpu"
    if device not in ("cpu", here):
        raise WrongArgument(
            f"--device {device}: torch finds {here or 'no accelerator'} here; use --device {here or 'cpu'}"
        )
    if device != "cpu" and number < needed:
        raise WrongArgument(f"--device {device}: {needed} ranks need one each, but there is {number}; use --device cpu")
    return device


@contextmanager
def joined(at: RankInfo, device: str, timeout: timedelta = TIMEOUT) -> Generator[None]:
    """Run the block with the default process group of all ranks."""
    os.environ.setdefault("MASTER_PORT", "29500")  # torch's own
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get("MPI_LOCALNRANKS")
    if local == str(at.world_size) or os.environ.get("SLURM_NNODES") == "1":  # one host
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_ADDR" not in os.environ:
        raise WrongArgument(
            f"{at.world_size} ranks of {at.launcher} need an address to meet at: set MASTER_ADDR to the host of rank "
            "0 (with SLURM: export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1))"
        )
    devices.select(device, at.local_rank, at.local_rank + 1)  # `check_ranks` has found it
    backend = devices.device_of(torch.device(device)).backend
    try:
        dist.init_process_group(backend, rank=at.rank, world_size=at.world_size, timeout=timeout)
    except RuntimeError as error:
        first = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RankError(f"{at.world_size} ranks did not meet at {first}: {error}\n{HINT}") from error
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()
