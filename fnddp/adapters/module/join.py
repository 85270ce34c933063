"""Uneven inputs: what a rank does that has run out of them while others go on."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.algorithms.join import _JoinConfig as JoinConfig  # pyright: ignore[reportPrivateUsage]

from fnddp.adapters.module.buffers import Buffers, HookLocation
from fnddp.adapters.module.steps import Steps
from fnddp.wire import control, groups


class UnevenInputs(Joinable):
    """`join` of a wrapped module, and the collectives that ranks with and without inputs have in common.

    Gradients of a rank without inputs are zero, so a mean is over all ranks; with `divide_by_initial_world_size=False`
    the others scale theirs up, so that it is over those that are left. A pipeline's own state goes on: an error
    feedback residual of this rank is still sent, nothing is lost, and what is replicated stays equal.
    """

    module: nn.Module
    device: torch.device
    parameters_to_ignore: set[str]
    _group: str | None
    _steps: Steps
    _buffers_of_module: Buffers
    _divides_by_initial_world_size = True

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context for uneven inputs: ranks that have run out of them take part in the others' steps with zeros.

        At the end all ranks have the parameters of one that has seen the last input. Every forward within it must be
        followed by one backward, in all of it or in none.

        Args:
            divide_by_initial_world_size: Take the mean over all ranks, so that every input has the same weight;
                otherwise over the ranks that are left. Works with any pipeline (torch ignores it under a hook).
            enable: If not, nothing is done, and inputs must be even.
            throw_on_early_termination: Raise on all ranks when the first one runs out. Needed where forward has
                collectives of its own.

        Raises:
            RuntimeError: With `throw_on_early_termination`.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """See `torch.distributed.algorithms.Joinable`."""
        self._divides_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """See `torch.distributed.algorithms.Joinable`."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """See `torch.distributed.algorithms.Joinable`."""
        return groups.live_group(self._group)

    def _shadow(self) -> None:
        """One forward and backward of the ranks that still have inputs."""
        buffers = self._buffers_of_module
        if buffers.runs_at(HookLocation.PRE_FORWARD):
            buffers.sync(control.highest(-1, self._group))
        synchronizes = control.total(0, self._group) > 0
        if buffers.runs_at(HookLocation.POST_FORWARD):
            buffers.sync(control.highest(-1, self._group))
        buffers.is_due = synchronizes
        if synchronizes:
            self._steps.shadow()

    def _take_from_last(self, is_last_joiner: bool) -> None:
        """Makes parameters and buffers those of a rank that has seen the last input."""
        self._buffers_of_module.futures.wait()
        source = control.highest(groups.rank(self._group) if is_last_joiner else -1, self._group)
        named = dict(self.module.named_parameters())
        named |= self._buffers_of_module.named() if self._buffers_of_module.is_synced else {}
        kept = [tensor.detach() for name, tensor in named.items() if name not in self.parameters_to_ignore]
        control.broadcast(kept, self._group, source=source)
        self._join_config = JoinConfig.construct_disabled_join_config()

    @property
    def _joins(self) -> bool:
        return self._join_config.enable

    def _tell_joined_ranks(self) -> None:
        Join.notify_join_context(self)

    def _source_of_buffers(self) -> int:
        """Whose buffers are right: the first rank's, and while ranks run out of inputs, the last that has some."""
        return control.highest(groups.rank(self._group), self._group) if self._joins else 0

    def _scale_of_joins(self, synchronizes: bool) -> float:
        """What gradients are scaled by, so that their mean is over the ranks it should be over."""
        if not self._joins:
            return 1.0
        left = control.total(int(synchronizes), self._group)
        return 1.0 if self._divides_by_initial_world_size or not left else groups.world_size(self._group) / left

    def _on_device(self) -> AbstractContextManager[Any]:
        """NCCL sends control messages from the current device, which need not be the module's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


class _Shadow(JoinHook):
    """What torch's `Join` calls on ranks without inputs."""

    def __init__(self, model: UnevenInputs) -> None:
        self._model = model

    def main_hook(self) -> None:
        """One step of the others."""
        with self._model._on_device():  # pyright: ignore[reportPrivateUsage]
            self._model._shadow()  # pyright: ignore[reportPrivateUsage]

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have joined."""
        with self._model._on_device():  # pyright: ignore[reportPrivateUsage]
            self._model._take_from_last(is_last_joiner)  # pyright: ignore[reportPrivateUsage]
