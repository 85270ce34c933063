"""A wire between threads, without any process group: what an engine asks of one, and nothing else."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fnddp.simulate.ranks import RankFailed
from fnddp.wire.kinds import ALL_GATHER, Kind
from tests.traces import OnOneCore

SECONDS = 20


class Hub:
    """Where ranks meet: the first `active` ones in the next step. The log has their ranks and what they started."""

    def __init__(self, ranks: int, delay: float = 0.0) -> None:
        self.active = ranks
        self.delay = delay
        self.changed = threading.Condition()
        self.meetings: dict[Any, Meeting] = {}
        self.log: list[tuple[int, str]] = []


class Meeting:
    """One collective: what the ranks hand over, until all have."""

    def __init__(self, kind: Kind, op: str | None, n: int) -> None:
        self.kind, self.op, self.n = kind, op, n
        self.sends: dict[int, Tensor] = {}
        self.results: Tensor | None = None
        self.done_at = float("inf")


class ThreadWork:
    """A collective of one rank: it is complete when all ranks have started it, and a while later."""

    def __init__(self, hub: Hub, meeting: Meeting, rank: int, receive: Tensor) -> None:
        self.hub, self.meeting, self.rank, self.receive = hub, meeting, rank, receive

    def is_completed(self) -> bool:
        return time.monotonic() >= self.meeting.done_at

    def wait(self) -> bool:
        with self.hub.changed:
            together = self.hub.changed.wait_for(lambda: self.meeting.results is not None, SECONDS)
        if not together:
            raise RuntimeError(f"only {sorted(self.meeting.sends)} of {self.meeting.n} ranks came in {SECONDS} s")
        time.sleep(max(0.0, self.meeting.done_at - time.monotonic()))
        assert self.meeting.results is not None
        self.receive.copy_(self.meeting.results[self.rank].reshape(self.receive.shape))
        return True


class ThreadWire:
    """The wire of one rank, of one group. The i-th collective of n ranks meets the i-th of the others."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.me = hub, rank
        self.started: dict[int, int] = {}  # collectives, by the number of ranks in them
        self.random = random.Random(rank)

    def size(self, group: str | None) -> int:
        return self.hub.active

    def rank(self, group: str | None) -> int:
        return self.me

    def start(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: str | None) -> ThreadWork:
        self.hub.log.append((self.me, kind.name))
        return self._post(kind, send, receive, op)

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, ThreadWork]:
        self.hub.log.append((self.me, "vote"))
        gathered = flags.new_empty((self.size(group), *flags.shape))
        return gathered, self._post(ALL_GATHER, flags, gathered, None)

    def _post(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None) -> ThreadWork:
        hub, n = self.hub, self.hub.active
        with hub.changed:
            meeting = hub.meetings.setdefault((n, self.started.get(n, 0)), Meeting(kind, op, n))
            said = (meeting.kind, meeting.op, meeting.n)
            if said != (kind, op, n):
                raise RuntimeError(f"rank {self.me} starts {(kind, op, n)}, the others {said}")
            self.started[n] = self.started.get(n, 0) + 1
            meeting.sends[self.me] = send.clone()  # is_completed must not depend on what the owner does next
            if len(meeting.sends) == n:
                meeting.results = kind.together(torch.stack([meeting.sends[rank] for rank in range(n)]), op)
                meeting.done_at = time.monotonic() + self.random.uniform(0, hub.delay)
                hub.changed.notify_all()
        return ThreadWork(hub, meeting, self.me, receive)


class ReadyWork:
    """What is complete at once, as all is to the host where streams order it."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


class LostWork(ReadyWork):
    """What has lost a rank."""

    def wait(self) -> bool:
        raise RuntimeError("connection closed")


class AloneWire:
    """One rank of a world in which all ranks hand over the same: every work is ready, and what is launched recorded."""

    def __init__(self, ranks: int = 2) -> None:
        self.ranks = ranks
        self.log: list[str] = []
        self.started = Counter[str]()  # collectives of a step, by kind

    def size(self, group: str | None) -> int:
        return self.ranks

    def rank(self, group: str | None) -> int:
        return 0

    def start(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: str | None) -> ReadyWork:
        self.log.append(f"{kind.name} {self.started[kind.name]}")
        self.started[kind.name] += 1
        together = kind.together(torch.stack([send] * self.ranks), op)
        receive.copy_(together[0].clone().reshape(receive.shape))
        return ReadyWork()

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, ReadyWork]:
        self.log.append("vote")
        self.started.clear()
        return torch.stack([flags] * self.ranks), ReadyWork()


def over_threads(n: int, fn: Callable[..., Any], *arguments: Any, delay: float = 0.0) -> list[Any]:
    """`fn(wire, *arguments)` on `n` threads, each with its wire; what each returned, by rank."""
    hub = Hub(n, delay)
    results: list[Any] = [None] * n
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            results[rank] = fn(ThreadWire(hub, rank), *arguments)
        except BaseException as error:
            errors[rank] = error

    if not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()  # or torch crashes once the thread that traced first has ended
    threads = [OnOneCore(target=body, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SECONDS)
        assert not thread.is_alive(), f"a rank hangs: {hub.log[-10:]}"
    if errors:
        raise RankFailed(f"{errors}", errors) from next(iter(errors.values()))
    return results
