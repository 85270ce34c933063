"""torch.distributed as a wire, with point-to-point messages where gloo's collectives are slow."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from itertools import chain, count, starmap
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp.device import device_of
from fnddp.torch_private import connect_again, functional_collectives, is_torchcomms, keep_order, without_modes
from fnddp.wire.groups import GroupName, World, live_group, live_rank, live_size, within
from fnddp.wire.kinds import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Kind, Work, gather_call, waited
from fnddp.wire.protocol import CollectiveError, Wire, reporting

_TAGS = 0x666E0000  # away from the tags of a user's own messages
_MOST = 2**16  # tags in use
LARGE = 2**18  # bytes of a result on the CPU; for less, messages cost more than they save

_CPU = torch.device("cpu")

_lock = threading.Lock()  # guards the dicts below; their keys are groups

# Tags of each group's collectives, counted up, because a ring still posts messages while later collectives run.
_tags: "weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]]" = weakref.WeakKeyDictionary()

Steps: TypeAlias = Iterator[list[dist.Work]]
"""An iterator that posts messages, yields them, and continues once they are complete."""


class Messages:
    """A collective made of messages, as a `Work`. `begin` starts it.

    gloo reports that a message is complete only to a thread that waits for it. So a separate thread waits, and posts
    the next messages, while the host computes. That thread also takes the tag, because no interrupt can come there.
    """

    def __init__(self, steps: Callable[[int], Steps], group: dist.ProcessGroup) -> None:
        self._over, self._has_tag = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._steps, self._group, self._threads = steps, group, count()

    def begin(self) -> None:
        """Post the messages in a thread. A second call does nothing, unless an interrupt broke off the first one."""
        threading.Thread(target=self._carry_on, daemon=True).start()
        self._has_tag.wait()  # wait, so that the next collective takes the next tag

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        if not self._has_tag.is_set():
            self.begin()
        self._over.wait()
        if self._error is not None:
            raise self._error

    def _carry_on(self) -> None:
        if next(self._threads):  # another thread does it
            return
        tag = _next_tag(self._group)
        self._has_tag.set()
        try:
            with torch.inference_mode():  # the buffers may be inference tensors
                for work in chain.from_iterable(self._steps(tag)):
                    waited(work)
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()


class _Over:
    """A complete collective, as a `Work`."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Started(threading.local):
    """The list that receives the next collective of this thread, in the same operation that starts it."""

    def __init__(self) -> None:
        self.works: list[Any] = []


_started = _Started()


def start_into(works: list[Any], start: Callable[[], Any]) -> None:
    """Call `start` (the `start` or `vote` of a wire) and put its result into `works`, an empty list.

    If an interrupt breaks it off, `works` is empty only if the collective was not started. This holds for the wire of
    torch.distributed only: on other wires an empty list tells nothing.
    """
    _started.works = works
    works[:] = [start()]
    _started.works = []  # another wire has not removed it


def is_gloo_on_cpu(group: dist.ProcessGroup) -> bool:
    """Return whether `group` has several ranks and uses torch's gloo (not torchcomms's) for tensors on the CPU."""
    return group.size() > 1 and "cpu:gloo" in dist.get_backend_config(group) and not is_torchcomms(group)


def faster(
    kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: dist.ProcessGroup
) -> Callable[[int], Steps] | None:
    """Return a function from a tag to messages, if these are faster than this collective on all ranks; else None."""
    if not is_gloo_on_cpu(group):
        return None
    if kind is ALL_REDUCE and send.dtype == torch.float16 and op == "sum":
        return partial(ring, send, group)
    if kind in (ALL_GATHER, ALL_TO_ALL):
        return partial(direct, send if kind.sends_rows else send.expand_as(receive), receive, group)
    return None


def issue(kind: Kind, payloads: Sequence[Tensor], op: str | None, n: int, group: str) -> list[Tensor]:
    """Start a functional collective of each payload, in order. The caller must wait for all results.

    In a graph, each payload depends on the previous collective. Each rank compiles its own graph, and graphs differ by
    data sizes and used leaves. Without the dependency a compiler could order collectives differently on each rank, or
    merge two collectives with equal payloads of zeros.
    """
    if not torch.compiler.is_compiling():
        return [_eager(kind, payload, op, n, group) for payload in payloads]
    started: list[Tensor] = []
    for payload in payloads:
        turn = _TURN(started[-1] if started else payload)
        started.append(_compiled(kind, torch.where(turn, payload, 0), op, n, group))
    for last in started[-1:]:
        _TURN(last)  # before those of later calls
    return started


