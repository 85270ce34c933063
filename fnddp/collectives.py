"""The only file that touches torch.distributed's collectives.

`all_reduce` uses the functional collectives, which trace under make_fx and Dynamo. Without a process group the world
has one rank and a collective is a copy, so a pipeline runs, and loses what it loses, in a plain Python process.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

# torch.func's first call imports it, and its default arguments hold on to the default group of that moment: imported
# after init_process_group, it keeps gloo's threads alive beyond destroy_process_group, and ranks abort at exit.
import torch.distributed.nn.functional  # pyright: ignore[reportUnusedImport]
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, peek_interpreter_stack
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from fnddp import layout
from fnddp.tree import Leaves, is_inexact

Group: TypeAlias = dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str] | str | None
"""A process group, its name, a one-dimensional mesh, one dimension of a mesh, or None for the default group."""

_ops: Any = torch.ops._c10d_functional

_WIRE_OP = {"mean": "sum", "sum": "sum", "max": "max", "min": "min"}
OPS = tuple(_WIRE_OP)
_C10D_OP = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


BROADCAST_BYTES = 250 * 2**20
"""Size of a message of `broadcast`."""

DEFAULT_GROUP = "default"
"""How the default group is called in a graph that is traced within `planned_world`."""


@dataclass(frozen=True)
class _Planned:
    size: int | None


_planned: ContextVar[_Planned | None] = ContextVar("_planned", default=None)


@contextmanager
def planned_world(size: int | None) -> Generator[None]:
    """Within the block a pipeline can be traced, never run, as if every group had `size` ranks.

    With None groups have the ranks that they have. Either way the traced collectives name groups as the pipeline does.
    torch's fake process group would do the same for a whole process, and only where none is initialized.
    """
    token = _planned.set(_Planned(size))
    try:
        yield
    finally:
        _planned.reset(token)


def _planning() -> _Planned | None:
    return _planned.get()


_planning._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]  # see _is_differentiating


def group_name(group: Group) -> str | None:
    """The name of `group`, which stands for it in a pipeline: names compare, print, parse and pickle.

    The default group's is None.

    Raises:
        TypeError: `group` is none of the kinds of `Group`.
    """
    if group is None or isinstance(group, str):
        return group
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        mesh, dim = group
        return group_name(mesh.get_group(dim))
    if isinstance(group, DeviceMesh):
        return group_name(group.get_group())
    if isinstance(group, dist.ProcessGroup):
        return None if group is dist.group.WORLD else group.group_name
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            "group is NON_GROUP_MEMBER: this rank is not in that process group; build its pipeline on members"
        )
    raise TypeError(f"group must be a ProcessGroup, its name, a DeviceMesh or (mesh, dim), got {group!r}")


def world_size(group: str | None) -> int:
    """The number of ranks in `group`; 1 without torch.distributed.

    Raises:
        RuntimeError: A launcher started several ranks but the process group is not initialized, or a group is named.
    """
    planned = _planning()
    if planned is not None and planned.size is not None:
        return planned.size
    if dist.is_initialized():
        # By name: Dynamo cannot trace the resolution of a named group.
        return c10d._get_group_size_by_name(_live_name(group))  # pyright: ignore[reportPrivateUsage, reportArgumentType]
    if group is not None:
        raise RuntimeError(f"process group {group!r} is named, but torch.distributed is not initialized")
    launched = os.environ.get("WORLD_SIZE", "1") if dist.is_torchelastic_launched() else "1"
    if launched != "1":
        raise RuntimeError(
            f"the launcher started {launched} ranks, but torch.distributed is not initialized, so nothing would be "
            "synchronized; call torch.distributed.init_process_group() first"
        )
    return 1


def current_world() -> tuple[bool, int]:
    """Whether there is a process group, and the size of the default one: what a plan is made for."""
    return dist.is_initialized(), world_size(None)


def rank(group: str | None) -> int:
    """This process's rank in `group`; 0 without torch.distributed."""
    return dist.get_rank(live_group(group)) if dist.is_initialized() else 0


def all_reduce(leaves: Leaves, op: str, group: str | None) -> Leaves:
    """Reduces every leaf over the ranks of `group`: all are issued, in the order of their paths, then all are awaited.

    A mean is divided before it is summed, so what fits the dtype never overflows in the sum (torch's hooks do the
    same). Integers travel as int64, which their sum must fit; their mean is rounded to the nearest, halves up, and the
    mean of a bool is the majority, ties True. Leaves without elements do not travel.

    Raises:
        RuntimeError: Inside torch.func.grad or jvp; inside vmap with a process group; on a failed collective.
        ValueError: "max" or "min" of complex numbers.
    """
    _refuse_differentiation()
    _refuse_batching()
    n = world_size(group)
    # By path, not by insertion: dicts that were filled in another order on another rank still match.
    wires = {path: _encode(path, leaves[path], op, n) for path in sorted(leaves)}
    planned = _planning()
    if dist.is_initialized() or (planned is not None and planned.size is not None):
        name = _live_name(group) if planned is None else group or DEFAULT_GROUP
        travelling = [path for path, wire in wires.items() if wire.numel()]
        issued = {path: _ops.all_reduce(wires[path], _WIRE_OP[op], name) for path in travelling}
        wires |= {path: _ops.wait_tensor(wire) for path, wire in issued.items()}
    else:
        wires = {path: wire.clone() for path, wire in wires.items()}  # a result never shares memory with an input
    return {path: _decode(wires[path], leaf, op, n) for path, leaf in leaves.items()}


