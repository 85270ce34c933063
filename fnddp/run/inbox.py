"""What hooks of gradients write to: the little that happens for each one."""

from collections.abc import Sequence

import torch
from torch import Tensor

_MANY = 32


class Inbox:
    """Gradients that have arrived in a step, and that nobody has looked at.

    For each gradient only this runs: it is noted, and counted for the segment of the plan that waits for it. The one
    that completes a segment has the runner look at all of them. Whoever counts gradients alone notes them before that.

    Args:
        segment_of: For each leaf the segment that first needs it.
        lacking: For each segment the number of leaves that it needs.
        device: If it is a CUDA device, the streams on which gradients arrive are noted, too.
        is_polled: Whether segments wait for collectives, too.

    Attributes:
        is_polled: As given.
        noted: The positions of leaves among all, and their gradients.
        streams: Where those were made.
        is_open: Whether a step is.
        lacking: For each segment the number of leaves that have not been counted.
    """

    __slots__ = (
        "_device",
        "_needed",
        "_segment_of",
        "_since_polled",
        "is_open",
        "is_polled",
        "lacking",
        "noted",
        "streams",
    )

    def __init__(
        self, segment_of: Sequence[int], lacking: Sequence[int], device: torch.device | None, *, is_polled: bool
    ) -> None:
        self._segment_of, self._needed, self._device = list(segment_of), list(lacking), device
        self.is_polled = is_polled
        self.streams: set[torch.cuda.Stream] = set()
        self.close()

    def open(self) -> None:
        """A step begins: nothing has arrived."""
        self.noted: list[tuple[int, Tensor]] = []
        self.lacking = self._needed.copy()
        self._since_polled = 0
        self.is_open = True

    def close(self) -> None:
        """No step is open."""
        self.noted, self.lacking, self.is_open = [], [], False

    def put(self, position: int, grad: Tensor) -> bool:
        """Notes the gradient of the leaf at `position`. Returns whether it is time to look."""
        self.noted.append((position, grad))
        return self.count(position)

    def count(self, position: int) -> bool:
        """The gradient of the leaf at `position` is there, and will be noted. Returns whether it is time to look.

        That is when a segment has all that it needs, and now and then if collectives may complete one.
        """
        if self._device is not None:
            self.streams.add(torch.cuda.current_stream(self._device))
        segment = self._segment_of[position]
        self.lacking[segment] -= 1
        if not self.lacking[segment]:
            return True
        self._since_polled += 1
        return self.is_polled and not self._since_polled % _MANY

    def uncount(self, position: int) -> None:
        """The gradient of the leaf at `position` is not there yet after all."""
        self.lacking[self._segment_of[position]] += 1
