"""Memory that persists across steps: the flat buffers of collectives, and means."""

from typing import TypeAlias

import torch
from torch import Tensor

from fnddp.device import Device, Stream
from fnddp.ir.program import Collective, LeafSpec, Received, Sent, Span
from fnddp.torch_private import storage_use_count

BufferSlice: TypeAlias = Sent | Received | Span
"""A part of the memory of a collective."""


def _view_of(memory: Tensor, collective: Collective, name: BufferSlice, *, apart: bool) -> Tensor:
    if isinstance(name, Span):
        first, last = collective.payloads[name.first], collective.payloads[name.last]
        return memory.narrow(-1, first.offset, last.offset + last.width - first.offset)
    payload = collective.payloads[name.position]
    shape = (collective.sent_shape if isinstance(name, Sent) else collective.received_shape)(name.position)
    columns = memory.narrow(-1, payload.offset, payload.width)
    if apart and columns.numel():  # in a storage of its own, of which this is the only tensor
        return torch.from_dlpack(columns.view(torch.uint8)).view(payload.dtype).view(shape).data
    # Its columns, in its dtype. Without gaps if there are no others.
    return columns.view(payload.dtype).view(shape)


class Buffer:
    """The memory of a collective.

    Args:
        collective: Whose it is.
        views_apart: Give each slice the look of memory of its own. So Inductor wants it, which
            otherwise computes each element of a buffer from all that is written there.

    Attributes:
        send: What it sends, as long as the collective is wide; with a row for each rank if its kind sends rows.
        receive: What it fills; for a collective in place the same.
    """

    def __init__(self, collective: Collective, *, views_apart: bool) -> None:
        self._collective, self._views_apart = collective, views_apart
        self.send = torch.empty(collective.send_shape, dtype=collective.dtype, device=collective.device)
        is_in_place = collective.kind.is_in_place
        self.receive = self.send if is_in_place else self.send.new_empty(collective.receive_shape)
        self._tensors = (self.send,) if is_in_place else (self.send, self.receive)
        self._views: dict[BufferSlice, Tensor] = {}
        self._own_uses = [storage_use_count(tensor) for tensor in self._tensors]

    def view(self, name: BufferSlice) -> Tensor:
        """Return the slice that `name` stands for."""
        if name not in self._views:
            index = -1 if isinstance(name, Received) else 0
            memory = self._tensors[index]
            before = storage_use_count(memory)
            self._views[name] = _view_of(memory, self._collective, name, apart=self._views_apart)
            self._own_uses[index] += storage_use_count(memory) - before
        return self._views[name]

    @property
    def is_held(self) -> bool:
        """True while somebody else reads it."""
        if any(storage_use_count(t) > own for t, own in zip(self._tensors, self._own_uses, strict=True)):
            return True
        return self._views_apart and any(storage_use_count(view) > 1 for view in self._views.values() if view.numel())


class Pool:
    """The buffers of a collective: more than one where somebody reads the first."""

    def __init__(self, collective: Collective, views_apart: bool) -> None:
        self._collective, self._views_apart = collective, views_apart
        self._buffers: list[Buffer] = []

    def take(self) -> Buffer:
        """Return a buffer that nobody reads. It stays here."""
        free = next((buffer for buffer in self._buffers if not buffer.is_held), None)
        if free is None:
            free = Buffer(self._collective, views_apart=self._views_apart)
            self._buffers = [*self._buffers[-1:], free]
        return free


class Memory:
    """Memory that consecutive plans share. A tensor that somebody still holds is not used again."""

    def __init__(self) -> None:
        self._collectives: dict[Collective, Pool] = {}
        self._means: dict[str, list[Tensor]] = {}
        self._streams: dict[Device, Stream] = {}

    def clear(self) -> None:
        """Forgets all memory: the plans to come need other."""
        self._collectives, self._means = {}, {}

    def stream(self, device: Device) -> Stream:
        """The side stream of `device`: one for all plans, since the allocator keeps memory for each stream."""
        if device not in self._streams:
            self._streams[device] = device.stream()
        return self._streams[device]

    def pool(self, collective: Collective, *, views_apart: bool) -> "Pool":
        """Return the buffers of `collective`. Plans that share memory have one backend."""
        return self._collectives.setdefault(collective, Pool(collective, views_apart))

    def take_mean(self, path: str, leaf: LeafSpec) -> Tensor:
        """Memory for the mean of a leaf that nobody reads. It is the caller's until it is given back."""
        pool = self._means.setdefault(path, [])
        free = next((tensor for tensor in pool if storage_use_count(tensor) == 1), None)
        if free is None:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        pool[:] = [tensor for tensor in pool if tensor is not free]
        return free

    def give_mean(self, path: str, memory: Tensor) -> None:
        """Memory for later means of a leaf, once nobody holds it."""
        self._means[path] = [*self._means.get(path, [])[-1:], memory]
