"""Ranks as processes of this machine, watched by the parent: however one of them ends, none stays and nothing hangs."""

import multiprocessing
import pickle
import signal
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from fnddp.cli.failures import Failure
from fnddp.cli.network import Host, signals_held
from fnddp.cli.rank import Done, Raised, Work, run_rank

SETTLE_SECONDS = 1.0  # a rank that dies takes the others' connections with it: wait for the one that died first


class RankError(Failure, RuntimeError):
    """A rank ended before its work was done; the message names it and says how."""


@dataclass(frozen=True)
class Vanished:
    """A rank's pipe ended without a word: it was killed, or it crashed."""


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
    meeting = f"{folder.name}/store"
    context = fresh()
    packed = pickle.dumps(arguments)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        with signals_held(signal.SIGINT):  # it is the parent's
            for rank, host in zip(range(world_size), hosts or [None] * world_size, strict=True):
                pipe, remote = context.Pipe()
                process = context.Process(
                    target=run_rank,
                    args=(rank, world_size, meeting, remote, work, packed, host, backend, tuple(imports)),
                    name=f"rank {rank}",
                )
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
    """Return how ranks are started: anew, since a process with threads or a CUDA device must not be forked."""
    return multiprocessing.get_context("spawn")


def _watch(processes: list[BaseProcess], pipes: list[Connection]) -> Iterator[Any]:
    working = {pipe: rank for rank, pipe in enumerate(pipes)}
    while working:
        for pipe, message in _messages(working, timeout=None):
            rank = working[pipe]
            if isinstance(message, Done):
                del working[pipe]
            elif isinstance(message, Raised | Vanished):
                raise RankError(_first_failure(processes, working, pipe, message))
            elif rank == 0:
                yield message


def _first_failure(
    processes: list[BaseProcess], working: dict[Connection, int], pipe: Connection, failure: Raised | Vanished
) -> str:
    failures: dict[int, Raised | Vanished] = {working.pop(pipe): failure}
    deadline = time.monotonic() + SETTLE_SECONDS
    while working and time.monotonic() < deadline:
        for pipe, message in _messages(working, timeout=deadline - time.monotonic()):
            if isinstance(message, Raised | Vanished):
                failures[working.pop(pipe)] = message
    for rank, message in sorted(failures.items()):
        if isinstance(message, Vanished):  # it had no time to speak, and what others say of it explains less
            processes[rank].join()
            return f"rank {rank} {_how_it_ended(processes[rank].exitcode or 0)}"
    raised = {rank: message for rank, message in failures.items() if isinstance(message, Raised)}
    first = min(raised, key=lambda rank: raised[rank].when)
    return f"rank {first} raised {raised[first].message}"


def _how_it_ended(exitcode: int) -> str:
    if exitcode < 0:
        return f"was ended by {signal.Signals(-exitcode).name} ({signal.strsignal(-exitcode)})"
    return f"exited with code {exitcode} before it was done"


def _messages(pipes: Iterable[Connection], timeout: float | None) -> Iterator[tuple[Connection, Any]]:
    for pipe in wait(list(pipes), timeout):
        assert isinstance(pipe, Connection)
        try:
            yield pipe, pipe.recv()
        except (EOFError, ConnectionResetError):
            yield pipe, Vanished()
