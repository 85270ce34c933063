"""Tensors as they are sent: dense, row-major, real. The payload of a rank never depends on its strides."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fnddp.torch_private import is_batching


def to_wire(leaf: Tensor) -> Tensor:
    """Return `leaf` as a contiguous real tensor in logical order: `[...]`, or `[..., 2]` for a complex leaf.

    Ranks may hold the same parameter in different memory formats.
    """
    leaf = leaf.resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(leaf) if leaf.is_complex() else leaf


def size_of(leaf: Tensor) -> int:
    """Return the number of elements of `to_wire(leaf)`."""
    return leaf.numel() * (2 if leaf.is_complex() else 1)


def from_wire(wire: Tensor, like: Tensor) -> Tensor:
    """Return the inverse of `to_wire`, with shape and memory format (contiguous or channels last) of `like`."""
    leaf = as_complex(wire) if like.is_complex() else wire
    return in_format_of(like, leaf.reshape(like.shape))


def as_complex(pairs: Tensor) -> Tensor:
    """Return complex numbers from `[..., 2]`, as a view where possible."""
    # Under vmap, rows of an odd length (cut from a padded one) may not be stored as pairs, and strides do not show it.
    return torch.complex(*pairs.unbind(-1)) if is_batching() else torch.view_as_complex(pairs)


def in_rows(x: Tensor, n: int) -> Tensor:
    """Return `x` in `n` parts of its first dimension, the last one padded with zeros: `[n, ceil(size / n), ...]`."""
    missing = -x.shape[0] % n
    return (pad(x, (0, 0) * (x.ndim - 1) + (0, missing)) if missing else x).unflatten(0, (n, -1))


def in_format_of(like: Tensor, leaf: Tensor) -> Tensor:
    """Return `leaf` in the memory format of `like`, copied only if it has another."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(like.ndim)
    if last is None or like.is_contiguous() or not like.is_contiguous(memory_format=last):
        return leaf
    return leaf.contiguous(memory_format=last)
