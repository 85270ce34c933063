"""A rank that was started as a process: it joins the others, works, and tells its parent how that went."""

import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from fnddp.cli import modules
from fnddp.cli.network import Host, loopback_device

TIMEOUT = timedelta(minutes=2)  # of a collective: a rank that hangs, or is stopped, ends the run

Work = Callable[..., Iterable[Any]]


@dataclass(frozen=True)
class Stage:
    """What ranks are doing, and how much of it is done, if that can be said."""

    text: str
    done: int | None = None
    of: int | None = None


@dataclass(frozen=True)
class Raised:
    """A rank's last words: when it raised (on the clock that all processes of a machine share), and what."""

    when: float
    message: str


@dataclass(frozen=True)
class Done:
    """A rank has done all its work."""


def run_rank(
    rank: int,
    world_size: int,
    meeting: str,
    pipe: Connection,
    work: Work,
    arguments: bytes,
    host: Host | None,
    backend: str,
    imports: tuple[str, ...],
) -> None:
    """Send what `work(*arguments)` yields to the parent, then `Done`, or `Raised` if it raises. It does not return.

    `meeting` is the file of the store that ranks find each other by. `host` is where this rank's network is; None for
    the machine's own.
    """
    try:
        for name in imports:  # first: the arguments may hold what they define
            modules.load(name)
        unpacked = pickle.loads(arguments)
        if host is not None:
            host.enter()
        store = dist.FileStore(meeting)  # hosts have the same files, and no network that leads to the parent
        # Ranks of one machine meet on the loopback device, whatever the host's name resolves to.
        os.environ["GLOO_SOCKET_IFNAME"] = loopback_device() if host is None else host.interface
        dist.init_process_group(backend, rank=rank, world_size=world_size, store=store, timeout=TIMEOUT)
        for event in work(*unpacked):
            pipe.send(event)
        pipe.send(Done())
        pipe.recv()  # stays until the parent lets go: leaving would break connections that others still read from
    except BaseException as error:
        _say(pipe, Raised(time.monotonic(), _last_words(error)))
    os._exit(1)  # at once: others wait for this rank, and a process group in use may not come down


def _say(pipe: Connection, message: Raised) -> None:
    with suppress(OSError):  # the parent is gone: nobody is left to tell
        pipe.send(message)


def _last_words(error: BaseException) -> str:
    what = "".join(traceback.format_exception_only(error)).strip()
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{what}\n  at {where.filename}:{where.lineno}, in {where.name}: {where.line}"
