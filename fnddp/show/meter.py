"""The times of a step, piece by piece: the host's on the CPU, those of the side stream on an accelerator."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NamedTuple, TypeAlias

from fnddp.device import Device, Mark, Stream

Piece: TypeAlias = Literal["computes", "launches", "waits"]


class Taken(NamedTuple):
    """The times of a step, in seconds.

    Attributes:
        segments: Time of segments between one collective's start and the next one's; last, of those after all starts.
        wire: Time of each collective, from its start until the step has noticed that it is complete.
        exposed: Time that the step has waited for each collective, with nothing else to do.
    """

    segments: list[list[float]]
    wire: list[float]
    exposed: list[float]

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
        """Time of all waiting."""
        return sum(self.exposed)


class Meter:
    """Timer of the pieces of the last step."""

    def __init__(self) -> None:
        self.begins()

    def begins(self) -> None:
        """Forget the last step."""
        self._pieces: list[tuple[Piece, int, Mark, Mark]] = []

    @contextmanager
    def times(
        self, named: AbstractContextManager[object], piece: Piece, index: int, device: Device, stream: Stream
    ) -> Generator[None]:
        """Time a segment, or the start of or wait for the collective of that index, in the profiler range `named`."""
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