# A group's gloo threads write the name of their last work to one string without a lock (ProcessGroupGloo::runLoop,
# torch 2.11 to 2.14). Two threads may both free the memory of a name of more than 15 characters, and torch's functional
# all_gather has such a name, ALLGATHER_COALESCED. Its `_out` form, _ALLGATHER_BASE, writes to an argument, and a graph
# must not do that. So ALLTOALL_BASE sends n copies of the payload: the same bytes.
def _eager(kind: Kind, payload: Tensor, op: str | None, n: int, group: str) -> Tensor:
    is_gloo = payload.device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(live_group(group))
    if kind is not ALL_GATHER or not is_gloo:
        return kind.trace(payload, op, n, group)
    gathered = payload.new_empty(ALL_GATHER.joined_shape(tuple(payload.shape), n))
    return functional_collectives.all_gather_into_tensor_out(payload.contiguous(), n, group, out=gathered)


def _compiled(kind: Kind, payload: Tensor, op: str | None, n: int, group: str) -> Tensor:
    if kind is not ALL_GATHER or payload.device.type != "cpu":
        return kind.trace(payload, op, n, group)
    return ALL_TO_ALL.trace(payload.repeat(n, *[1] * (payload.ndim - 1)), None, n, group)


def _true(after: Tensor) -> Tensor:
    return after.new_ones((), dtype=torch.bool)


# Compilers keep the order of its calls, and do not know that its result is always true.
torch.library.define("fnddp::turn", "(Tensor after) -> Tensor", tags=())
torch.library.impl("fnddp::turn", "CompositeExplicitAutograd", _true)
torch.library.register_fake("fnddp::turn", _true)
keep_order("fnddp::turn")
_TURN: Any = torch.ops.fnddp.turn.default


def _next_tag(group: dist.ProcessGroup) -> int:
    """Return a tag for the next collective of `group`. It is the same on all ranks if their order of calls is."""
    with _lock:
        return _TAGS + next(_tags.setdefault(group, count())) % _MOST


def ring(buffer: Tensor, group: dist.ProcessGroup, tag: int) -> Steps:
    """Run gloo's ring with torch's sum, because gloo adds float16 numbers one by one and takes three times as long.

    It is a reduce-scatter and an all-gather of one chunk for each rank, in n - 1 messages each. Each element is summed
    on one rank, in the order of the ring, so all ranks get the same bits.
    """
    rank, n = group.rank(), group.size()
    chunks = list(buffer.tensor_split(n))
    received = torch.empty_like(chunks[0])  # the first chunk is the largest
    for step in range(2 * (n - 1)):
        # In step s of the first half, rank r sends chunk r - s and adds chunk r - s - 1; the second half is one ahead.
        outgoing, target = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        adds = step < n - 1
        incoming = received[: target.numel()] if adds else target
        after, before = (rank + 1) % n, (rank - 1) % n
        yield [group.recv([incoming], before, tag), group.send([outgoing], after, tag)]
        if adds:
            target += incoming


def direct(send: Tensor, receive: Tensor, group: dist.ProcessGroup, tag: int) -> Steps:
    """Send row r of `send` to each rank r, and receive from rank r into row r of `receive`, at the same time.

    gloo's own collective sends before it requests the data to receive. On a rank that starts late the request then
    waits for the rank's own payload, so the two transfers are sequential: twice the time on two ranks.
    """
    rank, n = group.rank(), group.size()
    others = [(rank + i) % n for i in range(1, n)]
    works = [group.recv([receive[other]], other, tag) for other in reversed(others)]
    works += [group.send([send[other]], other, tag) for other in others]
    receive[rank].copy_(send[rank])
    yield works


