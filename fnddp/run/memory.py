"""Memory that persists across steps: the flat buffers of collectives, and means."""

import torch
from torch import Tensor

from fnddp.plan.ir import Collective, LeafSpec
from fnddp.plan.passes.emit import buffer_name


def storage_uses(tensor: Tensor) -> int:
    """How many tensors, views included, share the memory of `tensor`."""
    # As torch's CUDA graph trees ask whether an output is still alive.
    storage = tensor.untyped_storage()  # which is one more
    return torch._C._storage_Use_Count(storage._cdata) - 1  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


class Buffer:
    """A flat buffer and its payloads.

    Attributes:
        flat: One dimension, as long as the collective.
        parts: Views of the payloads, by the names that a plan has for them.
    """

    def __init__(self, collective: Collective) -> None:
        self.flat = torch.empty(collective.numel, dtype=collective.dtype, device=collective.device)
        self.parts = {
            buffer_name(collective, i): self.flat[payload.offset :][: payload.numel].view(payload.shape)
            for i, payload in enumerate(collective.payloads)
        }
        self._own_uses = storage_uses(self.flat)

    @property
    def is_held(self) -> bool:
        return storage_uses(self.flat) > self._own_uses


class Buffers:
    """What plans that follow each other share. Memory that somebody holds is not handed out: there is other, or new."""

    def __init__(self) -> None:
        self._collectives: dict[Collective, list[Buffer]] = {}
        self._means: dict[str, list[Tensor]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def clear(self) -> None:
        """Forgets all memory: the plans to come need other."""
        self._collectives, self._means = {}, {}

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The side stream of `device`: one for all plans, since the allocator keeps memory for each stream."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def take(self, collective: Collective) -> Buffer:
        """A buffer for `collective` that nobody reads. It stays here."""
        pool = self._collectives.setdefault(collective, [])
        free = next((buffer for buffer in pool if not buffer.is_held), None)
        if free is None:
            free = Buffer(collective)
            pool[:] = [*pool[-1:], free]
        return free

    def take_mean(self, path: str, leaf: LeafSpec) -> Tensor:
        """Memory for the mean of a leaf that nobody reads. It is the caller's until it is given back."""
        pool = self._means.setdefault(path, [])
        free = next((tensor for tensor in pool if storage_uses(tensor) == 1), None)
        if free is None:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        pool[:] = [tensor for tensor in pool if tensor is not free]
        return free

    def give_mean(self, path: str, memory: Tensor) -> None:
        """Memory for later means of a leaf, once nobody holds it."""
        self._means[path] = [*self._means.get(path, [])[-1:], memory]
