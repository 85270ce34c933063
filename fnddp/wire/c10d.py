"""torch.distributed as a wire."""

import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp.torch_private import backend_timeout, without_modes
from fnddp.wire.gloo_messages import Messages, faster, is_gloo_on_cpu
from fnddp.wire.groups import live_group, live_rank, live_size
from fnddp.wire.kinds import Kind
from fnddp.wire.protocol import Wire, Work


class C10d:
    """The wire of torch.distributed: collectives in place, on memory of the caller.

    On a large payload the functional collectives spend more time in their copy than in the sum.

    Args:
        own: For groups (by name) the name of another one over the same ranks that is used instead.
    """

    def __init__(self, own: Mapping[str | None, str] = MappingProxyType({})) -> None:
        self._own = own

    def size(self, group: str | None) -> int:
        """See `Wire.size`."""
        return live_size(group)

    def rank(self, group: str | None) -> int:
        """See `Wire.rank`."""
        return live_rank(group)

    def start(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: str | None, tag: int = 0) -> Work:
        """See `Wire.start`."""
        live = self._live(group, send.device)
        steps = faster(kind, send, receive, op, live, tag)
        return kind.start(send, receive, op, live) if steps is None else Messages(steps)

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, Work]:
        """See `Wire.vote`. (A gather takes gloo half as many messages as a reduction.)"""
        live = self._live(group, flags.device)
        gathered = flags.new_empty((live.size(), *flags.shape))
        with without_modes():  # WireCounter's
            work: Any = dist.all_gather(list(gathered), flags, group=live, async_op=True)
        return gathered, work

    def broadcast_object(self, value: Any, group: str | None, device: torch.device) -> Any:
        """`value` as the first rank has it: the host waits for it."""
        values = [value]
        with without_modes():
            dist.broadcast_object_list(values, group=self._live(group, device), device=device, group_src=0)
        return values[0]

    def __reduce__(self) -> Any:
        # A copy of the default wire is the default wire.
        return "C10D" if self is C10D else (C10d, (dict(self._own),))

    def _live(self, group: str | None, device: torch.device) -> dist.ProcessGroup:
        return live_group(group if device.type == "cuda" else self._own.get(group, group))  # twins are gloo's


C10D = C10d()

# By the group over whose ranks they are. They live as long as torch.distributed knows them.
_twins: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()


def apart(wire: Wire, groups: Iterable[str | None]) -> Wire:
    """A wire whose collectives cannot meet others on the same groups, for launches whose moment is a matter of timing.

    On gloo, messages meet in the order in which they are sent. Where that is decided by polling, a collective of the
    user's own within backward would meet ours. So gloo groups get a twin over the same ranks, made once, by all ranks
    of the group: a few milliseconds and one more connection between each two ranks.

    Args:
        wire: Another wire than torch.distributed is given back as it is.
        groups: By name; those of one rank need no twin.
    """
    if type(wire) is not C10d:
        return wire
    own: dict[str | None, str] = {}
    for group in groups:
        live = live_group(group)
        if is_gloo_on_cpu(live):
            if live not in _twins:
                _twins[live] = _new_twin(live)
            own[group] = _twins[live]
    return C10d(own) if own else wire


def _new_twin(group: dist.ProcessGroup) -> str:
    twin: Any = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=backend_timeout(group),
        backend="gloo",
        use_local_synchronization=True,
    )
    return twin.group_name
