"""The segments of a plan for its readers: those that look alike as one."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from fnddp.ir.program import Collective, Operation, Segment
from fnddp.ir.schedule import Schedule


@dataclass(frozen=True)
class Run:
    """Segments of a slot that look alike, as one.

    Attributes:
        kind: "encode" before any collective is complete, "decode" after all are, "decode, encode" in between.
        needs: Leaves whose gradients must have arrived.
        waits: Collectives that must be complete.
        launches: The collective that the last segment issues.
    """

    slot: int
    kind: str
    needs: tuple[str, ...]
    waits: tuple[Collective, ...]
    operations: tuple[Operation, ...]
    launches: Collective | None


def runs(plan: Schedule, *, merged: bool = True) -> Iterator[Run]:
    """Yield the segments of a plan; `merged`, those of the same slot and kind as one, up to a collective."""
    collectives, alike = plan.collectives, list[Segment]()
    for segment, following in zip(plan.segments, [*plan.segments[1:], None], strict=False):
        alike.append(segment)
        if merged and segment.launches is None and following is not None and _look(segment) == _look(following):
            continue
        needs = tuple(chain.from_iterable(each.needs for each in alike))
        waits = tuple(collectives[index] for each in alike for index in each.waits)
        operations = tuple(chain.from_iterable(each.operations for each in alike))
        yield Run(*_look(segment), needs, waits, operations, segment.launches)
        alike.clear()


def _look(segment: Segment) -> tuple[int, str]:
    return segment.slot, "decode" if segment.commits else "decode, encode" if segment.waits else "encode"
