"""Collectives on gloo that are made of messages between two ranks, where its own are slow."""

import threading
import weakref
from collections.abc import Iterator
from itertools import chain, count
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp.wire.kinds import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Kind
from fnddp.wire.protocol import waited

_TAGS = 0x666E0000  # away from the tags of a user's own messages
_MOST = 2**16  # tags in use
LARGE = 2**18  # bytes of a result on the CPU; below, messages cost more than they save

# The tags of a group's collectives, one after the other: a ring posts messages late, while others are under way.
_tags: "weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()

Steps: TypeAlias = Iterator[list[dist.Work]]
"""Posts messages, yields them, and goes on once they are over."""


class Messages:
    """A collective under way, as a `Work`. Its first messages are posted at once.

    gloo reports that a message is over only to a thread that waits for it. So one does, and posts those that follow:
    the collective goes on while the host computes.
    """

    def __init__(self, steps: Steps) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._carry_on, args=(next(steps), steps), daemon=True).start()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error

    def _carry_on(self, first: list[dist.Work], steps: Steps) -> None:
        try:
            with torch.inference_mode():  # where the buffers may come from
                for work in chain(first, chain.from_iterable(steps)):
                    waited(work)
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()


def is_gloo_on_cpu(group: dist.ProcessGroup) -> bool:
    """Return whether gloo carries what the CPU sends to the other ranks of `group`, if there are any."""
    return group.size() > 1 and "cpu:gloo" in dist.get_backend_config(group)


def faster(kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: dist.ProcessGroup) -> Steps | None:
    """Return messages, on all ranks, where they are faster than a `LARGE` collective of `group`; None elsewhere."""
    if not is_gloo_on_cpu(group):
        return None
    if kind is ALL_REDUCE and send.dtype == torch.float16 and op == "sum":
        return ring(send, group, _next_tag(group))
    if kind in (ALL_GATHER, ALL_TO_ALL):
        return direct(send if kind.sends_rows else send.expand_as(receive), receive, group, _next_tag(group))
    return None


def _next_tag(group: dist.ProcessGroup) -> int:
    """Return the same tag on all ranks, which start the collectives of `group` in one order."""
    with _lock:
        return _TAGS + next(_tags.setdefault(group, count())) % _MOST


def ring(buffer: Tensor, group: dist.ProcessGroup, tag: int) -> Steps:
    """Run gloo's ring with torch's sum: gloo adds float16 one number at a time, in three times the time.

    A reduce-scatter and an all-gather of one chunk for each rank, in n - 1 messages each. Every element is added up on
    one rank, in the order of the ring, so all ranks get the same bits.
    """
    rank, n = group.rank(), group.size()
    chunks = list(buffer.tensor_split(n))
    received = torch.empty_like(chunks[0])  # the largest
    for step in range(2 * (n - 1)):
        # In step s of the first half, rank r sends chunk r - s and adds chunk r - s - 1; the second half is one ahead.
        outgoing, target = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        adds = step < n - 1
        incoming = received[: target.numel()] if adds else target
        after, before = (rank + 1) % n, (rank - 1) % n
        yield [group.recv([incoming], before, tag), group.send([outgoing], after, tag)]
        if adds:
            target += incoming


def direct(send: Tensor, receive: Tensor, group: dist.ProcessGroup, tag: int) -> Steps:
    """Send row r of `send` to each rank r, and receive theirs in row r of `receive`, both ways at the same time.

    gloo sends before it asks for what it receives. On a rank that comes later than another, the request then waits
    behind its own payload, and the two go one after the other: twice the time on two ranks.
    """
    rank, n = group.rank(), group.size()
    others = [(rank + i) % n for i in range(1, n)]
    works = [group.recv([receive[other]], other, tag) for other in reversed(others)]
    works += [group.send([send[other]], other, tag) for other in others]
    receive[rank].copy_(send[rank])
    yield works
