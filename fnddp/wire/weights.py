"""Weights of ranks, stored even if they are invalid, so that all ranks can raise the same error."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

_NAMED = 8  # number of ranks that an error names
_LONGEST = 80  # characters of a rank's weight in errors
_HIGHEST = 1e300  # keeps the sum of all weights finite
_EXPECTED = f"weight: must be a number of at least 0 and at most {_HIGHEST:g}"


@dataclass(frozen=True)
class Weight:
    """A weight as a rank passed it.

    Attributes:
        number: The weight, finite and not negative; NaN if it is invalid or missing.
        text: The text for it in errors.
        tensor: The weight on the device, in a captured step. `number` is then 1.
    """

    number: float
    text: str
    tensor: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of(cls, given: Any, captures: bool = False) -> "Weight":
        """Return the weight of a rank that passed `given`: a number, a tensor of one element, or None if missing.

        With `captures`, it must be a tensor on the device, and its value is not checked.

        >>> Weight.of(3), Weight.of(-1), Weight.of(None)
        (Weight(number=3.0, text='3'), Weight(number=nan, text='-1'), Weight(number=nan, text='none'))
        """
        if isinstance(given, Weight):
            return given
        if captures:
            if not isinstance(given, Tensor) or given.is_cpu or given.numel() != 1:
                raise TypeError("weight: in a captured step it must be a tensor of one element on the device")
            return cls(1.0, "a tensor", given.detach().reshape(()))
        try:
            number = math.nan if given is None or isinstance(given, str | bytes) else float(given)
        except Exception:  # from any `__float__`: the step must fail on all ranks, not only here
            number = math.nan
        if 0 <= number <= _HIGHEST:
            return cls(number, repr(number).removesuffix(".0"))
        try:
            text = "none" if given is None else " ".join(repr(given).split())
        except Exception:  # for example an int with more digits than Python prints
            text = f"a {type(given).__name__}"
        return cls(math.nan, text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")

    @property
    def is_valid(self) -> bool:
        return not math.isnan(self.number)


def require_valid(weight: Weight) -> None:
    """Raise a ValueError unless this rank's `weight` is valid."""
    if not weight.is_valid:
        raise no_weight(weight)


def no_weight(weight: Weight) -> ValueError:
    return ValueError(f"{_EXPECTED}, but this rank gave {weight.text}")


def require_weights(everyone: Sequence[Weight]) -> None:
    """Raise a ValueError unless all weights, in rank order, are valid and at least one is positive."""
    invalid = [rank for rank, weight in enumerate(everyone) if not weight.is_valid]
    if invalid:
        raise ValueError(f"{_EXPECTED} on each rank, but {_said(everyone, invalid)}")
    if not any(weight.number for weight in everyone):
        raise no_mean()


class NoMeanError(ValueError):
    """All ranks gave the weight 0."""


def no_mean() -> NoMeanError:
    return NoMeanError("weight: all ranks gave 0, so there is no mean; skip this step on all ranks")


def _said(everyone: Sequence[Weight], ranks: Sequence[int]) -> str:
    said = [f"rank {rank} gave {everyone[rank].text}" for rank in ranks[:_NAMED]]
    more = [f"{len(ranks) - _NAMED} more ranks likewise"] if len(ranks) > _NAMED else []
    return ", ".join([*said, *more])
