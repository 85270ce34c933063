"""Leaves as matrices with thin factors: which ones, and the small algebra for all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fnddp.core import random
from fnddp.core.buckets import BUCKET_CAPS, assign_buckets
from fnddp.core.layout import in_format_of
from fnddp.core.sync import Sync
from fnddp.core.tree import Leaves, is_inexact
from fnddp.transforms.orthogonalize import orthogonalize, orthogonalize_all, unit_rows


class LowRank(Sync):
    """A pipeline that sends factors of matrices over `inner`. Its fields are those of `powersgd`."""

    inner: Sync
    rank: int
    min_compression_rate: float
    orthogonalization: str
    epsilon: float
    seed: int

    def is_low_rank(self, leaf: Tensor) -> bool:
        if leaf.ndim < 2 or leaf.numel() == 0 or not is_inexact(leaf):
            return False
        n, m = matrix_shape(leaf)
        return (n + m) * self.rank_of(leaf) * self.min_compression_rate < n * m

    def rank_of(self, leaf: Tensor) -> int:
        return min(self.rank, *matrix_shape(leaf))

    def bases(self, leaves: Leaves, stacks: list[list[str]], factors: Leaves) -> Leaves:
        """Return orthonormal bases of the columns of each factor, `[size, rank]`."""
        found: Leaves = {}
        for paths in stacks:
            some = [factors[path] for path in paths]
            if self.orthogonalization == "cholesky":
                bases = orthogonalize_all(some, self.epsilon, compute_dtype(leaves[paths[0]].dtype))
            else:
                bases = [orthogonalize(compute(each), self.orthogonalization, self.epsilon) for each in some]
            found |= zip(paths, bases, strict=True)
        return found

    def stacks(self, leaves: Leaves) -> list[list[str]]:
        """Return paths of leaves whose small factors are computed together.

        No more than share a bucket of gradients, by default, since the others' factors are not there at that time.
        """
        buckets = assign_buckets({path: leaves[path].nbytes for path in reversed(leaves)}, BUCKET_CAPS)
        stacks: dict[object, list[str]] = {}
        for path, leaf in leaves.items():
            if self.is_low_rank(leaf):
                same = buckets[path], self.rank_of(leaf), leaf.dtype, leaf.device
                stacks.setdefault(same, []).append(path)
        return list(stacks.values())

    def draw(self, name: str, leaf: Tensor, step: int, size: int) -> Tensor:
        """Return random unit columns for a factor of `leaf`: `[size, rank]`."""
        like = leaf.detach().new_empty(0, dtype=compute_dtype(leaf.dtype))
        factor = random.normal((size, self.rank_of(leaf)), name=name, seed=self.seed, step=step, like=like)
        return factor / torch.linalg.vector_norm(factor, dim=0, keepdim=True)


def matrix_shape(leaf: Tensor) -> tuple[int, int]:
    return leaf.shape[0], leaf.numel() // leaf.shape[0]


def matrix(leaf: Tensor) -> Tensor:
    return compute(leaf).reshape(matrix_shape(leaf))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    # Half-precision factorizations do not exist on the CPU and lose too much anywhere.
    return torch.promote_types(dtype, torch.float32)


def compute(tensor: Tensor) -> Tensor:
    return tensor.to(compute_dtype(tensor.dtype))


def leaf_of(matrix: Tensor, like: Tensor) -> Tensor:
    return in_format_of(like, matrix.to(like.dtype).reshape(like.shape))


def rows_of(columns: list[Tensor]) -> Tensor:
    """Return the matrices transposed and side by side, in the same layout whatever theirs is."""
    return torch.cat([each.mH for each in columns], dim=1).resolve_conj()


def columns_of(rows: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Return the inverse of `rows_of`: views, except of complex numbers."""
    return [columns.resolve_conj() for columns in rows.mH.split(widths)]


def unit_columns(rows: Sequence[Tensor], fallback: Tensor) -> list[Tensor]:
    """Return factors for the next step, `[size, rank]` each, with unit columns; the fallback's where one is zero.

    Args:
        rows: Factors transposed, `[rank, size]` each.
        fallback: Others transposed and side by side, as `rows_of` makes them.
    """
    sizes = [each.shape[1] for each in rows]
    return columns_of(unit_rows(compute(torch.cat(list(rows), dim=1)), sizes, fallback=fallback), sizes)
