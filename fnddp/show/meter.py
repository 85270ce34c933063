"""The times of a step, piece by piece: the host's on the CPU, those of the side stream on an accelerator."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NamedTuple, TypeAlias

from fnddp.device import Device, Mark, Stream

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
        self, named: AbstractContextManager[object], piece: Piece, index: int, device: Device, stream: Stream
    ) -> Generator[None]:
        """Time, within `named`, a segment, or the start of or the wait for the collective of that index."""
        with named:
            begun = device.mark(stream)
            yield
            self._pieces.append((piece, index, begun, device.mark(stream)))
        self._device = device

    def taken(self, collectives: int) -> Taken:
        """Return the times of the last step, which had so many collectives. It waits for the device."""
        segments, wire, exposed = [list[float]()], [0.0] * collectives, [0.0] * collectives
        issued: dict[int, Mark] = {}
        for piece, index, begin, end in self._pieces:
            if piece == "computes":
                segments[-1].append(self._device.seconds(begin, end))
            elif piece == "launches":
                issued[index] = begin
                segments.append([])
            else:
                wire[index], exposed[index] = self._device.seconds(issued[index], end), self._device.seconds(begin, end)
        return Taken(segments, wire, exposed)
