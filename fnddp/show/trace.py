"""Names and times of the pieces of steps, for torch's profiler, and for FNDDP_DEBUG, which prints plans and times."""

import os
import sys
from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

from fnddp.cost.estimate import columns
from fnddp.device import Device, Stream
from fnddp.ir.program import Collective, Segment
from fnddp.ir.schedule import Schedule
from fnddp.show.meter import Meter
from fnddp.show.text import PREFIX, range_of, show, size
from fnddp.torch_private import is_profiling
from fnddp.wire import groups

FIRST, EVERY = 3, 100  # steps that are shown of each plan: the first ones, and then one in so many


def debug_level() -> int:
    """Return FNDDP_DEBUG: 0, 1 or 2.

    Raises:
        ValueError: The variable has another value.
    """
    text = os.environ.get("FNDDP_DEBUG") or "0"
    if text not in ("0", "1", "2"):
        raise ValueError(f"FNDDP_DEBUG must be 0, 1 (print plans) or 2 (also time their steps), got {text!r}")
    return int(text)


def profiled(name: str) -> AbstractContextManager[object]:
    """Enclose a range of torch's profiler, `fnddp NAME`, if one is active."""
    return record_function(PREFIX + name) if is_profiling() else _NONE


_NONE = nullcontext()


class Observer:
    """Observer that names the pieces of steps for torch's profiler, and measures and prints them.

    Each context encloses one piece, which is started on `stream` of `device`.

    Args:
        meter: Measures each step, if given.
        prints: Whether some steps of the plan are printed, as measured.
    """

    def __init__(self, meter: Meter | None = None, *, prints: bool = False) -> None:
        self._meter = Meter() if prints and meter is None else meter
        self._prints, self._count = prints, 0

    def computes(self, segment: Segment, device: Device, stream: Stream) -> AbstractContextManager[object]:
        """Enclose the computation of a segment."""
        named = profiled(range_of(segment))
        return named if self._meter is None else self._meter.times(named, "computes", -1, device, stream)

    def launches(self, collective: Collective, device: Device, stream: Stream) -> AbstractContextManager[object]:
        """Enclose the start of a collective."""
        named = profiled(f"{collective.name} launch")
        return named if self._meter is None else self._meter.times(named, "launches", collective.index, device, stream)

    def waits(self, collective: Collective, device: Device, stream: Stream) -> AbstractContextManager[object]:
        """Enclose the wait for a collective."""
        named = profiled(f"{collective.name} wait")
        return named if self._meter is None else self._meter.times(named, "waits", collective.index, device, stream)

    def begins(self) -> None:
        """Note that a step begins."""
        if self._meter is not None:
            self._meter.begins()

    def ends(self, plan: Schedule) -> None:
        """Note that a step of `plan` has ended. To print it, wait for the device."""
        self._count += 1
        if self._meter is None or not self._prints or groups.rank(None) != 0:
            return
        if self._count <= FIRST or self._count % EVERY == 0:
            print(f"fnddp: step {self._count} of this plan\n{_table(plan, self._meter)}", file=sys.stderr)


def observer(level: int, plan: Schedule, meter: Meter | None = None) -> Observer:
    """Return the observer of a new plan at this debug level, and print the plan if it is not 0."""
    if level and groups.rank(None) == 0:
        print(show(plan), file=sys.stderr)
    return observing(level, meter)


def observing(level: int, meter: Meter | None) -> Observer:
    """Return the observer of a plan that has been printed."""
    return Observer(meter, prints=level == 2)


def _table(plan: Schedule, meter: Meter) -> str:
    """Return a row for each collective, and the sums below."""
    taken = meter.taken(len(plan.collectives))
    rows: list[tuple[str, ...]] = [("", "slot", "payload", "compute before", "wire", "exposed")]
    for c in plan.collectives:
        times = sum(taken.segments[c.index]), taken.wire[c.index], taken.exposed[c.index]
        rows.append((c.name, str(c.slot), size(c.wire_bytes), *map(_ms, times)))
    return (
        f"{columns(rows)}\nencode {_ms(taken.encode_seconds)}, decode {_ms(taken.decode_seconds)}, "
        f"wire {_ms(sum(taken.wire))}, exposed tail {_ms(taken.exposed_seconds)}"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"
