"""What hooks of gradients write to: the little that happens for each one."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Inbox:
    """Gradients that have arrived in a step, and that nobody has looked at.

    For each gradient only this runs: it is noted, and counted for the segment of the plan that waits for it. The one
    that completes a segment has the runner look at all of them.

    Args:
        segment_of: For each leaf the segment that first needs it.
        lacking: For each segment the number of leaves that it needs.
        device: If it is a CUDA device, the streams on which gradients arrive are noted, too.

    Attributes:
        noted: The positions of leaves among all, and their gradients.
        streams: Where those were made.
        lacking: For each segment the number of leaves that have not arrived.
    """

    __slots__ = ("_device", "_needed", "_segment_of", "lacking", "noted", "streams")

    def __init__(self, segment_of: Sequence[int], lacking: Sequence[int], device: torch.device | None) -> None:
        self._segment_of, self._needed, self._device = list(segment_of), list(lacking), device
        self.streams: set[torch.cuda.Stream] = set()
        self.noted: list[tuple[int, Tensor]] = []
        self.lacking: list[int] = []

    def clear(self) -> None:
        """Nothing has arrived."""
        self.noted, self.lacking = [], self._needed.copy()

    def put(self, position: int, grad: Tensor) -> bool:
        """Notes the gradient of the leaf at `position`. Returns whether a segment has all that it needs."""
        self.noted.append((position, grad))
        if self._device is not None:
            self.streams.add(torch.cuda.current_stream(self._device))
        segment = self._segment_of[position]
        self.lacking[segment] -= 1
        return not self.lacking[segment]
