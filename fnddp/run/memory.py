"""Memory that persists across steps: the flat buffers of collectives, and means."""

import torch
from torch import Tensor

from fnddp.plan.ir import Collective, LeafSpec, Payload, Span
from fnddp.torch_private import storage_use_count


class Buffer:
    """The memory of a collective.

    Attributes:
        send: What it hands over, as long as the collective is wide; with a row for each rank if its kind says so.
        receive: What it fills; for a collective in place the same.
        sent: Views of the payloads, by their position.
        received: Views of their results.
    """

    def __init__(self, collective: Collective) -> None:
        kind = collective.kind
        self.send = torch.empty(collective.send_shape, dtype=collective.dtype, device=collective.device)
        self.receive = self.send if kind.is_in_place else self.send.new_empty(collective.receive_shape)
        self.sent: list[Tensor] = []
        self.received: list[Tensor] = []
        for i, payload in enumerate(collective.payloads):
            self.sent.append(_columns(self.send, payload).view(collective.sent_shape(i)))
            self.received.append(_columns(self.receive, payload).view(collective.received_shape(i)))
        self._payloads = collective.payloads
        self._spans: dict[Span, Tensor] = {}
        self._tensors = (self.send,) if kind.is_in_place else (self.send, self.receive)
        self._own_uses = [storage_use_count(tensor) for tensor in self._tensors]

    def span(self, span: Span) -> Tensor:
        """Payloads that lie side by side, as one tensor."""
        if span not in self._spans:
            first, last = self._payloads[span.first], self._payloads[span.last]
            self._spans[span] = self.send.narrow(-1, first.offset, last.offset + last.width - first.offset)
            self._own_uses[0] += 1
        return self._spans[span]

    @property
    def is_held(self) -> bool:
        """Whether somebody reads it."""
        return any(storage_use_count(t) > own for t, own in zip(self._tensors, self._own_uses, strict=True))


def _columns(buffer: Tensor, payload: Payload) -> Tensor:
    """The columns of `buffer` that are the payload's, in its dtype. Without gaps if there are no others."""
    return buffer.narrow(-1, payload.offset, payload.width).view(payload.dtype)


class Memory:
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
        free = next((tensor for tensor in pool if storage_use_count(tensor) == 1), None)
        if free is None:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        pool[:] = [tensor for tensor in pool if tensor is not free]
        return free

    def give_mean(self, path: str, memory: Tensor) -> None:
        """Memory for later means of a leaf, once nobody holds it."""
        self._means[path] = [*self._means.get(path, [])[-1:], memory]