def all_gather(tensor: Tensor, group: str | None) -> Tensor:
    """Every rank's `tensor`, of one shape and dtype on all, in rank order: `[ranks, *shape]`."""
    _refuse_batching()
    n = world_size(group)
    # As bytes: nothing is computed, so a dtype that the backend does not know may travel as well.
    # A view as bytes needs a last stride of 1, which a single element of a strided tensor does not have.
    wire = layout.to_wire(tensor).reshape(-1).unsqueeze(-1).view(torch.uint8).reshape(-1)
    if dist.is_initialized() and wire.numel():
        gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(wire, n, _live_name(group)))
    else:
        gathered = wire.repeat(n)
    return gathered.view(tensor.dtype).reshape(n, *tensor.shape)


def reduce_scatter(tensor: Tensor, group: str | None) -> Tensor:
    """This rank's slice, `[*shape]`, of the sum over ranks of `tensor: [ranks, *shape]`."""
    _refuse_batching()
    wire = layout.to_wire(tensor)
    if dist.is_initialized() and wire.numel():
        part = _ops.wait_tensor(_ops.reduce_scatter_tensor(wire, "sum", world_size(group), _live_name(group)))
    else:
        part = wire.clone()
    return (torch.view_as_complex(part) if tensor.is_complex() else part)[0]


def start_all_reduce(buffer: Tensor, op: str, group: str | None, tag: int = 0) -> "Work":
    """Starts the reduction of `buffer` over the ranks of `group`, in place.

    For buffers that nobody else reads: on a large payload the functional collectives spend more time in their copy
    than in the sum. The buffer is neither read nor written until the work is waited for.

    Args:
        buffer: Dense and contiguous; of a dtype that the backend reduces.
        op: "sum", "max" or "min".
        group: The name of a process group; None for the default one.
        tag: Tells collectives apart that are under way at the same time; the same on all ranks.

    Raises:
        ValueError: `op` is none of these (no backend takes the mean of every dtype: divide first), or
            torch.distributed is not initialized.
    """
    if op not in _C10D_OP:
        raise ValueError(f"start_all_reduce: op must be one of {', '.join(_C10D_OP)}, got {op!r}")
    live = live_group(group)
    if _is_slow_on_gloo(buffer, op, live):
        return _RingAllReduce(buffer, live, tag)
    work = dist.all_reduce(buffer, _C10D_OP[op], group=live, async_op=True)
    assert work is not None  # None for a rank outside of the group, which has no name for it
    return work


class Work(Protocol):
    """A collective that has been started."""

    def is_completed(self) -> bool:
        """Whether it is done. Asking may carry it on."""
        ...

    def wait(self) -> object:
        """Returns when it is done; on CUDA, when the current stream will wait for it."""
        ...


