"""Weighted means: how often a rank's gradient counts.

A weighted mean is the plain mean of gradients that are scaled before anything else is done with them: by n w / W, with
n ranks, this rank's weight w, and the sum of all weights W. So what a lossy pipeline remembers of a gradient is already
weighted, and is sent whatever the weight of the next step.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def scale_of(weight: float, everyone: Sequence[float]) -> float:
    """By what a rank of `weight` scales its gradients.

    Args:
        weight: Its own.
        everyone: Those of all ranks, in rank order.

    Raises:
        ValueError: On all ranks: all weights are zero, or one is negative or not finite.

    >>> scale_of(3.0, [1.0, 3.0])
    1.5
    """
    wrong = [(rank, each) for rank, each in enumerate(everyone) if not (each >= 0 and math.isfinite(each))]
    if wrong:
        said = ", ".join([f"rank {rank} gave {each}" for rank, each in wrong])
        raise ValueError(f"weight: must be finite and not negative, but {said}")
    total = math.fsum(everyone)
    if total == 0:
        raise ValueError(
            f"weight: all of {len(everyone)} ranks gave 0, so there is no mean; skip the step on all ranks"
        )
    return len(everyone) * weight / total


def scaled(grad: Tensor, scale: float) -> Tensor:
    """`grad` times `scale`. What counts nothing may be no number: a mean over no tokens is 0 / 0."""
    if scale == 1:
        return grad
    return grad * scale if scale else torch.zeros_like(grad)
