"""The times of a step, piece by piece: the host's on the CPU, those of the side stream on CUDA."""

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

Mark: TypeAlias = "float | torch.cuda.Event"
Piece: TypeAlias = Literal["computes", "launches", "waits"]


class Taken(NamedTuple):
    """The times of a step, in seconds.

    Attributes:
        segments: Of the segments before each collective is issued, since the one before; and of those after all.
        wire: Of each collective, from when it is issued until the step has noticed that it is complete.
        exposed: Of each collective: how long the step has waited for it, with nothing else to do.
    """

    segments: list[list[float]]
    wire: list[float]
    exposed: list[float]

    @property
    def encode_seconds(self) -> float:
        """All segments before the last collective is issued."""
        return sum(map(sum, self.segments[:-1]))

    @property
    def decode_seconds(self) -> float:
        """All segments after that."""
        return sum(self.segments[-1])

    @property
    def exposed_seconds(self) -> float:
        """All waiting."""
        return sum(self.exposed)


class Meter:
    """Measures the last step."""

    def __init__(self) -> None:
        self.begins()

    def begins(self) -> None:
        """Forget the last step."""
        self._pieces: list[tuple[Piece, int, Mark, Mark]] = []

    @contextmanager
    def times(
        self, named: AbstractContextManager[object], piece: Piece, index: int, stream: torch.cuda.Stream | None
    ) -> Generator[None]:
        """Time, within `named`, a segment, or the start of or the wait for the collective of that index."""
        with named:
            begun = _mark(stream)
            yield
            self._pieces.append((piece, index, begun, _mark(stream)))

    def taken(self, collectives: int) -> Taken:
        """Return the times of the last step, which had so many collectives. On CUDA it waits for the device."""
        if self._pieces and isinstance(last := self._pieces[-1][-1], torch.cuda.Event):
            last.synchronize()
        segments, wire, exposed = [list[float]()], [0.0] * collectives, [0.0] * collectives
        issued: dict[int, Mark] = {}
        for piece, index, begin, end in self._pieces:
            if piece == "computes":
                segments[-1].append(_seconds(begin, end))
            elif piece == "launches":
                issued[index] = begin
                segments.append([])
            else:
                wire[index], exposed[index] = _seconds(issued[index], end), _seconds(begin, end)
        return Taken(segments, wire, exposed)


def _mark(stream: torch.cuda.Stream | None) -> Mark:
    if stream is None:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _seconds(begin: Any, end: Any) -> float:
    return begin.elapsed_time(end) / 1e3 if isinstance(begin, torch.cuda.Event) else end - begin
