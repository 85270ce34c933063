"""The exchange of the ranks' weights in a step, which comes before all of its collectives."""

import math
from collections.abc import Sequence

import torch

from fnddp.wire.control import gather_over
from fnddp.wire.protocol import CollectiveError, Elastic, Wire, waited
from fnddp.wire.weights import FAILED, NO_WEIGHT, Weight, require_weights, scale_of


class Weighing:
    """An exchange of weights, started when it is made.

    Args:
        weight: How much this rank's gradients count: its samples or tokens; NO_WEIGHT or FAILED if it gave none.
        wire: What carries it.
        groups: The process groups that the pipeline reduces over.
        device: Where their payloads live.
    """

    def __init__(self, weight: Weight, wire: Wire, groups: Sequence[str | None], device: torch.device) -> None:
        self._weight, self._wire, self._device = weight, wire, device
        self._group = groups[0] if groups else None
        self._is_alone = wire.size(self._group) == 1
        if not self._is_alone:
            flags = torch.tensor([weight.number], dtype=torch.float64, device=device)
            self._everyone, self._work = wire.vote(flags, self._group)

    def scale(self) -> float | None:
        """Wait for all weights and return what gradients are scaled by, where `numbers` returns some.

        Raises:
            CollectiveError, ValueError: See `numbers`; all weights are zero.
        """
        numbers = self.numbers()
        return None if numbers is None else scale_of(self._weight.number, numbers)

    def numbers(self) -> list[float] | None:
        """Wait for all weights and return them, in rank order; None if no rank gave a weight.

        If a rank has failed it is None, too, and the vote reports it. (On CUDA, where ranks do not wait for that,
        it is a CollectiveError.)

        Raises:
            CollectiveError: A rank has died or left; the ranks are desynchronized.
            ValueError: On all ranks: one is invalid, or some ranks gave one and others none.
        """
        numbers = self._gathered()
        if FAILED.number in numbers:
            if self._device.type == "cuda":
                raise CollectiveError("another rank has failed in this step; see its own error")
            return None
        if all(number == NO_WEIGHT.number for number in numbers):
            return None
        if NO_WEIGHT.number in numbers or any(map(math.isnan, numbers)):
            raise refusal(self._weight, self._wire, self._group, self._device, is_alone=self._is_alone)
        return numbers

    def _gathered(self) -> list[float]:
        if self._is_alone:
            return [self._weight.number]
        try:
            waited(self._work)
        except RuntimeError as error:
            if isinstance(self._wire, Elastic):  # the step is none, and its vote will report it
                self._wire.report(error)
                return [NO_WEIGHT.number]
            raise CollectiveError(
                f"the ranks could not exchange their weights: {error}. Another rank has failed, left, or not called "
                "backward; see its own error"
            ) from error
        return self._everyone.flatten().tolist()


def refusal(
    weight: Weight, wire: Wire, group: str | None, device: torch.device, *, is_alone: bool = False
) -> ValueError:
    """Return the error that all ranks raise about their weights. Every rank of `group` must call it.

    Raises:
        CollectiveError: A rank has died or left.
    """
    try:
        everyone: list[Weight] = [weight] if is_alone else gather_over(wire, weight, group, device)
    except RuntimeError as error:
        raise CollectiveError(f"weight: ranks gave no valid ones, and could not name them: {error}") from error
    try:
        require_weights(everyone)
    except ValueError as error:
        return error
    raise AssertionError("all ranks gave a weight")
