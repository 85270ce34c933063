"""Weighted means of gradients.

A weighted mean is the plain mean of gradients that are scaled before anything else is done with them: by n w / W, with
n ranks, this rank's weight w, and the sum of all weights W. So the residual of a lossy pipeline is already weighted,
and is sent whatever the weight of the next step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_NAMED = 8  # ranks that an error names
_LONGEST = 80  # characters of a rank's weight in errors


@dataclass(frozen=True)
class Weight:
    """A weight as a rank gave it, valid or not, so that all ranks can raise the same error.

    Attributes:
        number: Finite and not negative; NaN if the rank gave no such number.
        text: Its name in errors.
    """

    number: float
    text: str

    @classmethod
    def of(cls, given: Any) -> "Weight":
        """Return the weight of a rank that gave `given`: a number, or a tensor of one element.

        >>> Weight.of(3), Weight.of(-1), Weight.of("a")
        (Weight(number=3.0, text='3'), Weight(number=nan, text='-1'), Weight(number=nan, text="'a'"))
        """
        if isinstance(given, Weight):
            return given
        try:
            number = math.nan if isinstance(given, str | bytes) else float(given)
        except Exception:  # of anybody's __float__: the step fails on all ranks, not on this one alone
            number = math.nan
        if number >= 0 and math.isfinite(number):
            return cls(number, repr(number).removesuffix(".0"))
        try:
            text = " ".join(repr(given).split())
        except Exception:  # such as of an int of more digits than Python writes
            text = f"a {type(given).__name__}"
        return cls(math.nan, text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


NO_WEIGHT = Weight(-1.0, "none")
"""The weight of a rank that gave none."""

FAILED = Weight(-2.0, "none, because it failed")
"""The weight of a rank that takes part in a step only to fail it."""


def require_weights(everyone: Sequence[Weight]) -> None:
    """Raise a ValueError unless each rank, of all in rank order, has given a valid weight."""
    invalid = [rank for rank, weight in enumerate(everyone) if math.isnan(weight.number)]
    if invalid:
        raise ValueError(f"weight: must be a number, finite and not negative, but {_said(everyone, invalid)}")
    without = [rank for rank, weight in enumerate(everyone) if weight == NO_WEIGHT]
    if without:
        with_one = [rank for rank in range(len(everyone)) if rank not in without]
        raise ValueError(
            f"weight: all ranks of a step give one, or none does, but {_said(everyone, with_one)}, and "
            f"{_said(everyone, without)}"
        )


def _said(everyone: Sequence[Weight], ranks: Sequence[int]) -> str:
    said = [f"rank {rank} gave {everyone[rank].text}" for rank in ranks[:_NAMED]]
    more = [f"{len(ranks) - _NAMED} more ranks likewise"] if len(ranks) > _NAMED else []
    return ", ".join([*said, *more])


def require_even(everyone: Sequence[Sequence[float]]) -> None:
    """Raise a ValueError unless the weights of each mesh, again and again, are those of the largest one.

    Experts see tokens of ranks of other meshes, too, whose weights a mesh of their own does not know.

    >>> require_even([[3.0, 1.0], [3.0, 1.0, 3.0, 1.0]])
    """
    largest = sorted(max(everyone, key=len, default=()))
    for mesh in everyone:
        if sorted(list(mesh) * (len(largest) // len(mesh))) != largest:
            raise ValueError(
                f"weight: the ranks of a mesh of {len(mesh)} gave {list(mesh)}, and those of the one of {len(largest)} "
                f"{largest}, in some order; ranks whose tokens go to the same experts must all give one weight, such "
                "as the number of tokens of all of them"
            )


def scale_of(weight: float, everyone: Sequence[float]) -> float:
    """Return the scale of the gradients of a rank with `weight`, among the valid weights of `everyone`.

    Raises:
        ValueError: On all ranks: all weights are zero.

    >>> scale_of(3.0, [1.0, 3.0]), scale_of(1e308, [1e308, 1e308])
    (1.5, 1.0)
    """
    highest = max(everyone)
    if highest == 0:
        raise ValueError(
            f"weight: all of {len(everyone)} ranks gave 0, so there is no mean; skip the step on all ranks"
        )
    down = 2.0**-64 if highest > 2.0**900 else 1.0  # a sum that is finite; exact, as any power of two
    return len(everyone) * (weight * down) / math.fsum(each * down for each in everyone)


def compiled_scale_of(weight: Tensor, everyone: Tensor) -> Tensor:
    """Return `scale_of` of float64 tensors, for torch.compile, with an assertion of torch in place of errors."""
    are_weights = (everyone >= 0).all() & (everyone > 0).any() & everyone.isfinite().all()
    torch.ops.aten._assert_async.msg(are_weights, "weight: one is negative or not finite, or all ranks gave 0")
    down = torch.where(everyone.max() > 2.0**900, 2.0**-64, 1.0)
    return everyone.shape[0] * (weight * down) / (everyone * down).sum()


def scaled(grad: Tensor, scale: float) -> Tensor:
    """Return `grad` times `scale`; zeros for scale 0, also of NaN: a mean over no tokens is 0 / 0."""
    if scale == 1:
        return grad
    return grad * scale if scale else torch.zeros_like(grad)
