"""An operator that keeps memory as it was in a step with NaN or infinity: one operation for many tensors of a plan.

Where the next value is already in its place, the kernel only reads a flag on the device, unless that is set.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fnddp.device import device_of
from fnddp.kernels.operator import list_operator, works


def _like(old: Sequence[Tensor], new: Sequence[Tensor], found: Tensor) -> list[Tensor]:
    return list(map(torch.empty_like, new))


def _select(old: Sequence[Tensor], new: Sequence[Tensor], found: Tensor, *, out: Sequence[Tensor]) -> None:
    """Write `old` to `out` if the scalar `found` is true, otherwise `new`. `out` may be either of them."""
    for before, after, to in zip(old, new, out, strict=True):
        torch.where(found, before, after, out=to)


def _select_by_kernel(old: Sequence[Tensor], new: Sequence[Tensor], found: Tensor, *, out: Sequence[Tensor]) -> None:
    with device_of(found.device).selected():
        if not (_works(found.device) and _run(old, new, found, out)):
            _select(old, new, found, out=out)


def _run(old: Sequence[Tensor], new: Sequence[Tensor], found: Tensor, out: Sequence[Tensor]) -> bool:
    from fnddp.kernels import copies  # needs Triton

    return not out or copies.run(old, new, found, out)


@cache
def _works(device: torch.device) -> bool:
    return works("the kernel that keeps memory", device, lambda: samples(device))


def samples(device: torch.device) -> Iterator[tuple[Any, Any]]:
    """Yield results of the kernel and of the reference, in new memory and over each argument; None without a kernel."""
    for is_old, place in ((is_old, place) for is_old in (False, True) for place in (None, 0, 1)):
        halves = torch.arange(10000, device=device).split(5000)
        old, new = ([x, x[:600].clone().view(30, 20).mT[:, ::2]] for x in halves)
        found, expected = torch.tensor(is_old, device=device), [x.clone() for x in (old if is_old else new)]
        out = _like(old, new, found) if place is None else (old, new)[place]
        yield out if _run(old, new, found, out) else None, expected


KEEP, KEEP_INTO = list_operator("keep", "Tensor[] old, Tensor[] new, Tensor found", _like, _select, _select_by_kernel)
