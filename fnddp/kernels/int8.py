"""Residuals in int8, with a scale for each block; operators on accelerators, so that plans recognize them."""

import torch
from torch import Tensor

from fnddp.core import layout
from fnddp.core.opaque import define, shortened
from fnddp.kernels.constants import INT8_BLOCK
from fnddp.kernels.operator import takes_operators
from fnddp.torch_private import is_batching

LEVELS = 127  # of each sign


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return real `x` as int8 of the same shape, rounded to the nearest, and a scale for each block.

    >>> to_int8(torch.tensor([127.0, 1.4, -63.5]))
    (tensor([127,   1, -64], dtype=torch.int8), tensor([1.]))
    """
    return TO_INT8(x) if takes_operators(x) and not is_batching() else encoded(x)


def from_int8(q: Tensor, scale: Tensor) -> Tensor:
    """Return the numbers that `to_int8` encoded, after its rounding, in the dtype of `scale`."""
    return FROM_INT8(q, scale) if takes_operators(q) and not is_batching() else decoded(q, scale)


def blocks_of(numel: int) -> int:
    """Return the number of scales of a residual."""
    return max(1, -(-numel // INT8_BLOCK))


def encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of `to_int8` by PyTorch's operations."""
    blocks = layout.in_rows(x.reshape(-1) if x.numel() else x.new_zeros(1), blocks_of(x.numel()))
    largest = torch.maximum(blocks.amax(1), -blocks.amin(1))
    scale = torch.where(largest < LEVELS * torch.finfo(x.dtype).tiny, 0, largest / LEVELS)
    q = (blocks / torch.where(scale > 0, scale, 1).unsqueeze(1)).round().to(torch.int8)
    return shortened(q.reshape(-1), x.numel()).reshape(x.shape), scale


def decoded(q: Tensor, scale: Tensor) -> Tensor:
    """Return the result of `from_int8` by PyTorch's operations."""
    blocks = layout.in_rows(q.reshape(-1), scale.numel()).to(scale.dtype) * scale.unsqueeze(1)
    return shortened(blocks.reshape(-1), q.numel()).reshape(q.shape)


def _like_encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(blocks_of(x.numel()))


def _like_decoded(q: Tensor, scale: Tensor) -> Tensor:
    return scale.new_empty(q.shape)


TO_INT8 = define("to_int8", "(Tensor x) -> (Tensor, Tensor)", encoded, _like_encoded)
FROM_INT8 = define("from_int8", "(Tensor q, Tensor scale) -> Tensor", decoded, _like_decoded)
