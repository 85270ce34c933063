"""Orthonormal bases of tall, skinny matrices, batched: never NaN for finite input."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Method: TypeAlias = Literal["qr", "gram_schmidt"]
METHODS = ("qr", "gram_schmidt")


def orthogonalize(p: Tensor, method: str, epsilon: float) -> Tensor:
    """An orthonormal basis of the columns of `p`.

    "qr" (Householder) completes the basis arbitrarily where columns are linearly dependent. "gram_schmidt" makes such
    columns zero: those whose norm, without the earlier columns' directions, is at most `epsilon` times what it was.

    Args:
        p: `[..., rows, rank]` with rank <= rows, float32, float64 or complex.
        method: "qr" or "gram_schmidt".
        epsilon: Relative; for "gram_schmidt" only. Higher drops more directions.
    """
    if method == "qr":
        q, _ = torch.linalg.qr(p)
        return q
    return _gram_schmidt(p, epsilon)


def _gram_schmidt(p: Tensor, epsilon: float) -> Tensor:
    basis = p[..., :0]
    for k in range(p.shape[-1]):
        column = p[..., k : k + 1]  # [..., rows, 1]
        # Scaled first, so that squares of tiny or huge entries neither vanish nor overflow.
        rest = column / _nonzero(column.abs().amax(dim=-2, keepdim=True))
        before = torch.linalg.vector_norm(rest, dim=-2, keepdim=True)
        for _ in range(2):  # twice is enough: once leaves the rounding error of a nearly dependent column
            rest = rest - basis @ (basis.mH @ rest)
        norm = torch.linalg.vector_norm(rest, dim=-2, keepdim=True)
        unit = torch.where(norm > epsilon * before, rest / _nonzero(norm), torch.zeros_like(rest))
        basis = torch.cat([basis, unit], dim=-1)
    return basis


def normalize_columns(q: Tensor, fallback: Tensor) -> Tensor:
    """The columns of `q` scaled to unit norm; a zero or non-finite column is replaced by that of `fallback`.

    Args:
        q: `[..., columns, rank]`.
        fallback: The same shape.
    """
    largest = q.abs().amax(dim=-2, keepdim=True)
    tiny = torch.finfo(largest.dtype).tiny
    # Scaled first, so that squares of tiny or huge entries neither vanish nor overflow.
    scaled = q / largest.clamp(min=tiny)
    unit = scaled / torch.linalg.vector_norm(scaled, dim=-2, keepdim=True).clamp(min=tiny)
    return torch.where((largest > 0) & (largest < float("inf")), unit, fallback)


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))
