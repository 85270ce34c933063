"""A counter of the bytes that a rank passes to its collectives."""

from typing import Any

from torch import Tensor

from fnddp.torch_private import TorchDispatchMode, modes, tree_leaves

# Index of the payload argument by operator. It is first in functional ones; c10d's may take outputs before it.
_PAYLOAD_ARGUMENT = {
    f"{library}::{name}": position
    for library, position, names in (
        ("_c10d_functional", 0, "all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_ all_to_all_single"),
        ("_c10d_functional", 0, "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced"),
        ("_c10d_functional", 0, "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced"),
        ("_c10d_functional", 0, "broadcast broadcast_"),
        ("c10d", 0, "allreduce_ allreduce_coalesced_ reduce_ broadcast_"),
        ("c10d", 1, "gather_ reduce_scatter_ alltoall_ allgather_"),
        ("c10d", 1, "_allgather_base_ _reduce_scatter_base_ alltoall_base_ gather_into_tensor_"),
    )
    for name in names.split()
}
COUNTED = frozenset(_PAYLOAD_ARGUMENT)


class WireCounter(TorchDispatchMode):
    """Counter of the collectives that this thread starts in the `with` block, and of their `wire_bytes`.

    Wire bytes are the payload that one rank passes to its collectives, as papers count them (4 per float32 element of a
    plain mean). They are not the bytes on the link, and exclude the vote that ends a step (one byte per leaf). A single
    rank without torch.distributed has no collectives, so the count is 0.

    >>> import torch
    >>> import torch.distributed as dist
    >>> from fnddp import allreduce
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> with WireCounter() as counter:
    ...     _ = allreduce({"w": torch.ones(10)}, ())
    >>> counter.wire_bytes, counter.collectives
    (40, 1)
    >>> dist.destroy_process_group()
    """

    def __init__(self) -> None:
        super().__init__()
        self.wire_bytes = 0
        self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        position = _PAYLOAD_ARGUMENT.get(func._schema.name)
        if position is not None:
            payload = [leaf for leaf in tree_leaves(args[position]) if isinstance(leaf, Tensor)]
            self.count(sum(leaf.numel() * leaf.element_size() for leaf in payload))
        return func(*args, **(kwargs or {}))

    def count(self, nbytes: int) -> None:
        self.wire_bytes += nbytes
        self.collectives += 1


def count_payload(nbytes: int) -> None:
    """Report a collective that the counters of this thread cannot see, because a plan or a custom wire runs it."""
    for mode in modes():
        if isinstance(mode, WireCounter):
            mode.count(nbytes)
