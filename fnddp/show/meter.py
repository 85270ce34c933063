"""What a runner's last step took, piece by piece: on the CPU the host's time, on CUDA that of the side stream."""

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NamedTuple, TypeAlias

import torch

from fnddp.ir.program import Collective, Segment

Mark: TypeAlias = "float | torch.cuda.Event"
Span: TypeAlias = tuple[Mark, Mark]


class Taken(NamedTuple):
    """What a step took, in seconds.

    Attributes:
        computed: Before each collective is issued, since the one before; and at last, after all of them.
        wire: Of each collective, from when it is issued until the runner has noticed that it is complete.
        exposed: Of each collective: what the runner has waited for it with nothing else to do.
    """

    computed: list[float]
    wire: list[float]
    exposed: list[float]

    @property
    def encode_seconds(self) -> float:
        """All that is computed before the last collective is issued."""
        return sum(self.computed[:-1])

    @property
    def decode_seconds(self) -> float:
        """All that is computed after that."""
        return self.computed[-1]

    @property
    def exposed_seconds(self) -> float:
        """What was waited for."""
        return sum(self.exposed)


class Meter:
    """Measures a step at a time. See `Observer`, which it is as far as an engine's runner needs it to be."""

    def __init__(self) -> None:
        self.begins()

    def begins(self) -> None:
        """A step begins; the last one is forgotten."""
        self._computed: list[list[Span]] = [[]]  # a list for each collective, before it is issued, and one for the rest
        self._issued: dict[int, Mark] = {}
        self._waited: dict[int, Span] = {}
        self._stream: torch.cuda.Stream | None = None

    def computes(self, segment: Segment, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """A segment is computed in the block."""
        return _Timed(self._computed[-1], stream)

    def launches(self, collective: Collective, stream: torch.cuda.Stream | None) -> None:
        """A collective is being issued."""
        self._issued[collective.index] = _mark(stream)
        self._computed.append([])

    def waits(self, collective: Collective, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """A collective is waited for in the block."""
        self._stream = stream
        return _Waited(self._waited, collective.index, stream)

    def taken(self, collectives: int) -> Taken:
        """What the last step took, which had so many collectives. On CUDA it waits for the device."""
        if self._stream is not None:
            self._stream.synchronize()
        waited = [self._waited.get(index) for index in range(collectives)]
        return Taken(
            [sum(map(_seconds, spans)) for spans in self._computed],
            [0.0 if span is None else _seconds((self._issued[i], span[1])) for i, span in enumerate(waited)],
            [0.0 if span is None else _seconds(span) for span in waited],
        )


class _Timed:
    def __init__(self, spans: list[Span], stream: torch.cuda.Stream | None) -> None:
        self._spans, self._stream = spans, stream

    def __enter__(self) -> None:
        self._begun = _mark(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spans.append((self._begun, _mark(self._stream)))


class _Waited(_Timed):
    def __init__(self, waited: dict[int, Span], index: int, stream: torch.cuda.Stream | None) -> None:
        super().__init__([], stream)
        self._waited, self._index = waited, index

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waited[self._index] = self._begun, _mark(self._stream)


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
