"""Flat buffers: few large collectives instead of many small ones."""

from typing import NamedTuple

import torch
from torch import Tensor

from fnddp import tree
from fnddp.layout import in_format_of
from fnddp.sync import Exchange, State, Sync, transform
from fnddp.tree import Leaves, Tree

MB = 2**20


class Bucket(NamedTuple):
    """`name`: the first and last leaf path; `paths`: its leaves, in the order in which they lie in the buffer."""

    name: str
    paths: list[str]


@transform
class bucketize(Sync):
    """Lays leaves of one dtype and device out in flat one-dimensional buffers and exchanges those.

    Buckets are filled in reverse registration order, the order in which backward produces gradients, and closed once
    they hold the cap, as torch's DDP does. A bucket is named by its first and last leaf, so inner state is keyed by
    leaf paths. The wrong choice around `powersgd`, which needs matrices: put it inside, `powersgd(bucketize(...))`.

    All ranks must hold the leaves in the same order; `fnddp.verify` checks that.

    Args:
        inner: What carries the buffers.
        cap_mb: Size at which a bucket is closed, in MiB.
        first_cap_mb: The same for the first bucket of each dtype and device: small, so that its exchange starts early.

    Raises:
        ValueError: A cap is not positive.

    Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3; torch's `compute_bucket_assignment_by_size`.

    >>> from fnddp import allreduce
    >>> grads = {"a": torch.ones(3), "b": torch.ones(2, 2), "c": torch.ones(2, dtype=torch.float64)}
    >>> [bucket.paths for bucket in assign_buckets(grads, cap=2**20, first_cap=2**20)]
    [['c'], ['b', 'a']]
    >>> bucketize(allreduce)(grads, ())[0]["b"]
    tensor([[1., 1.],
            [1., 1.]])
    """

    inner: Sync
    cap_mb: float = 25
    first_cap_mb: float = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cap_mb <= 0 or self.first_cap_mb <= 0:
            raise ValueError(f"bucketize: cap_mb and first_cap_mb must be positive, got {self!r}")

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        return self.inner.init(
            {
                bucket.name: leaves[bucket.paths[0]]
                .detach()
                .new_empty(sum(leaves[path].numel() for path in bucket.paths))
                for bucket in self._buckets(leaves)
            }
        )

    def exchange(self, grads: Tree, state: State) -> Exchange:
        leaves, spec = tree.flatten(grads)
        buckets = self._buckets(leaves)
        flat = {bucket.name: _flatten([leaves[path] for path in bucket.paths]) for bucket in buckets}
        inner = self.inner.exchange(flat, state)
        return Exchange(
            mean=tree.unflatten(spec, _unpack(inner.mean, buckets, leaves)),
            sent=tree.unflatten(spec, _unpack(inner.sent, buckets, leaves)),
            state=inner.state,
        )

    def _buckets(self, leaves: Leaves) -> list[Bucket]:
        return assign_buckets(leaves, cap=int(self.cap_mb * MB), first_cap=int(self.first_cap_mb * MB))


def assign_buckets(leaves: Leaves, cap: int, first_cap: int) -> list[Bucket]:
    """Groups leaf paths by dtype and device in reverse order; a group is closed when it holds `cap` bytes.

    Args:
        leaves: Shapes, dtypes and devices are read.
        cap: Bytes at which a bucket is closed.
        first_cap: The same for the first bucket of each dtype and device.
    """
    closed: list[list[str]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    for path in reversed(list(leaves)):
        leaf = leaves[path]
        kind = (leaf.dtype, leaf.device)
        filling.setdefault(kind, []).append(path)
        sizes[kind] = sizes.get(kind, 0) + leaf.numel() * leaf.element_size()
        if sizes[kind] >= limits.get(kind, first_cap):
            closed.append(filling.pop(kind))
            sizes[kind] = 0
            limits[kind] = cap
    groups = closed + list(filling.values())
    return [Bucket(paths[0] if len(paths) == 1 else f"{paths[0]}..{paths[-1]}", paths) for paths in groups]


def _flatten(leaves: list[Tensor]) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in leaves])


def _unpack(flat: Leaves, buckets: list[Bucket], like: Leaves) -> Leaves:
    parts: Leaves = {}
    for bucket in buckets:
        pieces = flat[bucket.name].split([like[path].numel() for path in bucket.paths])
        for path, piece in zip(bucket.paths, pieces, strict=True):
            parts[path] = in_format_of(like[path], piece.view(like[path].shape))
    return {path: parts[path] for path in like}
