"""torch.distributed as a wire."""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp.torch_private import connect_again, without_modes
from fnddp.wire.gloo_messages import LARGE, Messages, faster, is_gloo_on_cpu
from fnddp.wire.groups import World, live_group, live_rank, live_size, within
from fnddp.wire.kinds import Kind
from fnddp.wire.protocol import CollectiveError, Wire, Work


class C10d:
    """The wire of torch.distributed: collectives in place, on memory of the caller.

    On a large payload the functional collectives spend more time in their copy than in the sum.

    Args:
        own: For groups (by name) the name of the one dedicated to them, which is used instead.
    """

    def __init__(self, own: Mapping[str | None, str] = MappingProxyType({})) -> None:
        self._own = own

    def size(self, group: str | None) -> int:
        """See `Wire.size`."""
        return live_size(group)

    def rank(self, group: str | None) -> int:
        """See `Wire.rank`."""
        return live_rank(group)

    def start(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: str | None) -> Work:
        """See `Wire.start`."""
        live = self._live(group, send.device)
        is_large = receive.nbytes >= LARGE and not send.is_cuda
        steps = faster(kind, send, receive, op, live) if is_large else None
        return kind.start(send, receive, op, live) if steps is None else Messages(steps)

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, Work]:
        """See `Wire.vote`. (A gather takes gloo half as many messages as a reduction.)"""
        live = self._live(group, flags.device)
        gathered = flags.new_empty((live.size(), *flags.shape))
        with without_modes():  # WireCounter's
            work: Any = dist.all_gather(list(gathered), flags, group=live, async_op=True)
        return gathered, work

    def broadcast_object(self, value: Any, group: str | None, device: torch.device) -> Any:
        """Return the first rank's `value`."""
        values = [value]
        with without_modes():
            dist.broadcast_object_list(values, group=self._live(group, device), device=device, group_src=0)
        return values[0]

    def __reduce__(self) -> Any:
        # A copy of the default wire is the default wire.
        return "C10D" if self is C10D else (C10d, (dict(self._own),))

    def _live(self, group: str | None, device: torch.device) -> dist.ProcessGroup:
        return live_group(group if device.type == "cuda" else self._own.get(group, group))  # these are gloo's


C10D = C10d()


def over(wire: Wire, sync: Callable[..., Any]) -> Callable[..., Any]:
    """Return `sync` with collectives over `wire`; itself over torch.distributed, which torch.compile traces."""
    if wire is C10D:
        return sync

    def run(*args: Any, **kwargs: Any) -> Any:
        with within(World(wire)):
            return sync(*args, **kwargs)

    return run


# By the group over whose ranks they are, and by use: the name of each, or the reason that there is none.
_dedicated: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Future[str]]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def with_dedicated_groups(wire: Wire, groups: Iterable[str | None]) -> Wire:
    """Return a wire whose collectives cannot meet any others on `groups`: a user's own, within backward.

    On gloo, messages meet in the order in which they are sent, and the moment at which a plan sends is a matter of
    timing. So each gloo group gets a second one over the same ranks, once: in a few milliseconds, with one more
    connection between each two ranks. Another wire than torch.distributed is returned as it is.

    Raises:
        CollectiveError: Another rank of a group did not come within the timeout of that group, now or before.
    """
    if type(wire) is not C10d:
        return wire
    named = [(group, live_group(group)) for group in groups if dist.is_initialized()]
    own = {group: dedicated_to(live, "fnddp") for group, live in named if is_gloo_on_cpu(live)}
    return C10d(own) if own else wire


def dedicated_to(group: dist.ProcessGroup, use: str, timeout: timedelta | None = None) -> str:
    """Return the name of a gloo group over the ranks of `group` for one use, which the first call of each rank makes.

    It raises as `with_dedicated_groups`.
    """
    with _lock:
        uses = _dedicated.setdefault(group, {})
        is_first = use not in uses
        made = uses.setdefault(use, Future())
    if is_first:  # without the lock: threads may connect several groups, in another order on each rank
        try:
            made.set_result(connect_again(group, f"{group.group_name}/{use}", timeout).group_name)
        except BaseException as error:
            reason = str(error) or type(error).__name__
            made.set_exception(
                CollectiveError(
                    f"the ranks of process group {group.group_name!r} could not be connected for {use}: {reason}. All "
                    "of its ranks must do so, for pipelines in the same order; another rank has failed, left, or not "
                    "come to this point; see its own error"
                )
            )
            if not isinstance(error, RuntimeError):  # such as a KeyboardInterrupt, which is this call's alone
                raise
    return made.result()
