"""Detect NaN and infinity in a step, keep memory from before it, and mark means that must not be applied."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fnddp.core.tree import is_inexact
from fnddp.device import Device
from fnddp.kernels.constants import on_device
from fnddp.kernels.keep import KEEP
from fnddp.torch_private import FOREACH

aten: Any = torch.ops.aten


def has_nonfinite(tensors: Iterable[Tensor], device: Device) -> Tensor | bool:
    """Return whether an element of `tensors` is infinite or NaN. On an accelerator the result is a scalar there."""
    some = [_real(tensor) for tensor in tensors if tensor.numel() and is_inexact(tensor)]
    if not some:
        return False
    if not device.is_asynchronous:
        return not all(math.isfinite(each) for tensor in some for each in tensor.aminmax())  # NaN propagates
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in some) else torch.float32
    largest = some[0].new_empty(len(some), dtype=wide)
    for tensor, place in zip(some, largest, strict=True):
        torch.linalg.vector_norm(tensor, math.inf, dtype=wide, out=place)
    return (largest * 0).any()  # NaN propagates and is true; infinity * 0 is NaN


def _real(tensor: Tensor) -> Tensor:
    """Return a real tensor, of a dtype with a minimum, that has NaN or infinity where `tensor` has."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.itemsize > 1 else tensor.float()


def kept(old: Sequence[Any], new: Sequence[Any], found: Tensor | bool) -> list[Any]:
    """Return `old` if `found` is true, otherwise `new`. If only a device knows that, ints are always those of `new`.

    >>> kept([torch.ones(1), 3], [torch.zeros(1), 4], torch.tensor(True))
    [tensor([1.]), 4]
    """
    if isinstance(found, bool):
        return list(old if found else new)
    befores, afters = ([each for each in of if isinstance(each, Tensor)] for of in (old, new))
    tensors = iter(KEEP(befores, afters, found))
    return [next(tensors) if isinstance(part, Tensor) else part for part in new]


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
        nan, one = on_device("spoil", lambda: (math.nan, 1.0), dtype, some[0].device)
        factor = torch.where(torch.as_tensor(found, device=some[0].device), nan, one)
        FOREACH[aten.mul.Tensor][1](some, factor)
