"""What FNDDP_DEBUG shows: 1 prints plans, 2 also times their steps and names them in profiler traces."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.profiler import record_function

from fnddp import collectives
from fnddp.plan.ir import Collective
from fnddp.plan.passes.emit import Step
from fnddp.plan.plan import Plan
from fnddp.run.memory import Buffers
from fnddp.run.planned import Executor
from fnddp.show.text import size
from fnddp.tree import Leaves

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


def make_executor(
    level: int,
    plan: Plan,
    buffers: Buffers,
    on_last_launch: Callable[[], None],
    on_complete: Callable[[], None],
) -> Executor:
    """The executor of a new plan, as the debug level asks for it."""
    if level and collectives.rank(None) == 0:
        print(plan, file=sys.stderr)
    return (TimedExecutor if level == 2 else Executor)(plan, buffers, on_last_launch, on_complete)


class TimedExecutor(Executor):
    """An executor that names what it does for profilers, and prints what it took.

    On the CPU times are the host's. A collective is complete when the executor notices. On CUDA they are those of
    events on the side stream, and a step that is shown waits for the device.
    """

    def __init__(
        self, plan: Plan, buffers: Buffers, on_last_launch: Callable[[], None], on_complete: Callable[[], None]
    ) -> None:
        super().__init__(plan, buffers, on_last_launch, on_complete)
        self._count = 0
        self._finishing = False
        self._begin()

    def start(self, parts: Sequence[Any]) -> None:
        """See `Executor.start`."""
        self._begin()
        super().start(parts)

    def finish(self) -> tuple[Leaves, list[Any]]:
        """See `Executor.finish`."""
        self._finishing = True
        result = super().finish()
        self._count += 1
        if (self._count <= FIRST or self._count % EVERY == 0) and collectives.rank(None) == 0:
            print_table(f"fnddp: step {self._count} of this plan", *self._table())
        return result

    def _begin(self) -> None:
        self._finishing = False
        self._computed: list[list[Span]] = [[]]  # a list for each collective, before it is issued, and one for the rest
        self._issued: dict[int, Mark] = {}
        self._seen: dict[int, Mark] = {}
        self._blocked: dict[int, Span] = {}

    def _compute(self, step: Step) -> None:
        kind = "decode" if self.has_launched_all else "encode"
        with record_function(f"fnddp slot {step.slot} {kind}"):
            begun = self._mark()
            super()._compute(step)
            self._computed[-1].append((begun, self._mark()))

    def _launch(self, collective: Collective) -> None:
        with record_function(f"fnddp {collective.name} launch"):
            self._issued[collective.index] = self._mark()
            self._computed.append([])
            super()._launch(collective)

    def _wait(self, index: int) -> None:
        with record_function(f"fnddp c{index} wait"):
            begun = self._mark()
            super()._wait(index)
            self._seen[index] = self._mark()
            if self._finishing:
                self._blocked[index] = begun, self._seen[index]

    def _mark(self) -> Mark:
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _table(self) -> tuple[list[tuple[str, ...]], str]:
        """A row for each collective, and what they add up to."""
        if self._stream is not None:
            self._stream.synchronize()
        computed = [sum(map(_ms, spans)) for spans in self._computed]
        blocked = {index: _ms(span) for index, span in self._blocked.items()}
        wire = {index: _ms((self._issued[index], seen)) for index, seen in self._seen.items()}
        rows: list[tuple[str, ...]] = [("", "slot", "payload", "compute before", "wire", "exposed")]
        for c in self.plan.collectives:
            times = computed[c.index], wire.get(c.index, 0.0), blocked.get(c.index, 0.0)
            rows.append((c.name, str(c.slot), size(c.wire_bytes), *(f"{t:.3f} ms" for t in times)))
        total = (
            f"encode {sum(computed[:-1]):.3f} ms, decode {computed[-1]:.3f} ms, wire {sum(wire.values()):.3f} ms, "
            f"exposed tail {sum(blocked.values()):.3f} ms"
        )
        return rows, total


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
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join([title, *lines, total])


def _ms(span: Span) -> float:
    begin, end = span
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return begin.elapsed_time(end)
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return (end - begin) * 1e3
