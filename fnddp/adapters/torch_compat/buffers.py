"""Buffers, such as those of BatchNorm: which, from whom, and when they are made equal."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fnddp import torch_private
from fnddp.wire import control

HookLocation = torch_private.BufferCommHookLocation


@dataclass(frozen=True)
class BufferHook:
    """What synchronizes buffers instead of a broadcast: `hook(state, buffers by name)`, which may return futures."""

    hook: Callable[[Any, dict[str, Tensor]], Any]
    state: Any
    location: HookLocation


class Futures:
    """What a hook has left to the end of backward."""

    def __init__(self) -> None:
        self._pending: list[torch.futures.Future[Any]] = []

    def add(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        """Futures to wait for."""
        self._pending += futures

    def wait(self) -> None:
        """Returns when all are done."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.wait()


class Buffers:
    """The buffers of `module`, looked up each time, since modules assign new ones.

    Args:
        module: The wrapped module.
        ignored: Names that are nobody's business.
        group: Name of the process group.

    Attributes:
        is_synced: Whether forward makes them equal at all.
        is_due: Whether the next forward does: not after one that did not synchronize, as in torch.
        hook: What does so, if not a broadcast.
        futures: Of the hook. An object without the module: who waits for it must not keep the module alive.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str], group: str | None, is_synced: bool) -> None:
        self._module, self._ignored, self._group = module, ignored, group
        self.is_synced = is_synced
        self.is_due = True
        self.hook: BufferHook | None = None
        self.futures = Futures()

    def named(self) -> dict[str, Tensor]:
        """The buffers by name."""
        return {name: buffer for name, buffer in self._module.named_buffers() if name not in self._ignored}

    def runs_at(self, location: HookLocation) -> bool:
        """Whether there is something to do before or after this forward."""
        mine = HookLocation.PRE_FORWARD if self.hook is None else self.hook.location
        return location == mine and self.is_synced and self.is_due and bool(self.named())

    def sync(self, source: int) -> None:
        """Makes them equal to those of the rank `source`, or runs the hook."""
        named = self.named()
        # What backward needs of them was saved: it must not find that they have changed.
        with torch.no_grad(), torch_private.keeping_versions(list(named.values())):
            if self.hook is None:
                control.broadcast(list(named.values()), self._group, source=source)
            else:
                self.futures.add(self.hook.hook(self.hook.state, named) or ())
