"""Orthonormal bases of tall, skinny matrices, and unit vectors: never NaN for finite input.

The small parts (norms, Gram matrices, triangular factors) are computed for all matrices at once, whatever their numbers
of rows: matrices are stored one below the other, and sums over the rows of each are sums over segments.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

METHODS = ("cholesky", "qr", "gram_schmidt")

_segment_reduce: Any = torch.segment_reduce


def orthogonalize(p: Tensor, method: str, epsilon: float) -> Tensor:
    """Return an orthonormal basis of the columns of `p: [..., rows, rank]`, with rank <= rows; see `powersgd`."""
    if method == "qr":
        q, _ = torch.linalg.qr(p)
        return q
    return _gram_schmidt(p, epsilon) if method == "gram_schmidt" else orthogonalize_all([p], epsilon, p.dtype)[0]


def orthogonalize_all(matrices: Sequence[Tensor], epsilon: float, dtype: torch.dtype) -> list[Tensor]:
    """Return orthonormal bases of the columns of all `matrices`, in a fixed number of operations.

    It factorizes the Gram matrices twice by Cholesky, in double precision (Fukaya et al., "CholeskyQR2", ScalA 2014),
    so that a condition number of 1e6 leaves 1e-12 of the orthogonality. Epsilon squared (for columns of unit norm) is
    added to the diagonals. It makes a column that depends on the others short instead of arbitrary, and short columns
    become zero. The matrices, `[rows, rank]` with any rows, have one rank, dtype and device; bases have `dtype`.
    """
    rank = matrices[0].shape[1]
    # Inductor (torch 2.13) fuses products of rank 1 with slices of their rows, and drops the rows after the last
    # whole block (`try_loop_split` in its codegen/cpp.py assumes that blocks divide the rows).
    size = 1 if rank == 1 else max(_BLOCK, 1 << (rank - 1).bit_length())
    blocks = [-(-matrix.shape[0] // size) for matrix in matrices]
    parts: list[Tensor] = []
    zeros: dict[int, Tensor] = {}
    positions: list[int] = []  # of the matrices among the parts; the other parts pad blocks
    for matrix in matrices:
        positions.append(len(parts))
        parts.append(matrix)
        missing = -matrix.shape[0] % size
        if missing:
            if missing not in zeros:
                zeros[missing] = matrix.new_zeros((missing, rank))
            parts.append(zeros[missing])
    wide = torch.complex128 if dtype.is_complex else torch.float64
    x = torch.cat(parts).to(wide).reshape(-1, size, rank)  # x: [blocks, size, rank]
    owners = torch.repeat_interleave(torch.tensor(blocks, device=x.device), output_size=sum(blocks))
    if dtype in (torch.float64, torch.complex128):  # squares of narrower dtypes neither vanish nor overflow in float64
        largest = _per_segment("max", x.abs().amax(1), blocks)  # [matrices, rank]
        x = x / largest.clamp(min=torch.finfo(torch.float64).tiny)[owners].unsqueeze(1)
    eye = torch.eye(rank, dtype=wide, device=x.device)
    for added in (epsilon**2, 0.0):
        gram = _per_segment("sum", (x.mH @ x).flatten(1), blocks).unflatten(1, (rank, rank))
        x = x @ _inverse_factor(gram, eye, max(added, _TINY))[owners]
    pieces = x.reshape(-1, rank).to(dtype).split([part.shape[0] for part in parts])
    return [pieces[position] for position in positions]


_BLOCK = 32  # rows of a matrix that are summed together
_TINY, _NOTHING = 1e-30, 1e-280  # least addition to squares of unit columns, and least divisor


def _inverse_factor(gram: Tensor, eye: Tensor, added: float) -> Tensor:
    """Return factors that, multiplied from the right, make columns of matrices with these Gram matrices orthonormal."""
    scale = _diagonal(gram).clamp(min=_NOTHING).rsqrt()  # one over the columns' norms: [matrices, rank]
    unit = gram * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    factor, _ = torch.linalg.cholesky_ex(torch.add(unit, eye, alpha=added))
    inverse = torch.linalg.solve_triangular(factor.mH, eye.expand_as(gram), upper=True) * scale.unsqueeze(-1)
    # This short: the column's part orthogonal to earlier columns was at most the number added to the diagonal.
    is_short = (_diagonal(inverse.mH @ gram @ inverse) > 0.5).logical_not()
    return inverse.masked_fill(is_short.unsqueeze(-2), 0)


def _diagonal(matrices: Tensor) -> Tensor:
    return matrices.flatten(1)[:, :: matrices.shape[-1] + 1].real  # a form that Inductor compiles without a warning


def unit_rows(q: Tensor, widths: Sequence[int], fallback: Tensor) -> Tensor:
    """Return matrices of `widths` side by side, `[rank, columns]`, with each row of each scaled to unit norm.

    Zero and non-finite rows are replaced by those of `fallback`.
    """
    sizes = [*widths] * q.shape[0]
    owners = torch.repeat_interleave(torch.tensor(sizes, device=q.device), output_size=q.numel())
    if q.dtype in (torch.float64, torch.complex128):
        largest = _per_segment("max", q.abs().flatten(), sizes)
        q = q / largest.clamp(min=torch.finfo(torch.float64).tiny)[owners].view(q.shape)
    magnitude = q.abs().to(torch.float64).flatten()
    norm = _per_segment("sum", magnitude * magnitude, sizes).sqrt()
    is_good = (norm > 0) & (norm < float("inf"))
    inverse = norm.clamp(min=_NOTHING).reciprocal()
    scaled = (q * inverse[owners].view(q.shape)).to(q.dtype)
    return torch.where(is_good[owners].view(q.shape), scaled, fallback)


def _per_segment(how: str, x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the sum or the largest of the rows of each segment of `x`. In a fixed order, unlike a scatter on CUDA."""
    if x.is_complex():
        return torch.view_as_complex(_per_segment(how, torch.view_as_real(x), sizes))
    return _segment_reduce(x, how, lengths=torch.tensor(sizes, device=x.device), axis=0, unsafe=True)


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


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))
