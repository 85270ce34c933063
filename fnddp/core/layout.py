"""Tensors as they travel: dense, row-major, real. What a rank sends never depends on its strides."""

import torch
from torch import Tensor

from fnddp.torch_private import is_batching


def to_wire(leaf: Tensor) -> Tensor:
    """`leaf` as a contiguous real tensor in logical order: `[...]`, or `[..., 2]` for a complex leaf.

    Ranks may hold the same parameter in different memory formats, so the order on the wire is always the logical one.
    """
    leaf = leaf.resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(leaf) if leaf.is_complex() else leaf


def from_wire(wire: Tensor, like: Tensor) -> Tensor:
    """The inverse of `to_wire`: dtype family, shape and memory format (contiguous or channels last) of `like`."""
    leaf = as_complex(wire) if like.is_complex() else wire
    return in_format_of(like, leaf.reshape(like.shape))


def as_complex(pairs: Tensor) -> Tensor:
    """Complex numbers from `[..., 2]`, on the same memory where it can be."""
    # Under vmap, rows of an odd length (cut from a padded one) do not lie as pairs, and cannot be seen to.
    return torch.complex(*pairs.unbind(-1)) if is_batching() else torch.view_as_complex(pairs)


def in_format_of(like: Tensor, leaf: Tensor) -> Tensor:
    """`leaf` in the memory format of `like`, copied only if it has another."""
    if like.ndim == 4 and not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last):
        return leaf.contiguous(memory_format=torch.channels_last)
    if like.ndim == 5 and not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last_3d):
        return leaf.contiguous(memory_format=torch.channels_last_3d)
    return leaf
