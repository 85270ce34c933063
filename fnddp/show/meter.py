"""The times of a runner's step, piece by piece: the host's on the CPU, those of the side stream on CUDA."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch

from fnddp.ir.program import Collective, Segment

Mark: TypeAlias = "float | torch.cuda.Event"
Span: TypeAlias = tuple[Mark, Mark]


class Taken(NamedTuple):
    """The times of a step, in seconds.

    Attributes:
        segments: Of the segments before each collective is issued, since the one before; and of those after all.
        wire: Of each collective, from when it is issued until the runner has noticed that it is complete.
        exposed: Of each collective: how long the runner has waited for it, with nothing else to do.
    """

    segments: list[list[float]]
    wire: list[float]
    exposed: list[float]

    @property
    def computed(self) -> list[float]:
        """All segments before each collective is issued, since the one before; and all after them."""
        return [sum(seconds) for seconds in self.segments]

    @property
    def encode_seconds(self) -> float:
        """All segments before the last collective is issued."""
        return sum(self.computed[:-1])

    @property
    def decode_seconds(self) -> float:
        """All segments after that."""
        return self.computed[-1]

    @property
    def exposed_seconds(self) -> float:
        """All waiting."""
        return sum(self.exposed)


class Meter:
    """Measures the last step. Its contexts enclose what an `Observer`'s do."""

    def __init__(self) -> None:
        self.begins()

    def begins(self) -> None:
        """Forget the last step."""
        self._computed: list[list[Span]] = [[]]  # a list for each collective, before it is issued, and one for the rest
        self._issued: dict[int, Mark] = {}
        self._waited: dict[int, Span] = {}
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def computes(self, segment: Segment, stream: torch.cuda.Stream | None) -> Generator[None]:
        begun = _mark(stream)
        yield
        self._computed[-1].append((begun, _mark(stream)))
        self._stream = stream

    @contextmanager
    def launches(self, collective: Collective, stream: torch.cuda.Stream | None) -> Generator[None]:
        self._issued[collective.index] = _mark(stream)
        self._computed.append([])
        yield

    @contextmanager
    def waits(self, collective: Collective, stream: torch.cuda.Stream | None) -> Generator[None]:
        begun = _mark(stream)
        yield
        self._waited[collective.index] = begun, _mark(stream)

    def taken(self, collectives: int) -> Taken:
        """Return the times of the last step, which had so many collectives. On CUDA it waits for the device."""
        if self._stream is not None:
            self._stream.synchronize()
        waited = [self._waited.get(index) for index in range(collectives)]
        return Taken(
            [[_seconds(span) for span in spans] for spans in self._computed],
            [0.0 if span is None else _seconds((self._issued[i], span[1])) for i, span in enumerate(waited)],
            [0.0 if span is None else _seconds(span) for span in waited],
        )


def _mark(stream: torch.cuda.Stream | None) -> Mark:
    if stream is None:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _seconds(span: Span) -> float:
    begin, end = span
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return begin.elapsed_time(end) / 1e3
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return end - begin
