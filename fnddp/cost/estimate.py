"""The timeline of a step: its computation and collectives, and its duration when they overlap."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import TypeAlias

from fnddp.core.table import columns
from fnddp.cost.link import Link, duration, scaled
from fnddp.ir.plan_data import PlanData
from fnddp.ir.program import Collective
from fnddp.wire.kinds import named

Links: TypeAlias = Link | Mapping[str | None, Link]


def parsed(links: Links | str | Mapping[str | None, Link | str]) -> Links:
    """Return `links`, parsed by `Link.parse` where they are text."""
    if isinstance(links, Mapping):
        return {group: link if isinstance(link, Link) else Link.parse(link) for group, link in links.items()}
    return links if isinstance(links, Link) else Link.parse(links)


@dataclass(frozen=True)
class Compute:
    """The time that a rank computes in a step, without waiting: see `measure_backward` and `measure_segments`.

    If one process alone measured it, it is valid for a rank with its own cores, caches and GPU.

    Attributes:
        forward_seconds: Time of forward.
        backward_seconds: Time of backward, without the encoding that runs in it.
        arrivals: The time when each leaf's gradient is ready, in seconds from the start of backward. None: buckets are
            ready at even intervals.
        segments: Seconds of each of the plan's segments, in order: encoding and decoding. None: they take no time.

    Raises:
        ValueError: A time is negative.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    arrivals: Mapping[str, float] | None = None
    segments: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not all(each >= 0 for each in (self.forward_seconds, self.backward_seconds, *(self.segments or ()))):
            raise ValueError(f"seconds of forward, backward and segments must be at least 0, got {self}")

    @property
    def order(self) -> list[str] | None:
        """Leaf paths in the order in which gradients are ready: the argument `arrival` of `lower`."""
        return None if self.arrivals is None else sorted(self.arrivals, key=self.arrivals.__getitem__)


@dataclass(frozen=True)
class Span:
    """A stretch of time on the clock.

    Attributes:
        does: "forward", "backward", "segment", "launch", "wait" (the rank has nothing else to do), or "wire".
        index: Index of the segment, or of the collective.
        begin: Seconds from the start of the step.
        seconds: How long it takes. The time of backward includes segments that run within it.
    """

    does: str
    index: int
    begin: float
    seconds: float

    @property
    def end(self) -> float:
        return self.begin + self.seconds


@dataclass(frozen=True)
class CollectiveCost:
    """The cost of one collective.

    Attributes:
        kind: Its kind, such as "all_reduce".
        slot: Its position in the schedule.
        wire_bytes: Payload that one rank passes to it.
        link_bytes: Payload that one rank sends over the link.
        seconds: Its duration, from the end of the collective before it, or from the time when its payload is ready.
        end_seconds: The time of its end, from the start of the step.
    """

    kind: str
    slot: int
    wire_bytes: int
    link_bytes: int
    seconds: float
    end_seconds: float


@dataclass(frozen=True)
class StepCost:
    """A computed step. It prints a table of its collectives, and the sums of other parts if there are any.

    Attributes:
        spans: The computation and waiting of a rank, and the transfers on the wire, in order.
        collectives: The collectives in the order in which they are issued.
        encode_seconds: Time of segments that run before the last collective is complete.
        decode_seconds: Time of the segments after it.
    """

    spans: tuple[Span, ...]
    compute: Compute
    collectives: tuple[CollectiveCost, ...]
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Time from the start of forward until the means are known."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def exposed_seconds(self) -> float:
        """Time in which the rank waits for collectives and has nothing else to do."""
        return sum(span.seconds for span in self.spans if span.does == "wait")

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

    def followed_by(self, other: "StepCost") -> "StepCost":
        """Return this step followed by `other`: the second hop of `fnddp.own`, on a link that was idle before.

        The spans, slots and indices of segments of `other` keep their own numbering.
        """
        later = [replace(span, begin=span.begin + self.seconds) for span in other.spans]
        sent = [replace(each, end_seconds=each.end_seconds + self.seconds) for each in other.collectives]
        return replace(
            self,
            spans=(*self.spans, *later),
            collectives=(*self.collectives, *sent),
            encode_seconds=self.encode_seconds + other.encode_seconds,
            decode_seconds=self.decode_seconds + other.decode_seconds,
        )

    def __str__(self) -> str:
        rows = [("collective", "slot", "payload", "on the link", "time", "done at")]
        for cost in self.collectives:
            sizes = scaled(cost.wire_bytes, "B"), scaled(cost.link_bytes, "B")
            rows.append((cost.kind, str(cost.slot), *sizes, duration(cost.seconds), duration(cost.end_seconds)))
        sizes = scaled(self.wire_bytes, "B"), scaled(self.link_bytes, "B")
        table = columns([*rows, ("total", "", *sizes, duration(self.communication_seconds), "")])
        parts = {
            "forward": self.compute.forward_seconds,
            "backward": self.compute.backward_seconds,
            "encode": self.encode_seconds,
            "decode": self.decode_seconds,
            "exposed": self.exposed_seconds,
        }
        written = [f"{name} {duration(seconds)}" for name, seconds in parts.items() if seconds]
        computes = any(seconds for name, seconds in parts.items() if name != "exposed")
        return f"{table}\nstep {duration(self.seconds)} = {' + '.join(written)}" if computes else table


def _mean_of(name: str) -> Callable[["MeanStepCost"], float]:
    return lambda mean: fmean([getattr(step, name) for step, _ in mean.steps], [count for _, count in mean.steps])


