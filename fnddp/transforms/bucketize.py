"""Flat buffers: few large collectives instead of many small ones."""

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.buckets import MB, assign_buckets
from fnddp.core.layout import in_format_of
from fnddp.core.options import POSITIVE
from fnddp.core.sync import Exchange, State, Sync, transform
from fnddp.core.tree import Leaves, Tree


@transform
class bucketize(Sync):
    """Lay out leaves of one dtype and device in flat one-dimensional buffers, and exchange those.

    Buckets are filled in reverse registration order, the order in which backward produces gradients, and closed once
    they hold the cap, as torch's DDP does. A bucket is named by its first and last leaf, so inner state is keyed by
    leaf paths. The wrong choice around `powersgd`, which needs matrices: put it inside, `powersgd(bucketize(...))`.

    The caps set what the inner pipeline sees, such as a codec's blocks, but not the number of messages of a plan
    (`jit`, `value_and_grad`, the adapters): plans join payloads in buckets of their own (`bucket_cap_mb` of
    `DistributedDataParallel`). All ranks must hold the leaves in the same order; `fnddp.verify` checks that.

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
        return self.inner.init(
            {
                name: leaves[paths[0]].detach().new_empty(sum(leaves[path].numel() for path in paths))
                for name, paths in self.buckets(leaves).items()
            }
        )

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        buckets = self.buckets(leaves)
        flat = {name: _flatten(leaves[path] for path in paths) for name, paths in buckets.items()}
        return self.inner.exchange(flat, state).decoded(lambda flat: _unpack(flat, buckets, leaves))

    def buckets(self, leaves: Leaves) -> dict[str, list[str]]:
        """Return leaf paths by bucket, in the order in which the buffer holds them; values are not read."""
        nbytes: dict[tuple[torch.dtype, torch.device], dict[str, int]] = {}
        for path in reversed(list(leaves)):
            leaf = leaves[path]
            nbytes.setdefault((leaf.dtype, leaf.device), {})[path] = leaf.numel() * leaf.element_size()
        caps = int(self.first_cap_mb * MB), int(self.cap_mb * MB)
        groups: list[list[str]] = []
        for alike in nbytes.values():
            of_number: dict[int, list[str]] = {}
            for path, number in assign_buckets(alike, caps).items():
                of_number.setdefault(number, []).append(path)
            groups += of_number.values()
        return {paths[0] if len(paths) == 1 else f"{paths[0]}..{paths[-1]}": paths for paths in groups}


def _flatten(leaves: Iterable[Tensor]) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in leaves])


def _unpack(flat: Leaves, buckets: dict[str, list[str]], like: Leaves) -> Leaves:
    parts: Leaves = {}
    for name, each in flat.items():
        paths = buckets[name]
        pieces = each.split([like[path].numel() for path in paths])
        for path, piece in zip(paths, pieces, strict=True):
            parts[path] = in_format_of(like[path], piece.view(like[path].shape))
    return {path: parts[path] for path in like if path in parts}
