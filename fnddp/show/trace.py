"""What runners do, for who watches: torch's profiler, and FNDDP_DEBUG, which prints plans and times their steps."""

import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeAlias

import torch
from torch.profiler import record_function

from fnddp.columns import columns
from fnddp.plan.ir import Collective, Segment
from fnddp.plan.schedule import Schedule
from fnddp.show import names
from fnddp.show.text import show, size
from fnddp.torch_private import is_profiling
from fnddp.wire import groups

FIRST, EVERY = 3, 100  # steps that are shown of each plan: the first ones, and then one in so many

Mark: TypeAlias = "float | torch.cuda.Event"
Span: TypeAlias = tuple[Mark, Mark]


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


def profiled(name: str) -> AbstractContextManager[object]:
    """Encloses what torch's profiler, if one is active, is to show as `fnddp NAME`."""
    return record_function(f"{names.PREFIX}{name}") if is_profiling() else _NONE


_NONE = nullcontext()


class Ranges:
    """Names what a runner does for torch's profiler."""

    def computes(self, segment: Segment, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """See `Observer`."""
        return profiled(names.range_of(segment))

    def launches(self, collective: Collective, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """See `Observer`."""
        return profiled(names.launch_of(collective))

    def waits(self, collective: Collective, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """See `Observer`."""
        return profiled(names.wait_for(collective))

    def begins(self) -> None:
        """See `Observer`."""

    def ends(self, plan: Schedule) -> None:
        """See `Observer`."""


def observer(level: int, plan: Schedule) -> Observer:
    """The observer of a new plan, which is printed, as the debug level asks for it."""
    if level and groups.rank(None) == 0:
        print(show(plan), file=sys.stderr)
    return Timer() if level == 2 else Ranges()


class Timer(Ranges):
    """Also prints what it took.

    On the CPU times are the host's. A collective is complete when the runner notices. On CUDA they are those of
    events on the side stream, and a step that is shown waits for the device.
    """

    def __init__(self) -> None:
        self._count = 0
        self.begins()

    @contextmanager
    def computes(self, segment: Segment, stream: torch.cuda.Stream | None) -> Generator[None]:
        """See `Observer`."""
        with super().computes(segment, stream):
            begun = _mark(stream)
            yield
            self._computed[-1].append((begun, _mark(stream)))

    @contextmanager
    def launches(self, collective: Collective, stream: torch.cuda.Stream | None) -> Generator[None]:
        """See `Observer`."""
        with super().launches(collective, stream):
            self._issued[collective.index] = _mark(stream)
            self._computed.append([])
            yield

    @contextmanager
    def waits(self, collective: Collective, stream: torch.cuda.Stream | None) -> Generator[None]:
        """See `Observer`."""
        with super().waits(collective, stream):
            begun = _mark(stream)
            yield
            self._waited[collective.index] = begun, _mark(stream)
            self._stream = stream

    def ends(self, plan: Schedule) -> None:
        """See `Observer`."""
        self._count += 1
        if (self._count <= FIRST or self._count % EVERY == 0) and groups.rank(None) == 0:
            print_table(f"fnddp: step {self._count} of this plan", *self._table(plan))

    def begins(self) -> None:
        """See `Observer`."""
        self._computed: list[list[Span]] = [[]]  # a list for each collective, before it is issued, and one for the rest
        self._issued: dict[int, Mark] = {}
        self._waited: dict[int, Span] = {}
        self._stream: torch.cuda.Stream | None = None

    def _table(self, plan: Schedule) -> tuple[list[tuple[str, ...]], str]:
        """A row for each collective, and what they add up to."""
        if self._stream is not None:
            self._stream.synchronize()
        computed = [sum(map(_ms, spans)) for spans in self._computed]
        exposed = {index: _ms(span) for index, span in self._waited.items()}
        wire = {index: _ms((self._issued[index], done)) for index, (_, done) in self._waited.items()}
        rows: list[tuple[str, ...]] = [("", "slot", "payload", "compute before", "wire", "exposed")]
        for c in plan.collectives:
            times = computed[c.index], wire.get(c.index, 0.0), exposed.get(c.index, 0.0)
            rows.append((c.name, str(c.slot), size(c.wire_bytes), *(f"{t:.3f} ms" for t in times)))
        total = (
            f"encode {sum(computed[:-1]):.3f} ms, decode {computed[-1]:.3f} ms, wire {sum(wire.values()):.3f} ms, "
            f"exposed tail {sum(exposed.values()):.3f} ms"
        )
        return rows, total


def _mark(stream: torch.cuda.Stream | None) -> Mark:
    if stream is None:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def print_table(title: str, rows: Sequence[tuple[str, ...]], total: str) -> None:
    """Prints to stderr, with rich if it is installed (`pip install fnddp[demo]`)."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain_table(title, rows, total), file=sys.stderr)
        return
    table = Table(*rows[0], box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows[1:]:
        table.add_row(*row)
    console = Console(stderr=True)
    console.print(table)
    console.print(total, soft_wrap=True)


def plain_table(title: str, rows: Sequence[tuple[str, ...]], total: str) -> str:
    """Columns side by side, numbers to the right."""
    return "\n".join([title, columns(rows), total])


def _ms(span: Span) -> float:
    begin, end = span
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return begin.elapsed_time(end)
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return (end - begin) * 1e3
