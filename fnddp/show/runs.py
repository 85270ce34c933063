"""The segments of a plan as its user reads them: those that look alike as one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fnddp.ir.program import Collective, Name, Operation, Received, Segment, Sent, Span
from fnddp.ir.schedule import Schedule


@dataclass(frozen=True)
class Run:
    """Segments of a slot that look alike, as one.

    Attributes:
        slot: Of all of them.
        kind: "encode" before a collective, "decode" after it, "decode, encode" between two rounds.
        needs: Leaves whose gradients must have arrived.
        waits: Collectives that must be complete.
        operations: What they compute.
        launches: The collective that the last one issues.
    """

    slot: int
    kind: str
    needs: tuple[str, ...]
    waits: tuple[Collective, ...]
    operations: tuple[Operation, ...]
    launches: Collective | None


def runs(plan: Schedule) -> Iterator[Run]:
    """The segments of a plan."""
    collectives = plan.collectives
    for segment, feeds in zip(plan.segments, _feeds(plan.segments), strict=True):
        kind = "decode" if not feeds else "decode, encode" if segment.waits else "encode"
        waits = tuple(collectives[index] for index in segment.waits)
        yield Run(segment.slot, kind, segment.needs, waits, segment.operations, segment.launches)


def merged(segments: Iterable[Run]) -> Iterator[Run]:
    """Runs that follow each other in a slot, of the same kind, as one; up to a collective."""
    last: Run | None = None
    for run in segments:
        if last is None:
            last = run
        elif last.launches is None and (last.slot, last.kind) == (run.slot, run.kind):
            needs, waits = (*last.needs, *run.needs), (*last.waits, *run.waits)
            last = Run(run.slot, run.kind, needs, waits, (*last.operations, *run.operations), run.launches)
        else:
            yield last
            last = run
    if last is not None:
        yield last


def _feeds(segments: Sequence[Segment]) -> list[bool]:
    """For each segment whether a collective depends on it."""
    feeds: list[bool] = []
    needed: set[Name] = set()
    pending: set[Name] = set()  # payloads that are sent later
    for segment in reversed(segments):
        if segment.launches is not None:
            pending |= {Sent(segment.launches.index, i) for i in range(len(segment.launches.payloads))}
        sends = segment.launches is not None or not pending.isdisjoint(segment.inputs)
        here = sends or not needed.isdisjoint(segment.outputs)
        needed |= (
            {name for name in segment.inputs if not isinstance(name, Sent | Span | Received)} if here else set[Name]()
        )
        feeds.append(here)
    return feeds[::-1]
