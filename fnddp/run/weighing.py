"""The weight of a step: told to the other ranks while forward, or the start of backward, runs."""

from collections.abc import Sequence

import torch

from fnddp.wire.protocol import CollectiveError, Elastic, Wire, waited
from fnddp.wire.weights import scale_of


class Weighing:
    """What the ranks' weights make of this rank's.

    Args:
        weight: How much this rank's gradients count: its samples or tokens.
        wire: Who carries it.
        groups: The process groups that the pipeline reduces over.
        device: Where their payloads live.
    """

    def __init__(self, weight: float, wire: Wire, groups: Sequence[str | None], device: torch.device) -> None:
        self._weight, self._wire = float(weight), wire
        self._scale: float | None = None
        group = groups[0] if groups else None
        self._is_alone = wire.size(group) == 1
        if not self._is_alone:
            flags = torch.tensor([self._weight], dtype=torch.float64, device=device)
            self._everyone, self._work = wire.vote(flags, group)

    def scale(self) -> float:
        """By what gradients are scaled. The first call waits.

        Raises:
            CollectiveError: Another rank has not told its weight.
            ValueError: On all ranks: all weights are zero, or one is no weight.
        """
        if self._scale is None:
            self._scale = scale_of(self._weight, self._told())
        return self._scale

    def _told(self) -> list[float]:
        if self._is_alone:
            return [self._weight]
        try:
            waited(self._work)
        except RuntimeError as error:
            if isinstance(self._wire, Elastic):  # the step is none, and its vote will say so
                self._wire.report(error)
                return [self._weight]
            raise CollectiveError(
                f"the ranks could not tell each other their weights: {error}. All ranks of a step give one, or none "
                "does; or another rank has failed, see its own error"
            ) from error
        return self._everyone.flatten().tolist()
