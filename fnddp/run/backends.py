"""Who runs the segments of a plan: Python, or on request what Inductor or a CUDA graph makes of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from time import perf_counter
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fnddp.ir.program import Segment
from fnddp.ir.schedule import Schedule
from fnddp.run.log import tell

Run: TypeAlias = Callable[..., Sequence[Any]]
"""What gives the outputs of a segment for its inputs."""


_count = count()


def segments_of(plan: Schedule) -> tuple[Segment, ...]:
    """The segments of `plan` as its backend runs them."""
    if plan.backend == "inductor":
        building = _Building(plan)
        return tuple(
            replace(each, run=_Compiled(each.run, building)) if each.operations else each for each in plan.segments
        )
    if plan.backend == "cudagraphs":
        return tuple(
            replace(each, run=Captured(each.run)) if _only_fills_buffers(each) else each for each in plan.segments
        )
    return plan.segments


def _own(run: Run) -> Run:
    """`run` as a function with code and a name of its own.

    torch.compile limits how many versions it makes of one, and takes sizes for variables in which versions differ.
    """

    def own(*given: Any) -> Sequence[Any]:
        return run(*given)

    code = own.__code__.replace(co_name=f"segment_{next(_count)}")
    return FunctionType(code, globals(), closure=own.__closure__)


class _Building:
    """Says what compiling a plan has taken, once all of it is compiled."""

    def __init__(self, plan: Schedule) -> None:
        self._sync = plan.sync
        self._count = self._left = sum(bool(segment.operations) for segment in plan.segments)
        self._seconds = 0.0

    def took(self, seconds: float) -> None:
        self._seconds += seconds
        self._left -= 1
        if not self._left:
            tell("compiled %d segments of %r in %.1f s", self._count, self._sync, self._seconds)


class _Compiled:
    """A segment that Inductor compiles when it is first run."""

    def __init__(self, run: Run, building: _Building) -> None:
        self._run: Run = torch.compile(_own(run), fullgraph=True)
        self._building: _Building | None = building

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        if self._building is None:
            return self._run(*inputs)
        begun = perf_counter()
        outputs = self._run(*inputs)
        self._building.took(perf_counter() - begun)
        self._building = None
        return outputs


class Captured:
    """A segment as a CUDA graph, replayed where its inputs lie where they lay when it was captured.

    A graph reads and writes fixed addresses. Buffers stay where they are; gradients do once the caching allocator has
    settled. Where an input has moved the segment runs as it is, and what lies there twice in a row is captured.

    Args:
        run: The segment.
        capture: See `captured`.
    """

    def __init__(self, run: Run, capture: "Capture | None" = None) -> None:
        self._run, self._capture = run, capture or captured
        self._graphs: dict[Any, tuple[Callable[[], None], Sequence[Any]]] = {}
        self._last: Any = None  # where the inputs of the last run lay that was not replayed

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        where = tuple((each.data_ptr(), each.stride()) if isinstance(each, Tensor) else each for each in inputs)
        if where in self._graphs:
            replay, outputs = self._graphs[where]
            replay()
            return outputs
        if where != self._last or len(self._graphs) == _MAX_GRAPHS:
            self._last = where
            return self._run(*inputs)
        self._graphs[where] = self._capture(self._run, inputs)
        return self(*inputs)


Capture: TypeAlias = Callable[[Run, Sequence[Any]], tuple[Callable[[], None], Sequence[Any]]]

_MAX_GRAPHS = 4  # of a segment; each holds the memory of its temporaries


def captured(run: Run, inputs: Sequence[Any]) -> tuple[Callable[[], None], Sequence[Any]]:
    """A CUDA graph of `run(*inputs)` on the current stream: what replays it, and where it leaves its results."""
    graph = torch.cuda.CUDAGraph()
    # Backward goes on allocating on other streams, and maybe in other threads.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        outputs = run(*inputs)
    return graph.replay, outputs


def _only_fills_buffers(segment: Segment) -> bool:
    """Whether a segment computes something, and hands nothing on but what lies in buffers.

    What else it made would lie in the memory of the graph, where the next replay writes; or in that of an input, which
    the graph would then hold, so that no later input ever lies there.
    """
    return bool(segment.operations) and not segment.outputs
