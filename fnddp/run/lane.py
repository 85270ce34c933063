"""The lane of a wrapped model: communicators and counts that stay when its pipeline or parameters are replaced."""

import itertools
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fnddp.device import device_of, require_carried
from fnddp.wire import control
from fnddp.wire.c10d import C10d, can_connect_again, dedicated_to, not_connected
from fnddp.wire.groups import live_group, live_or_none
from fnddp.wire.protocol import Wire

MOST = 256  # lanes on a process group

_numbers = itertools.count()

# Numbers of lanes in use, by process group; and the lanes that send over a group itself, or over another wire.
_taken: "weakref.WeakKeyDictionary[dist.ProcessGroup, set[int]]" = weakref.WeakKeyDictionary()
_sharing: "weakref.WeakKeyDictionary[Any, weakref.WeakSet[Lane]]" = weakref.WeakKeyDictionary()


def has_lanes(group: str | None) -> bool:
    """Return whether wrapped models synchronize over `group` already."""
    live = live_or_none(group)
    return live is not None and bool(_taken.get(live))


class Lane:
    """A separate communicator in each process group, so that steps of two lanes can be open at once.

    For gloo on CPUs each lane connects the group's ranks again, so that its messages cannot mix with the user's either.
    On an accelerator the first lane uses the group itself, and others use a copy. If neither is possible (a wire other
    than torch.distributed, or torchcomms), lanes share the group or the wire.

    Attributes:
        number: Number in the order of construction. Steps that share a backward end in this order: see `in_order`.
        begun, ended: Counts of steps.
        engines: Number of engines that it has had.
        places: Counter that numbers engines, for ranks to detect mixed-up steps: see `Flags`.
        broken: The error after which ranks may be desynchronized.
        refused: The error that left wrong values in parameters on all ranks, so that no step may begin.
        notices: `Step.notice` of the last steps, on an accelerator.
        epoch: Epoch of an elastic wire in which this rank was last consistent with the others.
        shared: For each communicator shared with others, the lanes that use it.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.begun = self.ended = self.epoch = self.engines = 0
        self.places = itertools.count()
        self.broken: BaseException | None = None
        self.refused: BaseException | None = None
        self.notices: tuple[Callable[[], bool], ...] = ()
        # Names of communicators by process group; None for the group itself.
        self._own: weakref.WeakKeyDictionary[dist.ProcessGroup, str | None] = weakref.WeakKeyDictionary()
        self.shared: list[weakref.WeakSet[Lane]] = []
        self._free: list[Callable[[], object]] = []

    def require_whole(self) -> None:
        """Raise a RuntimeError if parameters have wrong values: see `refused`."""
        if self.refused is not None:
            raise RuntimeError(
                f"no step can begin, because parameters are inconsistent: {self.refused}"
            ) from self.refused

    def connect(self, wire: Wire, groups: Iterable[str | None], device: torch.device) -> None:
        """Create missing communicators. All ranks of each group call it, for several lanes in the same order.

        Raises:
            CollectiveError: Another rank did not make this call within the timeout of its group.
            RuntimeError: There are too many lanes on a group.
        """
        if type(wire) is not C10d:
            self._share(wire)
            return
        for group in groups if dist.is_initialized() else ():
            live = live_group(group)
            if live not in self._own:
                require_carried(device, live)
                self._own[live] = self._connected(group, live, device) if live.size() > 1 else None

    def _connected(self, group: str | None, live: dist.ProcessGroup, device: torch.device) -> str | None:
        taken = _taken.setdefault(live, set())
        try:
            highest = control.highest_of([number in taken for number in range(MOST)], group)  # 1 if taken on some rank
        except RuntimeError as error:
            raise not_connected(live, "fnddp", error) from error
        if all(highest):
            raise RuntimeError(
                f"process group {live.group_name!r} already has {MOST} wrapped models, each with its own "
                "communicator; delete the models that are no longer used, or make another group"
            )
        number = highest.index(0)
        taken.add(number)
        self._free.append(partial(taken.discard, number))
        is_first = number == 0 and device_of(device).is_asynchronous
        if is_first or not can_connect_again(live, device):
            self._share(live)
            return None
        return dedicated_to(live, f"fnddp {number}", device=device)

    def _share(self, medium: Any) -> None:
        lanes = _sharing.setdefault(medium, weakref.WeakSet())
        if self not in lanes:
            lanes.add(self)
            self.shared.append(lanes)

    @property
    def is_alone(self) -> bool:
        """True if no other lane uses its communicators. Only then its steps may send before they end."""
        return all(len(lanes) == 1 for lanes in self.shared)

    def wire(self, wire: Wire, groups: Iterable[str | None]) -> Wire:
        """Return `wire`, with this lane's communicators in place of `groups`."""
        named = {group: self._own.get(live_group(group)) for group in groups} if self._own else {}
        own = {group: name for group, name in named.items() if name is not None}
        return C10d(own) if own else wire

    def __del__(self) -> None:
        if self.begun == self.ended and self.broken is None:  # otherwise messages may still be under way
            for free in self._free:
                free()
