"""Detect NaN and infinity in a step, and mark means that must not be applied."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fnddp.core.tree import is_inexact
from fnddp.device import Device
from fnddp.torch_private import FOREACH

aten: Any = torch.ops.aten


def has_nonfinite(tensors: Iterable[Tensor], device: Device) -> Tensor | bool:
    """Return whether an element of `tensors` is infinite or NaN. On an accelerator the result is a scalar there."""
    extremes = [each for tensor in tensors if tensor.numel() for each in _real(tensor).aminmax()]  # NaN propagates
    if not extremes:
        return False
    if not device.is_asynchronous:
        return not all(map(math.isfinite, map(float, extremes)))
    return ~torch.stack([each.to(torch.float32) for each in extremes]).isfinite().all()


def _real(tensor: Tensor) -> Tensor:
    """Return a real tensor, of a dtype with a minimum, that has NaN or infinity where `tensor` has."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.itemsize > 1 else tensor.float()


def spoil(tensors: Iterable[Tensor], found: Tensor | bool) -> None:
    """Make the first element of each of `tensors` NaN if `found` is true; otherwise keep all bits unchanged.

    >>> mean = torch.ones(2)
    >>> spoil([mean], True)
    >>> mean
    tensor([nan, 1.])
    """
    firsts = defaultdict[torch.dtype, list[Tensor]](list)
    for tensor in tensors:
        if tensor.numel() and is_inexact(tensor):
            firsts[tensor.dtype].append(tensor.detach().as_strided((1,), (1,), tensor.storage_offset()))
    for dtype, some in firsts.items():
        factor = torch.where(torch.as_tensor(found, device=some[0].device), math.nan, 1.0)
        FOREACH[aten.mul.Tensor][1](some, factor.to(dtype))
