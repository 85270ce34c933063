"""What runners do, for who watches: torch's profiler, and FNDDP_DEBUG, which prints plans and times their steps."""

import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch.profiler import record_function

from fnddp.columns import columns
from fnddp.ir.program import Collective, Segment
from fnddp.ir.schedule import Schedule
from fnddp.show import names
from fnddp.show.meter import Meter
from fnddp.show.text import show, size
from fnddp.torch_private import is_profiling
from fnddp.wire import groups

FIRST, EVERY = 3, 100  # steps that are shown of each plan: the first ones, and then one in so many


def debug_level() -> int:
    """FNDDP_DEBUG: 0, 1 or 2.

    Raises:
        ValueError: It is something else.
    """
    text = os.environ.get("FNDDP_DEBUG") or "0"
    if text not in ("0", "1", "2"):
        raise ValueError(f"FNDDP_DEBUG must be 0, 1 (print plans) or 2 (also time their steps), got {text!r}")
    return int(text)


class Observer(Protocol):
    """Whoever wants to know what a runner does when. Each context encloses one thing; on CUDA it is on `stream`."""

    def computes(self, segment: Segment, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """A segment is computed."""
        ...

    def launches(self, collective: Collective, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """A collective is issued."""
        ...

    def waits(self, collective: Collective, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """A collective is waited for."""
        ...

    def begins(self) -> None:
        """A step begins."""
        ...

    def ends(self, plan: Schedule) -> None:
        """A step is over."""
        ...


def profiled(name: str | Callable[..., str], *of: object) -> AbstractContextManager[object]:
    """Encloses what torch's profiler, if one is active, is to show as `fnddp NAME`: `name`, or what that gives `of`."""
    if not is_profiling():
        return _NONE
    return record_function(names.PREFIX + (name if isinstance(name, str) else name(*of)))


_NONE = nullcontext()


class Ranges:
    """Names what a runner does for torch's profiler."""

    def computes(self, segment: Segment, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """See `Observer`."""
        return profiled(names.range_of, segment)

    def launches(self, collective: Collective, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """See `Observer`."""
        return profiled(names.launch_of, collective)

    def waits(self, collective: Collective, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """See `Observer`."""
        return profiled(names.wait_for, collective)

    def begins(self) -> None:
        """See `Observer`."""

    def ends(self, plan: Schedule) -> None:
        """See `Observer`."""


def observer(level: int, plan: Schedule, meter: Meter | None = None) -> Observer:
    """The observer of a new plan, which is printed, as the debug level asks for it; with a `meter` it measures."""
    if level and groups.rank(None) == 0:
        print(show(plan), file=sys.stderr)
    return observing(level, meter)


def observing(level: int, meter: Meter | None) -> Observer:
    """The same, without a word."""
    return Timer(meter) if level == 2 else Ranges() if meter is None else Metered(meter)


class Metered(Ranges):
    """Also measures each step."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        meter.begins()

    @contextmanager
    def computes(self, segment: Segment, stream: torch.cuda.Stream | None) -> Generator[None]:
        """See `Observer`."""
        with super().computes(segment, stream), self._meter.computes(segment, stream):
            yield

    @contextmanager
    def launches(self, collective: Collective, stream: torch.cuda.Stream | None) -> Generator[None]:
        """See `Observer`."""
        with super().launches(collective, stream):
            self._meter.launches(collective, stream)
            yield

    @contextmanager
    def waits(self, collective: Collective, stream: torch.cuda.Stream | None) -> Generator[None]:
        """See `Observer`."""
        with super().waits(collective, stream), self._meter.waits(collective, stream):
            yield

    def begins(self) -> None:
        """See `Observer`."""
        self._meter.begins()


class Timer(Metered):
    """Also prints what it took.

    On the CPU times are the host's. A collective is complete when the runner notices. On CUDA they are those of
    events on the side stream, and a step that is shown waits for the device.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        super().__init__(meter or Meter())
        self._count = 0

    def ends(self, plan: Schedule) -> None:
        """See `Observer`."""
        self._count += 1
        if (self._count <= FIRST or self._count % EVERY == 0) and groups.rank(None) == 0:
            print_table(f"fnddp: step {self._count} of this plan", *self._table(plan))

    def _table(self, plan: Schedule) -> tuple[list[tuple[str, ...]], str]:
        """A row for each collective, and what they add up to."""
        taken = self._meter.taken(len(plan.collectives))
        rows: list[tuple[str, ...]] = [("", "slot", "payload", "compute before", "wire", "exposed")]
        for c in plan.collectives:
            times = taken.computed[c.index], taken.wire[c.index], taken.exposed[c.index]
            rows.append((c.name, str(c.slot), size(c.wire_bytes), *(_ms(t) for t in times)))
        total = (
            f"encode {_ms(taken.encode_seconds)}, decode {_ms(taken.decode_seconds)}, "
            f"wire {_ms(sum(taken.wire))}, exposed tail {_ms(taken.exposed_seconds)}"
        )
        return rows, total


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"


def print_table(title: str, rows: Sequence[tuple[str, ...]], total: str) -> None:
    """Prints to stderr."""
    print(plain_table(title, rows, total), file=sys.stderr)


def plain_table(title: str, rows: Sequence[tuple[str, ...]], total: str) -> str:
    """Columns side by side, numbers to the right."""
    return "\n".join([title, columns(rows), total])
