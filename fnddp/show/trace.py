"""Names and times of the pieces of steps, for torch's profiler and FNDDP_DEBUG (prints plans and times).

Times are measured by the host on the CPU, and on the side stream on an accelerator.
"""

import os
import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, NamedTuple, TypeAlias

from torch.profiler import record_function

from fnddp.core.table import columns
from fnddp.device import Device, Mark, Stream
from fnddp.ir.plan_data import PlanData
from fnddp.ir.program import Collective, Segment
from fnddp.show import text
from fnddp.show.text import PREFIX, range_of, size
from fnddp.torch_private import is_profiling
from fnddp.wire import groups

FIRST, EVERY = 3, 100  # steps shown of each plan: the first three, then one in 100

Piece: TypeAlias = Literal["compute", "launch", "wait"]


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


class Taken(NamedTuple):
    """The times of a step, in seconds."""

    segments: list[list[float]]  # between the starts of consecutive collectives; last, of segments after all starts
    wire: list[float]  # of each collective, from its start until the step has noticed that it is complete
    exposed: list[float]  # that the step has waited for each collective, with nothing else to do

    @property
    def encode_seconds(self) -> float:
        """Time of all segments before the last collective is issued."""
        return sum(map(sum, self.segments[:-1]))

    @property
    def decode_seconds(self) -> float:
        """Time of all segments after the last collective is issued."""
        return sum(self.segments[-1])

    @property
    def exposed_seconds(self) -> float:
        return sum(self.exposed)


class Observer:
    """Observer that names the pieces of steps for torch's profiler, and measures and prints them.

    `debug` is `debug_level()`.
    """

    def __init__(self, debug: int = 0, *, measures: bool = False) -> None:
        self.measures = measures or debug == 2
        self._debug = debug
        self._steps: dict[int, int] = {}  # of each plan, by its id
        self._pieces: list[tuple[Piece, int, Mark, Mark]] = []  # of the last step

    def show(self, plan: PlanData) -> None:
        """Record that steps of a new plan, `plan`, follow."""
        self._steps[id(plan)] = 0
        if self._debug and groups.rank(None) == 0:
            print(text.show(plan), file=sys.stderr)

    def begins(self, device: Device, stream: Stream) -> None:
        """Record that a step begins on `stream` of `device`, and drop the last one."""
        self._device, self._stream, self._pieces = device, stream, []

    @contextmanager
    def piece(self, piece: Piece, of: Segment | Collective) -> Generator[None]:
        """Enclose the computation of a segment, or the launch of a collective, or the wait for it."""
        name, index = (range_of(of), -1) if isinstance(of, Segment) else (f"{of.name} {piece}", of.index)
        with profiled(name):
            if not self.measures:
                yield
                return
            begun = self._device.mark(self._stream)
            yield
            self._pieces.append((piece, index, begun, self._device.mark(self._stream)))

    def ends(self, plan: PlanData) -> None:
        """Record that a step of `plan` has ended. To print it, wait for the device."""
        if self._debug != 2 or groups.rank(None) != 0:
            return
        count = self._steps[id(plan)] = self._steps[id(plan)] + 1
        if count <= FIRST or count % EVERY == 0:
            table = _table(plan, self.taken(len(plan.collectives)))
            print(f"fnddp: step {count} of this plan\n{table}", file=sys.stderr)

    def taken(self, collectives: int) -> Taken:
        """Return the times of the last step, with this number of collectives. It waits for the device."""
        segments, wire, exposed = [list[float]()], [0.0] * collectives, [0.0] * collectives
        issued: dict[int, Mark] = {}
        for piece, index, begin, end in self._pieces:
            if piece == "compute":
                segments[-1].append(self._device.seconds(begin, end))
            elif piece == "launch":
                issued[index] = begin
                segments.append([])
            else:
                wire[index], exposed[index] = self._device.seconds(issued[index], end), self._device.seconds(begin, end)
        return Taken(segments, wire, exposed)


def _table(plan: PlanData, taken: Taken) -> str:
    """Return a table with a row for each collective, and the sums below."""
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
