"""A counter of what a rank passes to its collectives."""

from typing import Any

import torch
from torch import Tensor

from fnddp.torch_private import TorchDispatchMode, has_modes, tree_leaves

# Collectives by operator name. Functional ones take the payload first; c10d's take outputs before it, if they differ.
_PAYLOAD_ARGUMENT = {
    "_c10d_functional::all_reduce": 0,
    "_c10d_functional::all_gather_into_tensor": 0,
    "_c10d_functional::reduce_scatter_tensor": 0,
    "_c10d_functional::all_to_all_single": 0,
    "_c10d_functional::all_reduce_": 0,
    "_c10d_functional::all_reduce_coalesced": 0,
    "_c10d_functional::all_gather_into_tensor_coalesced": 0,
    "_c10d_functional::reduce_scatter_tensor_coalesced": 0,
    "_c10d_functional::broadcast": 0,
    "c10d::allreduce_": 0,
    "c10d::allreduce_coalesced_": 0,
    "c10d::reduce_": 0,
    "c10d::gather_": 1,
    "c10d::reduce_scatter_": 1,
    "c10d::alltoall_": 1,
    "c10d::allgather_": 1,
    "c10d::_allgather_base_": 1,
    "c10d::_reduce_scatter_base_": 1,
    "c10d::alltoall_base_": 1,
    "c10d::broadcast_": 0,
}


class WireCounter(TorchDispatchMode):
    """Counter of the collectives that this thread starts in the `with` block, and of their `wire_bytes`.

    Wire bytes are the payload one rank passes to its collectives, as the papers count (4 per float32 element of a
    plain mean): not what crosses the link, and not the byte for each leaf with which ranks end a step alike. A world
    of one without torch.distributed has no collectives: it counts 0.

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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        position = _PAYLOAD_ARGUMENT.get(func._schema.name)
        if func is _count:
            self.wire_bytes += args[0]
            self.collectives += 1
        elif position is not None:
            payload = [leaf for leaf in tree_leaves(args[position]) if isinstance(leaf, Tensor)]
            self.wire_bytes += sum(leaf.numel() * leaf.element_size() for leaf in payload)
            self.collectives += 1
        return func(*args, **(kwargs or {}))


def count_payload(nbytes: int) -> None:
    """Report a collective that the counters of this thread do not see: of a plan, or on a wire of one's own."""
    if has_modes():
        _count(nbytes)


def _do_nothing(nbytes: int) -> None:
    pass


_library = torch.library.Library("fnddp", "DEF")
_library.define("count_payload(int nbytes) -> ()")
_library.impl("count_payload", _do_nothing, "CompositeExplicitAutograd")
_count: Any = torch.ops.fnddp.count_payload.default
