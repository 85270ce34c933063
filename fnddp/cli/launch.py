"""Ranks as processes of this machine, watched by the parent: however one of them ends, none stays and nothing hangs."""

import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist

from fnddp.cli import modules
from fnddp.cli.failures import Failure
from fnddp.cli.network import Host, loopback_device, signals_held

TIMEOUT = timedelta(minutes=2)  # of a collective: a rank that hangs, or is stopped, ends the run
SETTLE_SECONDS = 1.0  # a rank that dies takes the others' connections with it: wait for the one that died first

Work = Callable[..., Iterable[Any]]


class RankError(Failure, RuntimeError):
    """A rank ended before its work was done; the message names it and gives the cause."""


@dataclass(frozen=True)
class Stage:
    """Progress of the ranks: what they do, and how much of it is done, if that is known."""

    text: str
    done: int | None = None
    of: int | None = None


@dataclass(frozen=True)
class _Failed:
    when: float  # on the clock that all processes of a machine share; -inf for a rank that could not report
    how: str


class _Done:
    """The last message of a rank whose work is done."""


def run_ranks(
    world_size: int,
    work: Work,
    *arguments: Any,
    hosts: Sequence[Host] = (),
    backend: str = "gloo",
    imports: Sequence[str] = (),
) -> Generator[Any]:
    """Run `work(*arguments)` on ranks that are processes of their own, and yield what it yields on rank 0.

    `work` is a module-level function, called with the default process group set up and `imports` imported; arguments
    are picklable. Closing the iterator, or any exception at it (Ctrl-C), ends the ranks.

    Raises:
        RankError: A rank raised or was killed.
    """
    folder = tempfile.TemporaryDirectory(prefix="fnddp-ranks-")
    context, store = fresh(), f"{folder.name}/store"
    packed = pickle.dumps((work, arguments))
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        with signals_held(signal.SIGINT):  # it is the parent's
            for rank, host in zip(range(world_size), hosts or [None] * world_size, strict=True):
                pipe, remote = context.Pipe()
                given = (rank, world_size, store, remote, host, backend, tuple(imports), packed)
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
                process.close()
            for pipe in pipes:
                pipe.close()
            folder.cleanup()


def fresh() -> SpawnContext:
    """Return the start method: spawn, since a process with threads or a CUDA device must not be forked."""
    return multiprocessing.get_context("spawn")


def _run_rank(
    rank: int, n: int, file: str, pipe: Connection, host: Host | None, backend: str, imports: Sequence[str], job: bytes
) -> None:
    """Send what the work yields to the parent, and how it ended. It does not return."""
    try:
        for name in imports:  # first: the arguments may hold what they define
            modules.load(name)
        work, arguments = pickle.loads(job)
        if host is not None:
            host.enter()
        store = dist.FileStore(file)  # hosts have the same files, and no network that leads to the parent
        # Ranks of one machine meet on the loopback device, whatever the host's name resolves to.
        os.environ["GLOO_SOCKET_IFNAME"] = loopback_device() if host is None else host.interface
        dist.init_process_group(backend, rank=rank, world_size=n, store=store, timeout=TIMEOUT)
        for event in work(*arguments):
            pipe.send(event)
        pipe.send(_Done())
        pipe.recv()  # waits until the parent ends it: leaving would break connections that others still read from
    except BaseException as error:
        what = "".join(traceback.format_exception_only(error)).strip()
        where = traceback.extract_tb(error.__traceback__)[-1]
        how = f"raised {what}\n  at {where.filename}:{where.lineno}, in {where.name}: {where.line}"
        with suppress(OSError):  # the parent has gone
            pipe.send(_Failed(time.monotonic(), how))
    os._exit(1)  # at once: others wait for this rank, and a process group in use may not come down


def _watch(processes: list[BaseProcess], pipes: list[Connection]) -> Iterator[Any]:
    working = dict(zip(pipes, processes, strict=True))
    failures: dict[BaseProcess, _Failed] = {}
    deadline = math.inf
    while working and time.monotonic() < deadline:
        for pipe, message in _messages(working, None if deadline == math.inf else deadline - time.monotonic()):
            process = working[pipe]
            if isinstance(message, _Done | _Failed):
                del working[pipe]
            if isinstance(message, _Failed):
                failures[process] = message
                deadline = min(deadline, time.monotonic() + SETTLE_SECONDS)
            elif pipe is pipes[0] and not isinstance(message, _Done) and not failures:
                yield message
    if failures:
        first = min(filter(failures.get, processes), key=lambda process: failures[process].when)
        raise RankError(f"{first.name} {failures[first].how}")


def _messages(working: dict[Connection, BaseProcess], timeout: float | None) -> Iterator[tuple[Connection, Any]]:
    for pipe in wait(list(working), timeout):
        assert isinstance(pipe, Connection)
        try:
            yield pipe, pipe.recv()
        except (EOFError, ConnectionResetError):  # killed or crashed: what others report of it explains less
            yield pipe, _Failed(-math.inf, _how_it_ended(working[pipe]))


def _how_it_ended(process: BaseProcess) -> str:
    process.join()
    exitcode = process.exitcode or 0
    if exitcode < 0:
        return f"was ended by {signal.Signals(-exitcode).name} ({signal.strsignal(-exitcode)})"
    return f"exited with code {exitcode} before it was done"
