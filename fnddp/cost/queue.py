"""The wire as a queue: one collective after the other, each as soon as its payload is ready."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fnddp.cost.link import Link
from fnddp.ir.program import Collective
from fnddp.wire.kinds import named

Links: TypeAlias = Link | Mapping[str | None, Link]


@dataclass(frozen=True)
class CollectiveCost:
    """The cost of one collective.

    Attributes:
        kind: "all_reduce", ...
        slot: Its place in the pipeline.
        wire_bytes: Payload that one rank passes to it.
        link_bytes: Payload that one rank sends over the link.
        seconds: From the end of the one before it, or from when its payload is ready.
        end_seconds: When it is done: of an estimate from the start of backward, of a prediction from the start of the
            step.
    """

    kind: str
    slot: int
    wire_bytes: int
    link_bytes: int
    seconds: float
    end_seconds: float


class Costs:
    """The collectives of a step, in the order in which they are issued, and their sums."""

    collectives: tuple[CollectiveCost, ...]

    @property
    def communication_seconds(self) -> float:
        """All collectives, one after the other."""
        return sum(cost.seconds for cost in self.collectives)

    @property
    def wire_bytes(self) -> int:
        return sum(cost.wire_bytes for cost in self.collectives)

    @property
    def link_bytes(self) -> int:
        return sum(cost.link_bytes for cost in self.collectives)


class Queue:
    """Serves collectives in the order in which they come. Groups share it in time, also if they have own links."""

    def __init__(self, link: Links) -> None:
        self._link = link
        self._free = 0.0
        self._spare: dict[Link, tuple[float, float]] = {}  # the rest of its burst, and when that was

    def serve(self, collective: Collective, ready: float) -> CollectiveCost:
        """Return the cost of `collective`, whose payload is ready at that time."""
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
