"""Flat buffers of collectives, which persist across steps."""

import torch

from fnddp.plan.emit import buffer_name
from fnddp.plan.ir import Collective


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
        self._own_uses = self._uses()

    @property
    def is_held(self) -> bool:
        """Whether anybody else holds a part of it, such as a gradient of the last step."""
        return self._uses() > self._own_uses

    def _uses(self) -> int:
        # As torch's CUDA graph trees ask whether an output is still alive.
        return torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


class Buffers:
    """Buffers by collective. One that is held is not handed out again: there is a second one, and then new ones."""

    def __init__(self) -> None:
        self._pool: dict[Collective, list[Buffer]] = {}

    def take(self, collective: Collective) -> Buffer:
        """A buffer for `collective` that nobody reads."""
        pool = self._pool.setdefault(collective, [])
        for buffer in pool:
            if not buffer.is_held:
                return buffer
        buffer = Buffer(collective)
        self._pool[collective] = [*pool[-1:], buffer]
        return buffer
