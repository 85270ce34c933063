"""The cost of the collectives of a step: one after the other, each as soon as its payload is ready."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fnddp.cost.link import Link, duration, scaled
from fnddp.ir.program import Collective
from fnddp.wire.kinds import named

Links: TypeAlias = Link | Mapping[str | None, Link]


@dataclass(frozen=True)
class CollectiveCost:
    """The cost of one collective.

    Attributes:
        kind: "all_reduce", ...
        slot: Its position in the schedule.
        wire_bytes: Payload that one rank passes to it.
        link_bytes: Payload that one rank sends over the link.
        seconds: Its duration, from the end of the collective before it, or from when its payload is ready.
        end_seconds: When it is done: in an estimate from the start of backward, in a prediction from the start of
            the step.
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
        """Time of all collectives, one after the other."""
        return sum(cost.seconds for cost in self.collectives)

    @property
    def wire_bytes(self) -> int:
        return sum(cost.wire_bytes for cost in self.collectives)

    @property
    def link_bytes(self) -> int:
        return sum(cost.link_bytes for cost in self.collectives)


class Queue:
    """Queue for the link, first come, first served. Groups share it in time, even if they have links of their own."""

    def __init__(self, link: Links) -> None:
        self._link = link
        self._free = 0.0
        self._spare: dict[Link, tuple[float, float]] = {}  # bytes left of its burst, and at what time

    def serve(self, collective: Collective, ready: float) -> CollectiveCost:
        """Return the cost of `collective`, whose payload is ready at the time `ready`."""
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


@dataclass(frozen=True)
class Estimate(Costs):
    """The cost of the collectives of a step. Printed, it is a table."""

    collectives: tuple[CollectiveCost, ...]
    backward_seconds: float | None = None
    overhead_seconds: float = 0.0

    @property
    def exposed_seconds(self) -> float:
        """Time from the end of backward to the end of the last collective; without backward, all communication."""
        end = max((cost.end_seconds for cost in self.collectives), default=0.0)
        return max(0.0, end - (self.backward_seconds or 0.0))

    @property
    def step_seconds(self) -> float:
        """Backward, the exposed tail, and the overhead."""
        return (self.backward_seconds or 0.0) + self.exposed_seconds + self.overhead_seconds

    def __str__(self) -> str:
        rows = [("collective", "slot", "payload", "on the link", "time", "done at")]
        for cost in self.collectives:
            sizes = scaled(cost.wire_bytes, "B"), scaled(cost.link_bytes, "B")
            rows.append((cost.kind, str(cost.slot), *sizes, duration(cost.seconds), duration(cost.end_seconds)))
        sizes = scaled(self.wire_bytes, "B"), scaled(self.link_bytes, "B")
        table = columns([*rows, ("total", "", *sizes, duration(self.communication_seconds), "")])
        if self.backward_seconds is None:
            return table
        parts = f"backward {duration(self.backward_seconds)} + exposed {duration(self.exposed_seconds)}"
        overhead = f" + encode and decode {duration(self.overhead_seconds)}" if self.overhead_seconds else ""
        return f"{table}\nstep {duration(self.step_seconds)} = {parts}{overhead}"


def estimate(
    collectives: Iterable[Collective],
    link: Links,
    *,
    backward_seconds: float | None = None,
    overhead_seconds: float = 0.0,
) -> Estimate:
    """Return the cost of the collectives of a step and, with `backward_seconds`, the part that backward does not hide.

    It is `predict` for a plan whose computation takes no time: the gradients of K buckets are ready at 1/K, 2/K, ... of
    backward, and a collective starts once its bucket is ready and the one before it is done. The link's burst is full
    at the start of the step. The wrong choice where collectives slow backward down, as on the CPU: measure it while
    they run.

    Args:
        collectives: A plan's, in the order in which they are issued.
        link: The link of all groups, or links by group name. Groups share one link in time even where they have links
            of their own: an upper bound.
        backward_seconds, overhead_seconds: See `Plan.estimate`, also for the errors.

    >>> import torch
    >>> from fnddp import Link, allreduce, lower
    >>> params = {name: torch.empty(1_000_000, device="meta") for name in ("first", "second")}
    >>> plan = lower(allreduce, params, world_size=2, first_bucket_mb=3, bucket_cap_mb=3)
    >>> print(estimate(plan.collectives, Link.parse("1gbit:20us"), backward_seconds=0.1))
    collective  slot  payload  on the link      time   done at
    all_reduce     0     4 MB         4 MB  32.08 ms  82.08 ms
    all_reduce     1     4 MB         4 MB  32.08 ms  132.1 ms
    total                8 MB         8 MB  64.16 ms
    step 132.1 ms = backward 100 ms + exposed 32.08 ms
    """
    issued = tuple(collectives)
    buckets = 1 + max((each.slot - each.depth for each in issued), default=0)
    queue, backward = Queue(link), backward_seconds or 0.0
    costs = [queue.serve(each, backward * (each.slot - each.depth + 1) / buckets) for each in issued]
    return Estimate(tuple(costs), backward_seconds, overhead_seconds)


def columns(rows: Sequence[Sequence[str]], text: Collection[int] = (0,)) -> str:
    """Return `rows` as lines of equally wide columns; `text` has the positions of those that are not numbers.

    >>> print(columns([("collective", "slot", "payload"), ("c0", "0", "4 MB"), ("total", "", "12 MB")]))
    collective  slot  payload
    c0             0     4 MB
    total               12 MB
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if i in text else str.rjust for i in range(len(widths))]
    lines = [[side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)] for row in rows]
    return "\n".join(["  ".join(line).rstrip() for line in lines])
