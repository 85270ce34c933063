"""float16 sums on gloo: its ring, with torch's addition."""

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp.wire.protocol import waited

_TAGS = 0x666E0000  # away from the tags of a user's own messages
_NUMEL = 2**16  # below, messages cost more than sums


def is_faster(buffer: Tensor, op: str | None, group: dist.ProcessGroup) -> bool:
    """Whether `RingAllReduce` is faster than the all_reduce of `group`."""
    if buffer.dtype != torch.float16 or op != "sum" or buffer.numel() < _NUMEL or buffer.is_cuda:
        return False
    return group.size() > 1 and "gloo" in dist.get_backend_config(group)


class RingAllReduce:
    """gloo adds float16 one number at a time; this is its ring with torch's sum: a third of the time.

    A reduce-scatter and an all-gather of one chunk for each rank, in n - 1 messages each. Every element is added up on
    one rank, in the order of the ring, so all ranks get the same bits.
    """

    def __init__(self, buffer: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        self._group, self._tag = group, _TAGS + tag
        self._rank, self._size = group.rank(), group.size()
        self._chunks = list(buffer.tensor_split(self._size))
        self._received = torch.empty_like(self._chunks[0])  # the largest
        self._step = 0
        self._send_and_receive()

    def is_completed(self) -> bool:
        while self._pending and all(work.is_completed() for work in self._pending):
            self._go_on()
        return not self._pending

    def wait(self) -> None:
        while self._pending:
            self._go_on()

    @property
    def _reduces(self) -> bool:
        return self._step < self._size - 1

    def _send_and_receive(self) -> None:
        # In step s of the first half, rank r sends chunk r - s and adds chunk r - s - 1; the second half is one ahead.
        at = self._rank - self._step
        outgoing, self._target = self._chunks[at % self._size], self._chunks[(at - 1) % self._size]
        incoming = self._received[: self._target.numel()] if self._reduces else self._target
        after, before = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        self._pending = [
            self._group.send([outgoing], after, self._tag),
            self._group.recv([incoming], before, self._tag),
        ]

    def _go_on(self) -> None:
        for work in self._pending:
            waited(work)
        self._pending = []
        if self._reduces:
            self._target += self._received[: self._target.numel()]
        self._step += 1
        if self._step < 2 * (self._size - 1):
            self._send_and_receive()
