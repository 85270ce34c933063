"""Module buffers, such as those of BatchNorm: which ones are made equal, when, and from which rank."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from fnddp import torch_private
from fnddp.wire import control

HookLocation = torch_private.BufferCommHookLocation


class Futures(list[torch.futures.Future[Any]]):
    """Futures of a hook, which the end of backward waits for."""

    def wait(self) -> None:
        """Wait for all, and forget them."""
        pending, self[:] = self[:], []
        torch.futures.wait_all(pending)


class Buffers:
    """The buffers of `module`, looked up each time, since modules assign new ones.

    Args:
        module: The wrapped module.
        ignored: Names of buffers that are left alone.
        group: Name of the process group.

    Attributes:
        is_synced: Forward makes them equal.
        is_due: The next forward does: not after one that did not synchronize, as in torch.
        hook: A function in the place of the broadcast, called at `location` with buffers by name, may return futures.
        futures: Of the hook; without a reference to the module, which they must not keep alive.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str], group: str | None, is_synced: bool) -> None:
        self._module, self._ignored, self._group = module, ignored, group
        self.is_synced, self.is_due = is_synced, True
        self.hook: Callable[[dict[str, Tensor]], Any] | None = None
        self.location = HookLocation.PRE_FORWARD
        self.futures = Futures()

    def named(self) -> dict[str, Tensor]:
        """Return the buffers by name."""
        return {name: buffer for name, buffer in self._module.named_buffers() if name not in self._ignored}

    def runs_at(self, location: HookLocation) -> bool:
        """Return whether there is something to do before or after this forward."""
        return location == self.location and self.is_synced and self.is_due and bool(self.named())

    def sync(self, source: int) -> None:
        """Make them equal to those of the rank `source`, or run the hook."""
        named = self.named()
        # Backward has saved some of them: it must not find that they have changed.
        with torch.no_grad(), torch_private.keeping_versions(list(named.values())):
            if self.hook is None:
                control.broadcast(list(named.values()), self._group, source=source)
            else:
                self.futures += self.hook(named) or ()