class _RingAllReduce:
    """gloo adds float16 one number at a time; this is its ring with torch's sum: a third of the time.

    A reduce-scatter and an all-gather of one chunk for each rank, in n - 1 messages each. Every element is added up on
    one rank, in the order of the ring, so all ranks get the same bits.
    """

    def __init__(self, buffer: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        torch.ops.fnddp.count_all_reduce(buffer)
        self._group, self._tag = group, _RING_TAGS + tag
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
            work.wait()
        self._pending = []
        if self._reduces:
            self._target += self._received[: self._target.numel()]
        self._step += 1
        if self._step < 2 * (self._size - 1):
            self._send_and_receive()


def _do_nothing(payload: Tensor) -> None:
    pass


# For WireCounter: a ring hands its payload over in pieces.
_library = torch.library.Library("fnddp", "DEF")
_library.define("count_all_reduce(Tensor payload) -> ()")
_library.impl("count_all_reduce", _do_nothing, "CompositeExplicitAutograd")

_RING_TAGS = 0x666E0000  # away from the tags of a user's own messages
_RING_NUMEL = 2**16  # below, messages cost more than sums


def _is_slow_on_gloo(buffer: Tensor, op: str, group: dist.ProcessGroup) -> bool:
    if buffer.dtype != torch.float16 or op != "sum" or buffer.numel() < _RING_NUMEL or buffer.is_cuda:
        return False
    return group.size() > 1 and "gloo" in dist.get_backend_config(group)


def start_gather_status(flags: Tensor, group: str | None) -> tuple[Tensor, "Work"]:
    """Starts to gather the few flags of every rank of `group`: a control message, which is no payload.

    Returns:
        What will be `[ranks, flags]` once the work is waited for, and the work. (A gather takes gloo half as many
        messages as a reduction.)
    """
    gathered = flags.new_empty((world_size(group), *flags.shape))
    with _disable_current_modes():  # WireCounter's
        work = dist.all_gather(list(gathered), flags, group=live_group(group), async_op=True)
    assert work is not None
    return gathered, work


def total(value: int, group: str | None) -> int:
    """The sum of `value` over the ranks of `group`: a control message, for which the host waits."""
    return _reduced(value, "sum", group)


def highest(value: int, group: str | None) -> int:
    """The largest `value` of the ranks of `group`: a control message, for which the host waits."""
    return _reduced(value, "max", group)


def _reduced(value: int, op: str, group: str | None) -> int:
    with _disable_current_modes():  # WireCounter's
        flag = torch.tensor([value], device=wire_device(group))
        start_all_reduce(flag, op, group).wait()
        return int(flag.item())


def wire_device(group: str | None) -> torch.device:
    """Where the payloads of `group` live: the current CUDA device for NCCL, the CPU otherwise."""
    on_cuda = "nccl" in dist.get_backend(live_group(group))
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def broadcast(tensors: list[Tensor], group: str | None, *, source: int = 0) -> None:
    """Makes `tensors` equal to those of the group's rank `source`, in place, in few large messages."""
    if dist.is_initialized() and tensors:
        dist._broadcast_coalesced(live_group(group), tensors, BROADCAST_BYTES, source)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def all_gather_object(value: Any, group: str | None) -> list[Any]:
    """`value` of every rank, in rank order: for set-up, never inside a step."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * world_size(group)
    with _disable_current_modes():  # WireCounter's: this is no payload
        dist.all_gather_object(gathered, value, group=live_group(group))
    return gathered


def broadcast_object(value: Any, group: str | None) -> Any:
    """`value` as the first rank of `group` has it: for set-up, never inside a step."""
    live = live_group(group)
    carried = [value]
    with _disable_current_modes():  # WireCounter's: this is no payload
        dist.broadcast_object_list(carried, src=dist.get_global_rank(live, 0), group=live)
    return carried[0]


def all_gather_bytes(value: bytes, group: str | None) -> list[bytes]:
    """`value` of every rank, of the same length on all."""
    if not dist.is_initialized():
        return [value]
    mine = torch.frombuffer(bytearray(value), dtype=torch.uint8).to(wire_device(group))
    gathered = [torch.empty_like(mine) for _ in range(world_size(group))]
    dist.all_gather(gathered, mine, group=live_group(group))
    return [bytes(part.tolist()) for part in gathered]


def _encode(path: str, leaf: Tensor, op: str, n: int) -> Tensor:
    if leaf.is_complex() and op in ("max", "min"):
        raise ValueError(f"all_reduce: leaf {path!r} is {leaf.dtype}, which has no {op}; reduce it with mean or sum")
    wire = layout.to_wire(leaf)
    if not is_inexact(leaf):
        return wire.to(torch.int64)
    return wire / n if op == "mean" else wire


def _decode(wire: Tensor, leaf: Tensor, op: str, n: int) -> Tensor:
    if not is_inexact(leaf):
        if op == "mean":
            wire = torch.div(wire, n, rounding_mode="floor") + (2 * (wire % n) >= n)
        wire = wire.to(leaf.dtype)
    return layout.from_wire(wire, leaf)


def _live_name(group: str | None) -> str:
    return live_group(None).group_name if group is None else group


def live_group(group: str | None) -> dist.ProcessGroup:
    """The process group of that name."""
    if group is None:
        return c10d._get_default_group()  # pyright: ignore[reportPrivateUsage]
    return c10d._resolve_process_group(group)  # pyright: ignore[reportPrivateUsage, reportArgumentType]


def is_transforming() -> bool:
    """Whether this runs inside a torch.func transform, where collectives are not what they seem."""
    return peek_interpreter_stack() is not None


def _refuse_differentiation() -> None:
    # torch.func.jvp through a functional collective gives a zero tangent, silently; under torch.compile, so does grad.
    if _is_differentiating():
        raise RuntimeError(
            "a gradient synchronization cannot run inside torch.func.grad or jvp: its derivative is not defined; "
            "synchronize the gradients that they return"
        )


def _is_differentiating() -> bool:
    interpreter = peek_interpreter_stack()
    return interpreter is not None and interpreter.key() in (TransformType.Grad, TransformType.Jvp)


# Dynamo cannot trace the question, but asks it while tracing: what torch.compiler.assume_constant_result does, without
# its import of all of torch._dynamo.
_is_differentiating._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _refuse_batching() -> None:
    # torch has no rule for it: under vmap a functional collective returns what this rank had, or memory as it was.
    if dist.is_initialized() and _is_batching():
        raise RuntimeError(
            "a collective cannot run inside torch.func.vmap: call it on the whole batch, outside of vmap; "
            "fnddp.distributed.AllGatherGrad can"
        )


def _is_batching() -> bool:
    return any(interpreter.key() == TransformType.Vmap for interpreter in get_interpreter_stack() or ())


_is_batching._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
