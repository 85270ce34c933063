"""The wire as a queue: one collective after the other, each once its payload is there."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from fnddp.cost.link import Link
from fnddp.wire.kinds import Kind, named


class Collective(Protocol):
    """What costs read of a plan's collective: its `slot` is its bucket's place in arrival order plus `depth`."""

    @property
    def kind(self) -> Kind | str: ...
    @property
    def wire_bytes(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def group(self) -> str | None: ...
    @property
    def slot(self) -> int: ...
    @property
    def depth(self) -> int: ...


Links: TypeAlias = Link | Mapping[str | None, Link]


@dataclass(frozen=True)
class CollectiveCost:
    """One collective of an estimate.

    Attributes:
        kind: "all_reduce", ...
        slot: Its place in the pipeline.
        wire_bytes: Payload that one rank hands over.
        link_bytes: Payload that one rank sends over the link.
        seconds: From the end of the one before it, or from when its bucket is ready.
        end_seconds: When it is done, from the start of backward; without one, from the start of the first collective.
    """

    kind: str
    slot: int
    wire_bytes: int
    link_bytes: int
    seconds: float
    end_seconds: float


class Queue:
    """Serves collectives in the order in which they come. Groups share it in time, also where they have own links.

    Args:
        link: Of all groups, or by the group's name (None is the default group). Its burst is full at first.
    """

    def __init__(self, link: Links) -> None:
        self._link = link
        self._free = 0.0
        self._spare: dict[Link, tuple[float, float]] = {}  # what is left of its burst, and when that was

    def serve(self, collective: Collective, ready: float) -> CollectiveCost:
        """What `collective` takes, whose payload is there at `ready`.

        Raises:
            ValueError: Its group has no link, or it is of an unknown kind.
        """
        link, kind = self._link_of(collective.group), named(collective.kind)
        payload, n = collective.wire_bytes, collective.world_size
        start = max(self._free, ready)
        seconds, sent = link.seconds(kind, payload, n), link.link_bytes(kind, payload, n)
        if link.burst and link.bandwidth < math.inf:
            left, since = self._spare.get(link, (link.burst, 0.0))
            left = min(link.burst, left + (start - since) * link.bandwidth)
            at_once = min(left, sent)
            seconds -= at_once / link.bandwidth
            self._spare[link] = left - at_once, start + seconds
        self._free = start + seconds
        return CollectiveCost(kind.name, collective.slot, payload, sent, seconds, self._free)

    def _link_of(self, group: str | None) -> Link:
        if isinstance(self._link, Link):
            return self._link
        if group not in self._link:
            raise ValueError(f"estimate: process group {group!r} has no link; links are given for {list(self._link)}")
        return self._link[group]