class C10d:
    """The wire of torch.distributed: collectives in place, on the caller's memory.

    For a large payload, functional collectives spend more time on their copy than on the sum.

    Args:
        own: Names of dedicated groups, each used instead of the group that is its key.
    """

    def __init__(self, own: Mapping[str | None, str] = MappingProxyType({})) -> None:
        self._own = own

    size = staticmethod(live_size)
    rank = staticmethod(live_rank)

    def start(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: str | None) -> Work:
        """See `Wire.start`."""
        live = self._live(group)
        if live.size() == 1:  # torch.distributed would take 0.2 ms for it
            if not kind.is_in_place:
                receive.view(-1).copy_(send.view(-1))
            return _Over()
        is_large = receive.nbytes >= LARGE and not device_of(send.device).is_asynchronous
        steps = faster(kind, send, receive, op, live) if is_large else None
        works, _started.works = _started.works, []
        if steps is None:
            start, arguments = kind.call(send, receive, op, live)
            works.extend(starmap(start, [arguments]))
        else:
            works.append(Messages(steps, live))
            works[-1].begin()
        return works[-1]

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, Work]:
        """See `Wire.vote`. It gathers, because gloo needs half as many messages for that as for a reduction."""
        live = self._live(group)
        gathered = flags.new_empty((live.size(), *flags.shape))
        start, arguments = gather_call(gathered, flags, live)
        votes, _started.works = _started.works, []
        with without_modes():  # a WireCounter must not count votes
            votes.extend(zip([gathered], starmap(start, [arguments]), strict=True))
        return votes[-1]

    def broadcast_object(self, value: Any, group: str | None, device: torch.device) -> Any:
        """Return the first rank's `value`."""
        values = [value]
        with without_modes():
            dist.broadcast_object_list(values, group=self._live(group), device=device, group_src=0)
        return values[0]

    def __reduce__(self) -> Any:
        # A copy of the default wire is the default wire.
        return "C10D" if self is C10D else (C10d, (dict(self._own),))

    def _live(self, group: str | None) -> dist.ProcessGroup:
        return live_group(self._own.get(group, group))


C10D = C10d()


def over(wire: Wire, sync: Callable[..., Any]) -> Callable[..., Any]:
    """Return `sync` with collectives over `wire`; for torch.distributed `sync` itself, for torch.compile to trace."""
    if wire is C10D:
        return sync

    def run(*args: Any, **kwargs: Any) -> Any:
        with within(World(wire)):
            return sync(*args, **kwargs)

    return reporting(wire, run)


# Names of dedicated groups, by the group of the same ranks and by use; or the error that prevented it.
_dedicated: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Future[str]]]" = weakref.WeakKeyDictionary()


def can_connect_again(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether `dedicated_to` can make another group of the same ranks for tensors on `device`."""
    return (device_of(device).is_asynchronous and not is_torchcomms(group)) or is_gloo_on_cpu(group)


def not_connected(group: dist.ProcessGroup, use: str, error: BaseException) -> CollectiveError:
    return CollectiveError(
        f"the ranks of process group {group.group_name!r} could not be connected for {use}: "
        f"{str(error) or type(error).__name__}. All ranks of the group must connect, for pipelines in the same order; "
        "another rank has failed, has left, or has not reached this point; see its own error"
    )


def dedicated_to(
    group: dist.ProcessGroup, use: str, timeout: timedelta | None = None, device: torch.device = _CPU
) -> str:
    """Return the name of a group over the ranks of `group` for one use. The first call on each rank creates it.

    gloo matches messages in the order in which they are sent, and when a plan sends depends on timing. So only messages
    that all ranks send in the same order may share a group. A new group takes a few milliseconds, and one more
    connection between each two ranks.

    Args:
        timeout: Timeout of the new group; None for the timeout of `group`.
        device: Device of the tensors that it moves; on the CPU by gloo.

    Raises:
        CollectiveError: Another rank of the group did not make this call within the timeout, now or earlier.
    """
    with _lock:
        uses = _dedicated.setdefault(group, {})
        is_first = use not in uses
        made = uses.setdefault(use, Future())
    if is_first:  # without the lock, because ranks may connect several groups in different orders
        try:
            connected = connect_again(group, f"{group.group_name}/{use}", timeout, device)
            made.set_result(GroupName(connected.group_name, connected))
        except BaseException as error:
            made.set_exception(not_connected(group, use, error))
            if not isinstance(error, RuntimeError):  # a KeyboardInterrupt, for example, concerns this call only
                raise
    return made.result()


EXIT_SECONDS = 0.05


def _let_threads_finish() -> None:
    """Let gloo's threads take the interpreter's lock (GIL) before the interpreter shuts down.

    They need the lock to free tensors of a complete collective. If shutdown begins while they wait for it, they abort
    the process (pytorch/pytorch#190489), and a successful run ends with SIGABRT. This also happens after the process
    group is destroyed, because models and meshes keep it alive.
    """
    time.sleep(EXIT_SECONDS)


atexit.register(_let_threads_finish)
