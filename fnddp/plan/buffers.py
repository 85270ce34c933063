"""Memory that persists across steps: the flat buffers of collectives, and means."""

from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fnddp.plan.emit import buffer_name
from fnddp.plan.ir import Collective, LeafSpec


def storage_uses(tensor: Tensor) -> int:
    """How many tensors, views included, share the memory of `tensor`."""
    # As torch's CUDA graph trees ask whether an output is still alive.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


class Held(Protocol):
    """Memory that somebody else may hold a part of, such as a gradient of the last step."""

    @property
    def is_held(self) -> bool: ...


H = TypeVar("H", bound=Held)


class Buffer:
    """A flat buffer and its payloads.

    Attributes:
        flat: One dimension, as long as the collective.
        parts: Views of the payloads, by the names that a plan has for them.
    """

    def __init__(self, collective: Collective) -> None:
        self.flat = torch.empty(collective.numel, dtype=collective.dtype, device=collective.device)
        self.parts = {
            buffer_name(collective, i): self.flat[payload.offset : payload.offset + payload.numel].view(payload.shape)
            for i, payload in enumerate(collective.payloads)
        }
        self._own_uses = storage_uses(self.flat)

    @property
    def is_held(self) -> bool:
        return storage_uses(self.flat) > self._own_uses


class Mean:
    """The memory of one mean."""

    def __init__(self, leaf: LeafSpec) -> None:
        self.tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        self._own_uses = storage_uses(self.tensor)

    @property
    def is_held(self) -> bool:
        return storage_uses(self.tensor) > self._own_uses


class Buffers:
    """What plans that follow each other share. Memory that is held is not handed out: there is a second one, or a new."""

    def __init__(self) -> None:
        self._collectives: dict[Hashable, list[Buffer]] = {}
        self._means: dict[Hashable, list[Mean]] = {}

    def take(self, collective: Collective) -> Buffer:
        """A buffer for `collective` that nobody reads."""
        return _take(self._collectives.setdefault(collective, []), lambda: Buffer(collective))

    def mean(self, path: str, leaf: LeafSpec) -> Tensor:
        """Memory for the mean of a leaf that nobody reads."""
        return _take(self._means.setdefault(path, []), lambda: Mean(leaf)).tensor


def _take(pool: list[H], make: Callable[[], H]) -> H:
    for held in pool:
        if not held.is_held:
            return held
    pool[:] = [*pool[-1:], make()]
    return pool[-1]
