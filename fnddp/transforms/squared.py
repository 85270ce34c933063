"""Every leaf as one square matrix, and PowerSGD of whole buckets in that form."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.layout import in_format_of
from fnddp.core.sync import Exchange, State, Sync, registry, transform
from fnddp.core.tree import Leaves, Tree
from fnddp.transforms.bucketize import bucketize
from fnddp.transforms.powersgd import powersgd


@transform
class squared(Sync):
    """Lay every leaf out as one square matrix, padded with zeros at its end.

    `batched_powersgd` puts this between flat buckets and PowerSGD. The wrong choice for leaves that are matrices
    already: rows and columns lose their meaning, and with it their low rank.

    Args:
        inner: The pipeline of the `[side, side]` matrices, side = ceil(sqrt(elements)).

    >>> from fnddp import allreduce
    >>> squared(allreduce)({"flat": torch.arange(3.)}, ())[0]
    {'flat': tensor([0., 1., 2.])}
    """

    inner: Sync

    wraps_skipping: ClassVar[bool] = True

    def init(self, grads: Tree) -> State:
        return self.inner.init(tree.map_leaves(lambda leaf: leaf.detach().new_empty((_side(leaf), _side(leaf))), grads))

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        squares = {path: _to_square(leaf) for path, leaf in leaves.items()}
        inner = self.inner.exchange(squares, state)
        return inner.decoded(lambda squares: {path: _from_square(each, leaves[path]) for path, each in squares.items()})


def _side(leaf: Tensor) -> int:
    root = math.isqrt(leaf.numel())
    return root if root * root == leaf.numel() else root + 1


def _to_square(leaf: Tensor) -> Tensor:
    side = _side(leaf)
    flat = leaf.reshape(-1)
    return torch.cat([flat, flat.new_zeros(side * side - leaf.numel())]).view(side, side)


def _from_square(square: Tensor, like: Tensor) -> Tensor:
    return in_format_of(like, square.reshape(-1)[: like.numel()].view(like.shape))


def batched_powersgd(
    inner: Sync,
    rank: int = 1,
    *,
    cap_mb: float = 25,
    first_cap_mb: float = 1,
    warm_start: bool = True,
    orthogonalization: str = "cholesky",
    epsilon: float = 1e-6,
    seed: int = 0,
) -> Sync:
    """PowerSGD of each flattened bucket as one square matrix: torch's `batched_powerSGD_hook`.

    Faster than `powersgd` (two products a bucket), usually much less accurate: bucketing destroys the row and column
    structure that low rank lives on. Consider `powersgd` first, and this only where rank 1 is good enough.

    Args:
        inner: The pipeline of the factors.
        rank: Columns of P and Q.
        cap_mb, first_cap_mb: Bucket sizes in MiB, see `bucketize`.
        warm_start, orthogonalization, epsilon, seed: See `powersgd`.

    >>> from fnddp import allreduce
    >>> batched_powersgd(allreduce, rank=2)
    bucketize(squared(powersgd(allreduce, rank=2, min_compression_rate=0)))
    """
    low_rank = powersgd(
        inner,
        rank=rank,
        warm_start=warm_start,
        min_compression_rate=0,
        orthogonalization=orthogonalization,
        epsilon=epsilon,
        seed=seed,
    )
    return bucketize(squared(low_rank), cap_mb=cap_mb, first_cap_mb=first_cap_mb)


registry.add("batched_powersgd", batched_powersgd)
