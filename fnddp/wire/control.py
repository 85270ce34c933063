"""Messages between ranks other than payloads, for set-up and errors. They are never counted as traffic."""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp.device import device_of, device_of_backends
from fnddp.torch_private import broadcast_coalesced, without_modes
from fnddp.wire.c10d import C10D, C10d
from fnddp.wire.groups import live_group, live_rank, require_alone, world_size
from fnddp.wire.kinds import ALL_GATHER, ALL_REDUCE, waited
from fnddp.wire.protocol import Wire

BROADCAST_BYTES = 250 * 2**20
"""Maximum size of a message of `broadcast`, in bytes."""


def total(value: int, group: str | None) -> int:
    """Return the sum of `value` over the ranks of `group`."""
    return _reduced([value], group, "sum")[0]


def highest(value: int, group: str | None) -> int:
    """Return the largest `value` of the ranks of `group`."""
    return highest_of([value], group)[0]


def highest_of(values: Sequence[int], group: str | None) -> list[int]:
    """Return the elementwise maximum of `values` over the ranks of `group`."""
    return _reduced(values, group, "max")


def _reduced(values: Sequence[int], group: str | None, op: str) -> list[int]:
    with without_modes():  # a WireCounter must not count it
        device_of(wire_device(group)).refuse_capture("ranks send messages to each other's hosts")
        flags = torch.tensor(values, device=wire_device(group))
        waited(C10D.start(ALL_REDUCE, flags, flags, op, group))
        return flags.tolist()


def wire_device(group: str | None) -> torch.device:
    """Return the device for payloads of `group`: the accelerator's current one if the backend moves no others."""
    return device_of_backends(dist.get_backend_config(live_group(group)))


def broadcast(tensors: list[Tensor], group: str | None, *, source: int = 0, wire: Wire = C10D) -> None:
    """Overwrite `tensors` by those of the group's rank `source`; torch.distributed uses few messages."""
    if wire is not C10D:
        for tensor in tensors:
            _broadcast_over(wire, tensor, group, source)
    elif dist.is_initialized() and tensors:
        broadcast_coalesced(live_group(group), tensors, BROADCAST_BYTES, source)


def _broadcast_over(wire: Wire, tensor: Tensor, group: str | None, source: int) -> None:
    if tensor.numel() and wire.size(group) > 1:
        mine = tensor.detach().contiguous().reshape(-1).unsqueeze(-1).view(torch.uint8).reshape(-1)
        everyone = mine.new_empty((wire.size(group), mine.numel()))
        waited(wire.start(ALL_GATHER, mine, everyone, None, group))
        tensor.copy_(everyone[source].view(tensor.dtype).reshape(tensor.shape))


def all_gather_object(value: Any, group: str | None, wire: Wire = C10D) -> list[Any]:
    """Return the `value` of every rank, in rank order. For set-up, never inside a step."""
    is_alone = wire is C10D and not dist.is_initialized()
    return [value] if is_alone else gather_over(wire, value, group, _device(wire, group))


def gather_object(value: Any, group: str | None) -> list[Any]:
    """Return the `value` of every rank, in rank order, on the first rank; on other ranks an empty list."""
    if not dist.is_initialized():
        return [value]
    is_first = live_rank(group) == 0
    gathered: list[Any] = [None] * world_size(group) if is_first else []
    with without_modes():
        dist.gather_object(value, gathered if is_first else None, group=live_group(group), group_dst=0)
    return gathered


def gather_over(wire: Wire, value: Any, group: str | None, device: torch.device) -> list[Any]:
    """Return the `value` (any picklable object) of every rank of `group`, over any wire with payloads on `device`."""
    with without_modes():
        device_of(device).refuse_capture("ranks send messages to each other's hosts")
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
        sizes = _gathered(wire, torch.tensor([mine.numel()], dtype=torch.int64, device=device), group)
        lengths: list[int] = sizes.flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
        padded[: mine.numel()] = mine
        rows = _gathered(wire, padded, group).cpu()
        return [pickle.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]


def first_over(wire: Wire, value: Any, group: str | None, device: torch.device) -> Any:
    """Return the `value` of the first rank of `group`; see `gather_over`."""
    if isinstance(wire, C10d):
        return wire.broadcast_object(value, group, device)
    return gather_over(wire, value, group, device)[0]


def _gathered(wire: Wire, flags: Tensor, group: str | None) -> Tensor:
    with without_modes():
        gathered, work = wire.vote(flags, group)
        waited(work)
        return gathered


def all_gather_bytes(value: bytes, group: str | None, wire: Wire = C10D) -> list[bytes]:
    """Return the `value` of every rank (of equal lengths); raise a RuntimeError in the same cases as `world_size`."""
    if wire is C10D and not dist.is_initialized():
        require_alone()
        return [value]
    mine = torch.frombuffer(bytearray(value), dtype=torch.uint8).to(_device(wire, group))
    return [bytes(row.tolist()) for row in _gathered(wire, mine, group)]


def _device(wire: Wire, group: str | None) -> torch.device:
    return wire_device(group) if isinstance(wire, C10d) else torch.device("cpu")