@dataclass(frozen=True)
class MeanStepCost:
    """The mean of the steps of a period: `steps` has each kind of step and its count."""

    steps: tuple[tuple[StepCost, int], ...]

    seconds = cached_property(_mean_of("seconds"))
    encode_seconds = cached_property(_mean_of("encode_seconds"))
    decode_seconds = cached_property(_mean_of("decode_seconds"))
    communication_seconds = cached_property(_mean_of("communication_seconds"))
    exposed_seconds = cached_property(_mean_of("exposed_seconds"))
    wire_bytes = cached_property(_mean_of("wire_bytes"))
    link_bytes = cached_property(_mean_of("link_bytes"))


class _Queue:
    """Queue for the link, first come, first served. Groups share it in time, even if they have links of their own."""

    def __init__(self, link: Links | str) -> None:
        self._link = parsed(link)
        self._free = 0.0
        self._spare: dict[Link, tuple[float, float]] = {}  # bytes left of its burst, and at what time

    def serve(self, collective: Collective, ready: float) -> CollectiveCost:
        """Return the cost of `collective`; its payload is ready at the time `ready`."""
        link, group, kind = self._link, collective.group, named(collective.kind)
        if not isinstance(link, Link):
            if group not in link:
                raise ValueError(f"estimate: process group {group!r} has no link; links are given for {list(link)}")
            link = link[group]
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


def estimate(collectives: Iterable[Collective], link: Links | str, backward_seconds: float = 0.0) -> StepCost:
    """Return a step that computes only backward: like `predict`, for collectives without a plan.

    The gradients of K buckets are ready at 1/K, 2/K, ... of backward. For more see `Plan.estimate`.
    """
    issued, compute = tuple(collectives), Compute(backward_seconds=backward_seconds)
    buckets = 1 + max((each.slot - each.depth for each in issued), default=0)
    queue = _Queue(link)
    costs = [queue.serve(each, backward_seconds * ((each.slot - each.depth + 1) / buckets)) for each in issued]
    spans = [Span("backward", 0, 0.0, backward_seconds)]
    spans += [Span("wire", i, cost.end_seconds - cost.seconds, cost.seconds) for i, cost in enumerate(costs)]
    end = max((cost.end_seconds for cost in costs), default=0.0)
    if end > backward_seconds:
        spans.append(Span("wait", len(costs) - 1, backward_seconds, end - backward_seconds))
    return StepCost(tuple(spans), compute, tuple(costs))


def predict(plan: PlanData, link: Links | str, compute: Compute) -> StepCost:
    """Return a predicted step of `plan`: segments in order, each collective once its segment is done.

    A segment runs when its gradients are ready, the segment before it is done, and the collectives that it waits for
    are complete; the last segments decode, and run when all collectives are. Backward and segments share the rank's
    processor, so segments within backward make it longer; the wire does not slow them down.

    The wrong model if ranks share cores but one rank alone measured `compute`; if encoding runs at the same time as
    backward (on an accelerator it has its own stream, so this is an upper bound); and for processor time of the wire.

    For arguments and errors see `Plan.predict`.
    """
    seconds, arrivals = compute.segments, _arrivals(plan, compute)
    if seconds is None:
        seconds = (0.0,) * len(plan.segments)
    elif len(seconds) != len(plan.segments):
        raise ValueError(
            f"predict: compute has the seconds of {len(seconds)} segments, but the plan has {len(plan.segments)}; "
            "measure this plan: measure_segments(plan)"
        )
    queue, spans, sent = _Queue(link), list[Span](), list[CollectiveCost]()
    begin = free = compute.forward_seconds
    end, within = begin + compute.backward_seconds, 0.0  # of backward; of segments in it, which make it longer
    encode = decode = 0.0

    def wait(index: int) -> None:
        nonlocal free
        done, idle_from = sent[index].end_seconds, max(free, end)  # the rank runs backward meanwhile
        if done > idle_from:
            spans.append(Span("wait", index, idle_from, done - idle_from))
        free = max(free, done)

    for index, (segment, own) in enumerate(zip(plan.segments, seconds, strict=True)):
        for awaited in segment.waits:
            wait(awaited)
        arrival = max((arrivals[path] for path in segment.needs), default=0.0)
        start = max(free, end if segment.commits else begin + arrival + within)
        spans.append(Span("segment", index, start, own))
        within += own if start < end else 0.0
        end, free = begin + compute.backward_seconds + within, start + own
        encode, decode = (encode, decode + own) if segment.commits else (encode + own, decode)
        if segment.launches is not None:
            cost = queue.serve(segment.launches, free)
            spans.append(Span("launch", len(sent), free, 0.0))
            spans.append(Span("wire", len(sent), cost.end_seconds - cost.seconds, cost.seconds))
            sent.append(cost)
    for index in range(len(sent)):
        wait(index)
    whole = Span("forward", 0, 0.0, begin), Span("backward", 0, begin, end - begin)
    return StepCost((*whole, *spans), compute, tuple(sent), encode, decode)


def _arrivals(plan: PlanData, compute: Compute) -> Mapping[str, float]:
    if compute.arrivals is None:
        buckets = 1 + max(plan.buckets.values(), default=0)
        return {path: compute.backward_seconds * ((bucket + 1) / buckets) for path, bucket in plan.buckets.items()}
    if missing := [path for path in plan.leaves if path not in compute.arrivals]:
        raise ValueError(f"predict: compute has no arrival of leaf {missing[0]!r}; it was measured for another model")
    for path in plan.leaves:
        if not 0 <= (at := compute.arrivals[path]) <= compute.backward_seconds:
            raise ValueError(
                f"predict: the gradient of leaf {path!r} arrives after {at!r} s, but backward takes only "
                f"{compute.backward_seconds!r} s; count arrivals from the start of backward"
            )
    return compute.arrivals
