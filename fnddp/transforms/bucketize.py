"""Leaves in another layout: in flat buffers, or as square matrices."""

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.buckets import MB, assign_buckets
from fnddp.core.layout import in_format_of
from fnddp.core.options import POSITIVE
from fnddp.core.sync import Exchange, State, Sync, registry, transform
from fnddp.core.tree import Leaves, Tree
from fnddp.transforms.powersgd import powersgd


@transform
class bucketize(Sync):
    """Lay out leaves of one dtype and device in flat one-dimensional buffers, and exchange the buffers.

    Buckets are filled in the reverse order of paths. This order is equal on all ranks and close to that of backward. A
    bucket is closed once it has reached its cap, as in torch's DDP. Its name is that of its first and last leaf, so
    inner state is keyed by leaf paths. Do not use it around `powersgd`, because that needs matrices: write
    `powersgd(bucketize(...))`.

    The caps set the input of the inner pipeline, such as a codec's blocks; plans join messages in buckets of their own
    (`bucket_cap_mb`).

    Args:
        cap_mb: Size at which a bucket is closed, in MiB.
        first_cap_mb: The same for the first bucket of each dtype and device: small, so that its exchange starts early.

    Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3; torch's `compute_bucket_assignment_by_size`.

    >>> from fnddp import allreduce
    >>> grads = {"a": torch.ones(3), "b": torch.ones(2, 2), "c": torch.ones(2, dtype=torch.float64)}
    >>> bucketize(allreduce).buckets(grads)
    {'c': ['c'], 'b..a': ['b', 'a']}
    """

    inner: Sync
    cap_mb: float = 25
    first_cap_mb: float = 1

    wraps_skipping: ClassVar[bool] = True
    limits: ClassVar = {"cap_mb": POSITIVE, "first_cap_mb": POSITIVE}

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        flat: Leaves = {}
        for name, paths in self.buckets(leaves).items():
            flat[name] = leaves[paths[0]].detach().new_empty(sum(leaves[path].numel() for path in paths))
        return self.inner.init(flat)

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        buckets = self.buckets(leaves)
        flat = {name: torch.cat([leaves[path].reshape(-1) for path in paths]) for name, paths in buckets.items()}

        def unpack(flat: Leaves) -> Leaves:
            parts: Leaves = {}
            for name, each in flat.items():
                pieces = each.split([leaves[path].numel() for path in buckets[name]])
                for path, piece in zip(buckets[name], pieces, strict=True):
                    parts[path] = in_format_of(leaves[path], piece.view(leaves[path].shape))
            return {path: parts[path] for path in leaves if path in parts}

        return self.inner.exchange(flat, state).decoded(unpack)

    def buckets(self, leaves: Leaves) -> dict[str, list[str]]:
        """Return leaf paths by bucket, in the order in which the buffer holds them; values are not read."""
        nbytes: dict[tuple[torch.dtype, torch.device], dict[str, int]] = {}
        for path, leaf in reversed(tree.ordered(leaves).items()):
            nbytes.setdefault((leaf.dtype, leaf.device), {})[path] = leaf.numel() * leaf.element_size()
        caps = int(self.first_cap_mb * MB), int(self.cap_mb * MB)
        groups: list[list[str]] = []
        for alike in nbytes.values():
            of_number: dict[int, list[str]] = {}
            for path, number in assign_buckets(alike, caps).items():
                of_number.setdefault(number, []).append(path)
            groups += of_number.values()
        return {paths[0] if len(paths) == 1 else f"{paths[0]}..{paths[-1]}": paths for paths in groups}


@transform
class squared(Sync):
    """Lay every leaf out as one square matrix, padded with zeros at its end.

    `batched_powersgd` puts this between flat buckets and PowerSGD. The wrong choice for leaves that are already
    matrices: rows and columns are mixed, and their low rank is lost.

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
    orthogonalization: Literal["cholesky", "qr", "gram_schmidt"] = "cholesky",
    epsilon: float = 1e-6,
    seed: int = 0,
) -> Sync:
    """Return `powersgd` of each flattened bucket as one square matrix: torch's `batched_powerSGD_hook`.

    Faster than `powersgd` (two products a bucket), but usually much less accurate, because bucketing destroys the
    low-rank structure of rows and columns. Try `powersgd` first; use this one only where rank 1 is good enough.

    Args:
        inner: The pipeline of the factors.
        rank: Number of columns of P and Q.
        cap_mb, first_cap_mb: See `bucketize`.
        warm_start, orthogonalization, epsilon, seed: See `powersgd`.

    >>> from fnddp import allreduce
    >>> batched_powersgd(allreduce, rank=2)
    bucketize(squared(powersgd(allreduce, rank=2, min_compression_rate=0)))
    """
    low_rank = powersgd(inner, rank, warm_start, 0, orthogonalization, epsilon, seed)
    return bucketize(squared(low_rank), cap_mb=cap_mb, first_cap_mb=first_cap_mb)


registry.add("batched_powersgd", batched_powersgd)
