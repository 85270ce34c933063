"""Detect NaN and infinity in a step, and restore the pipeline's memory if there are any."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fnddp.core.tree import is_inexact
from fnddp.device import Device, device_of
from fnddp.torch_private import FOREACH, foreach_copy

aten: Any = torch.ops.aten

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def unless(found: Tensor, before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """Return `after`, but replace its tensors by those of `before` if the scalar `found` is true. Bits are unchanged.

    On an accelerator a call costs more than a pass over a small tensor, so small tensors of one dtype are selected
    together, by operations on lists, and tensors that fill a storage, such as those of a stack, as one tensor.

    >>> unless(torch.tensor(True), [torch.ones(2), 3], [torch.full((2,), torch.nan), 4])
    [tensor([1., 1.]), 4]
    """
    chosen, small = list(after), defaultdict[torch.dtype, list[int]](list)
    sharing = defaultdict[Any, list[int]](list)
    for i, part in enumerate(after):
        if isinstance(part, Tensor):
            sharing[part.dtype, part.device, part.untyped_storage().data_ptr()].append(i)
    for places in sharing.values():
        if _fill_storage([after[i] for i in places]):
            _choose_storage(found, before, chosen, places)
            continue
        for i in places:
            part = after[i]
            # If strides differ, CUDA processes the tensors of a list one by one.
            is_alike = part.is_floating_point() and part.stride() == before[i].stride()
            if is_alike and part.device == found.device and part.nbytes <= device_of(part.device).light_bytes:
                small[part.dtype].append(i)
            else:
                chosen[i] = torch.where(found, before[i], part)
    for dtype, places in small.items():
        bits = BITS[dtype.itemsize]  # as integers: zero times the bits of a NaN is zero
        old, new = ([parts[i].view(bits) for i in places] for parts in (before, after))
        change = FOREACH[aten.sub.Tensor][0](old, new)
        FOREACH[aten.mul.Tensor][1](change, found.to(bits))
        FOREACH[aten.add.Tensor][1](change, new)
        for i, part in zip(places, change, strict=True):
            chosen[i] = part.view(dtype).data  # not a view, because a view would hold its base
    return chosen


def _fill_storage(tensors: list[Tensor]) -> bool:
    is_several = len(tensors) > 1 and tensors[0].is_floating_point()
    return is_several and sum(each.nbytes for each in tensors) == tensors[0].untyped_storage().nbytes()


def _choose_storage(found: Tensor, before: Sequence[Any], chosen: list[Any], places: list[int]) -> None:
    """Replace all tensors that fill a storage by those of `before` if `found` is true, in one operation."""
    new, old = ([parts[i] for i in places] for parts in (chosen, before))

    def like_new(memory: Tensor) -> list[Tensor]:
        return [memory.as_strided(part.shape, part.stride(), part.storage_offset()) for part in new]

    whole = new[0].as_strided((sum(part.numel() for part in new),), (1,), 0)
    kept = old[0].as_strided(whole.shape, (1,), 0) if _fill_storage(old) else torch.empty_like(whole)
    if any(a.data_ptr() != b.data_ptr() or a.stride() != b.stride() for a, b in zip(old, like_new(kept), strict=True)):
        kept = torch.empty_like(whole)
        foreach_copy(like_new(kept), old)
    for i, part in zip(places, like_new(torch.where(found, kept, whole)), strict=True):
        chosen[i] = part.data  # not a view, because a view would hold its base
