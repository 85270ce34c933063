"""Orthonormal bases of tall, skinny matrices, and unit vectors: never NaN for finite input.

The small parts (norms, Gram matrices, triangular factors) are computed for all matrices at once, whatever their numbers
of rows: matrices are stored one below the other, and sums over the rows of each are sums over segments.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_segment_reduce: Any = torch.segment_reduce


def orthogonalize(p: Tensor, method: str, epsilon: float) -> Tensor:
    """Return an orthonormal basis of the columns of `p: [..., rows, rank]`, with rank <= rows; see `powersgd`."""
    if method == "qr":
        q, _ = torch.linalg.qr(p)
        return q
    return _gram_schmidt(p, epsilon) if method == "gram_schmidt" else orthogonalize_all([[p]], epsilon, p.dtype)[0]


def orthogonalize_all(groups: Sequence[Sequence[Tensor]], epsilon: float, dtype: torch.dtype) -> list[Tensor]:
    """Return orthonormal bases of the columns of matrices of `groups`, in a fixed number of operations.

    It factorizes the Gram matrices twice by Cholesky, in double precision (Fukaya et al., "CholeskyQR2", ScalA 2014),
    so that a condition number of 1e6 leaves 1e-12 of the orthogonality. Epsilon squared (for columns of unit norm) is
    added to the diagonals. It makes a column that depends on the others short instead of arbitrary, and short columns
    become zero. The matrices of a group have one shape, `[rows, rank]`; all have one rank, dtype and device. Bases have
    `dtype`, and those of a group are one tensor, `[count, rows, rank]`, or `[rows, rank]` if it is one. It is a view.
    """
    rank = groups[0][0].shape[1]
    # Inductor (torch 2.13) fuses products of rank 1 with slices of their rows, and drops the rows after the last
    # whole block (`try_loop_split` in its codegen/cpp.py assumes that blocks divide the rows).
    size = 1 if rank == 1 else max(_BLOCK, 1 << (rank - 1).bit_length())
    blocks: list[int] = []
    parts: list[Tensor] = []
    zeros: dict[int, Tensor] = {}
    for group in groups:
        rows = group[0].shape[0]
        blocks += [-(-rows // size)] * len(group)
        missing = -rows % size
        if missing and missing not in zeros:
            zeros[missing] = group[0].new_zeros((missing, rank))
        for matrix in group:
            parts += [matrix, zeros[missing]] if missing else [matrix]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    x = torch.cat(parts).to(wide).reshape(-1, size, rank)  # x: [blocks, size, rank]
    owners = torch.repeat_interleave(torch.tensor(blocks, device=x.device), output_size=sum(blocks))
    if dtype in (torch.float64, torch.complex128):  # squares of narrower dtypes neither vanish nor overflow in float64
        largest = _per_segment("max", x.abs().amax(1), blocks)  # [matrices, rank]
        x = x / largest.clamp(min=torch.finfo(torch.float64).tiny)[owners].unsqueeze(1)
    eye = torch.eye(rank, dtype=wide, device=x.device)
    for added in (max(epsilon**2, _TINY), _ROUNDING):
        gram = _per_segment("sum", (x.mH @ x).flatten(1), blocks).unflatten(1, (rank, rank))
        factor, _ = torch.linalg.cholesky_ex(torch.addcmul(eye * _NOTHING, gram, eye * added + 1))
        inverse = torch.linalg.solve_triangular(factor.mH, eye.expand_as(gram), upper=True)
        if added != _ROUNDING:  # the second time short columns are zero, and others are far from dependent
            # Otherwise the column's part orthogonal to earlier columns was at most the number added to the diagonal.
            # (The diagonal is in a form that Inductor compiles without a warning.)
            is_long = (inverse.mH @ gram @ inverse).flatten(1)[:, :: rank + 1].real > 0.5  # False for NaN
            inverse = torch.where(is_long.unsqueeze(-2), inverse, 0)
        x = x @ inverse[owners]
    padded = [-(-group[0].shape[0] // size) * size for group in groups]
    of_groups = x.reshape(-1, rank).to(dtype).split([len(g) * rows for g, rows in zip(groups, padded, strict=True)])
    found: list[Tensor] = []
    for group, rows, bases in zip(groups, padded, of_groups, strict=True):
        several = bases.unflatten(0, (len(group), rows)) if len(group) > 1 else bases
        found.append(several.narrow(-2, 0, group[0].shape[0]))
    return found


_BLOCK = 32  # rows of a matrix that are summed together
_TINY, _ROUNDING = 1e-30, 1e-14  # additions to squares of columns' norms, relative: the least, and against rounding
_NOTHING = 1e-280  # and absolute


def unit_rows(q: Tensor, widths: Sequence[int], fallback: Tensor) -> Tensor:
    """Return matrices of `widths` side by side, `[rank, columns]`, with each row of each scaled to unit norm.

    Zero and non-finite rows are replaced by those of `fallback`.
    """
    sizes = [*widths] * q.shape[0]
    owners = torch.repeat_interleave(torch.tensor(sizes, device=q.device), output_size=q.numel())
    if q.dtype in (torch.float64, torch.complex128):
        largest = _per_segment("max", q.abs().flatten(), sizes)
        q = q / largest.clamp(min=torch.finfo(torch.float64).tiny)[owners].view(q.shape)
    magnitude = (q.abs() if q.is_complex() else q).to(torch.float64).flatten()
    square = _per_segment("sum", magnitude * magnitude, sizes)
    norm = square * square.rsqrt()  # NaN instead of zero and infinity
    scaled = (q / norm[owners].view(q.shape)).to(q.dtype)
    return torch.where(scaled.isnan(), fallback, scaled)


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
