"""Uneven inputs: what a rank does that has run out of them while others go on."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import JoinHook

from fnddp.adapters.torch_compat.buffers import Buffers, HookLocation
from fnddp.wire import control, groups


class UnevenInputs:
    """The collectives that ranks with and without inputs have in common, within `join`.

    Gradients of a rank without inputs are zero, so a mean is over all ranks; with `divide_by_initial_world_size=False`
    the others scale theirs up, so that it is over those that are left. A pipeline's own state goes on: an error
    feedback residual of this rank is still sent, nothing is lost, and what is replicated stays equal.

    Args:
        module: The wrapped module.
        ignored: Names of parameters and buffers that are not made equal.
        buffers: Of the module.
        group: Name of the process group.

    Attributes:
        divides_by_initial_world_size: Whether the mean is over all ranks, or over those that are left.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str], buffers: Buffers, group: str | None) -> None:
        self._module, self._ignored, self._buffers, self._group = module, ignored, buffers, group
        self.divides_by_initial_world_size = True

    def follow(self, take_part: Callable[[], None]) -> None:
        """One forward and backward of the ranks that still have inputs; `take_part` in the step, if it is one."""
        buffers = self._buffers
        if buffers.runs_at(HookLocation.PRE_FORWARD):
            buffers.sync(self.source_of_buffers(has_inputs=False))
        synchronizes = control.total(0, self._group) > 0
        if buffers.runs_at(HookLocation.POST_FORWARD):
            buffers.sync(self.source_of_buffers(has_inputs=False))
        buffers.is_due = synchronizes
        if synchronizes:
            take_part()

    def take_from_last(self, is_last_joiner: bool) -> None:
        """Makes parameters and buffers those of a rank that has seen the last input."""
        self._buffers.futures.wait()
        source = self.source_of_buffers(has_inputs=is_last_joiner)
        named = dict(self._module.named_parameters())
        named |= self._buffers.named() if self._buffers.is_synced else {}
        kept = [tensor.detach() for name, tensor in named.items() if name not in self._ignored]
        control.broadcast(kept, self._group, source=source)

    def source_of_buffers(self, has_inputs: bool = True) -> int:
        """The last rank that has inputs: its buffers are right."""
        return control.highest(groups.rank(self._group) if has_inputs else -1, self._group)

    def scale(self, synchronizes: bool) -> float:
        """What gradients are scaled by, so that their mean is over the ranks it should be over."""
        left = control.total(int(synchronizes), self._group)
        return 1.0 if self.divides_by_initial_world_size or not left else groups.world_size(self._group) / left


class Shadow(JoinHook):
    """What torch's `Join` calls on ranks without inputs.

    Args:
        inputs: The collectives.
        take_part: In a step of the others.
        at_end: Called when all ranks have joined.
        device: The module's.
    """

    def __init__(
        self, inputs: UnevenInputs, take_part: Callable[[], None], at_end: Callable[[], None], device: torch.device
    ) -> None:
        self._inputs, self._take_part, self._at_end, self._device = inputs, take_part, at_end, device

    def main_hook(self) -> None:
        """One step of the others."""
        with on(self._device):
            self._inputs.follow(self._take_part)

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have joined."""
        with on(self._device):
            self._inputs.take_from_last(is_last_joiner)
        self._at_end()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """NCCL sends control messages from the current device, which need not be the module's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
