"""The collectives of reducers and codecs, as pure functions on tensors.

They use the functional collectives of torch.distributed (traceable by make_fx and Dynamo), or the wire that the
pipeline runs on. Without a process group the world has one rank and a collective is a copy.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

# torch.func's first call imports it, and its default arguments hold on to the default group of that moment: imported
# after init_process_group, it keeps gloo's threads alive beyond destroy_process_group, and ranks abort at exit.
import torch.distributed.nn.functional  # pyright: ignore[reportUnusedImport]
from torch import Tensor

from fnddp.core import layout
from fnddp.core.tree import Leaves, is_inexact
from fnddp.torch_private import (
    functional_collectives,
    is_batching,
    is_differentiated,
    is_differentiating,
    is_forward_ad,
    reinterpreted,
    without_modes,
)
from fnddp.wire import control
from fnddp.wire.c10d import C10D, issue
from fnddp.wire.counter import count_payload
from fnddp.wire.groups import DEFAULT_GROUP, current, is_alone, live_name
from fnddp.wire.groups import rank as rank
from fnddp.wire.groups import ranks as ranks
from fnddp.wire.groups import world_size as world_size
from fnddp.wire.kinds import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Kind, waited
from fnddp.wire.kinds import sum_in_rank_order as sum_in_rank_order
from fnddp.wire.protocol import CollectiveError, Wire
from fnddp.wire.weights import Weight, require_weights

_wait: Any = functional_collectives.wait_tensor

OPS = ("mean", "sum", "max", "min")


def all_reduce(leaves: Leaves, op: str, *groups: str | None) -> Leaves:
    """Reduce every leaf over the ranks of a group: issue all, in the order of their paths, then await all.

    Over several groups, one after the other, it reduces over all ranks that they connect, such as those of a mesh.

    A mean divides before it sums, so values that fit the dtype never overflow in the sum (torch's hooks do the same).
    Integers are sent as int64, and their sum must fit into it; their mean is rounded to the nearest, halves up. The
    mean of bools is the majority, ties True. Leaves without elements are not sent.

    Raises:
        RuntimeError: Inside torch.func.grad or jvp, or with tangents of forward-mode AD; inside vmap with a process
            group; on a failed collective.
        ValueError: "max" or "min" of complex numbers.
    """
    n = math.prod([ranks(group) for group in groups]) if op == "mean" else 1
    # By path, not by insertion: dicts that were filled in another order on another rank still match.
    paths = sorted(leaves)
    wires = [_encode(path, leaves[path], op, n) for path in paths]
    for group in groups:
        wires = _exchange(ALL_REDUCE, wires, "sum" if op == "mean" else op, group)
    reduced = dict(zip(paths, wires, strict=True))
    return {path: _decode(reduced[path], leaf, op, n) for path, leaf in leaves.items()}


def all_gather(tensor: Tensor, group: str | None = None) -> Tensor:
    """Return every rank's `tensor`, of one shape and dtype on all, in rank order: `[ranks, *shape]`."""
    return all_gather_leaves({"": tensor}, group)[""]


def all_gather_leaves(leaves: Mapping[Any, Tensor], group: str | None = None) -> dict[Any, Tensor]:
    """Run an `all_gather` of every leaf, in the order of their paths."""
    n, rows = world_size(group), gather_rows({path: leaf.unsqueeze(0) for path, leaf in leaves.items()}, group)
    return {path: each.reshape(n, *leaves[path].shape) for path, each in rows.items()}


def gather_rows(leaves: Mapping[Any, Tensor], group: str | None = None) -> dict[Any, Tensor]:
    """Return the rows of all ranks, `[ranks, ...]`, from `[1, ...]` of every leaf."""
    paths = sorted(leaves)
    return dict(zip(paths, _exchange_bytes(ALL_GATHER, [leaves[path] for path in paths], group), strict=True))


def all_to_all(tensor: Tensor, group: str | None = None) -> Tensor:
    """Send row r of `tensor: [ranks, *shape]` to rank r; return the rows received from all ranks: `[ranks, *shape]`."""
    return all_to_all_leaves({"": tensor}, group)[""]


def all_to_all_leaves(leaves: Mapping[Any, Tensor], group: str | None = None) -> dict[Any, Tensor]:
    """Run an `all_to_all` of every leaf, in the order of their paths."""
    given = _rows_by_path("all_to_all", leaves, group)
    received = _exchange_bytes(ALL_TO_ALL, [*given.values()], group)
    return {path: rows.reshape(leaves[path].shape) for path, rows in zip(given, received, strict=True)}


def start_all_to_all(leaves: Mapping[Any, Tensor], group: str | None = None) -> Callable[[], dict[Any, Tensor]]:
    """Start an `all_to_all` of every leaf over torch.distributed; return a function that waits, and returns the rows.

    For code that computes meanwhile; plans do not record it. All ranks must call it in the same order as collectives.
    """
    given = _rows_by_path("all_to_all", leaves, group)
    wires = [layout.to_wire(leaf) for leaf in given.values()]
    wait = _started(C10D, ALL_TO_ALL, [_as_bytes(wire) for wire in wires], None, group, world_size(group))

    def received() -> dict[Any, Tensor]:
        rows = [_of_bytes(result, wire.dtype) for result, wire in zip(wait(), wires, strict=True)]
        return {path: each.reshape(leaves[path].shape) for path, each in zip(given, rows, strict=True)}

    return received


def reduce_scatter(tensor: Tensor, group: str | None = None) -> Tensor:
    """Return this rank's slice, `[*shape]`, of the sum over ranks of `tensor: [ranks, *shape]`."""
    return reduce_scatter_leaves({"": tensor}, group)[""]


def reduce_scatter_leaves(leaves: Mapping[Any, Tensor], group: str | None = None) -> dict[Any, Tensor]:
    """Run a `reduce_scatter` of every leaf: issue all, in the order of their paths, then await all."""
    given = _rows_by_path("reduce_scatter", leaves, group)
    wires = [layout.to_wire(leaf) for leaf in given.values()]
    parts = dict(zip(given, _exchange(REDUCE_SCATTER, wires, "sum", group), strict=True))
    return {path: layout.from_wire(parts[path][0], leaf[0]) for path, leaf in leaves.items()}


def scale_of_weight(weight: Weight | Tensor, group: str | None, device: torch.device) -> Tensor:
    """Return n w / W, the factor of this rank's gradients in a weighted mean over `group`; 0 if all weights are 0.

    If `weight` is a tensor, the host does not read it: in a plan, the step's vote finds invalid weights; under
    torch.compile, an assertion on the device.

    Raises:
        ValueError: On all ranks: a rank passed no weight or an invalid one, or all weights are 0.
        CollectiveError: Another rank has failed.
    """
    if isinstance(weight, Tensor):
        mine = weight.to(device, torch.float64).reshape(())
        if torch.compiler.is_compiling():
            mine = torch.where((mine >= 0) & mine.isfinite(), mine, torch.nan)
    else:
        mine = torch.tensor(weight.number, dtype=torch.float64, device=device)
    total = all_reduce({"weight": mine}, "sum", group)["weight"]
    if torch.compiler.is_compiling():
        torch.ops.aten._assert_async.msg(total > 0, "weight: one is negative or not finite, or all ranks gave 0")
    elif isinstance(weight, Weight) and not total.item() > 0:
        wire = current().wire or C10D
        require_weights([weight] if is_alone() else control.gather_over(wire, weight, group, device))
    return torch.where(total > 0, mine / (total / ranks(group)), 0.0)


def _rows_by_path(name: str, leaves: Mapping[Any, Tensor], group: str | None) -> dict[Any, Tensor]:
    """Return `leaves` in the order of their paths; raise a ValueError unless each has a row for each rank."""
    given, n = {path: leaves[path] for path in sorted(leaves)}, world_size(group)
    for leaf in given.values():
        if leaf.ndim == 0 or leaf.shape[0] != n:
            raise ValueError(f"{name}: expected a row for each of {n} ranks, got a tensor of shape {tuple(leaf.shape)}")
    return given


def _exchange_bytes(kind: Kind, tensors: Sequence[Tensor], group: str | None) -> list[Tensor]:
    """Run a kind of collective that computes nothing; `tensors`, of any dtype, are sent as bytes."""
    wires = [layout.to_wire(tensor) for tensor in tensors]
    if current().traced or current().simulated is not None:  # plans convert to bytes; simulated ranks have no wire
        results = _exchange(kind, wires, None, group)
    else:
        n = world_size(group)
        received = _exchange(kind, [_as_bytes(wire) for wire in wires], None, group)
        results = [
            _of_bytes(result, wire.dtype).reshape(kind.joined_shape(tuple(wire.shape), n))
            for result, wire in zip(received, wires, strict=True)
        ]
    return [layout.as_complex(r) if tensor.is_complex() else r for r, tensor in zip(results, tensors, strict=True)]


def _as_bytes(wire: Tensor) -> Tensor:
    # A view as bytes needs a last stride of 1. A single element may have any: of a strided tensor, and of every tensor
    # in a graph that torch 2.11 compiles. So there are two of it.
    flat = wire.reshape(-1).contiguous() if wire.numel() != 1 else wire.reshape(1).repeat(2)
    size = wire.numel() * wire.element_size()
    return reinterpreted(flat, torch.uint8)[:size].reshape(wire.shape[0], -1)


def _of_bytes(result: Tensor, dtype: torch.dtype) -> Tensor:
    return reinterpreted(result.reshape(-1), dtype)


def _exchange(kind: Kind, payloads: Sequence[Tensor], op: str | None, group: str | None) -> list[Tensor]:
    """Run a collective of `kind` for each payload: issue all, then await all.

    Rows from the ranks are joined along the first dimension of the payload.
    """
    if kind.computes:  # data from other ranks is a constant in a derivative
        refuse_differentiation(payloads)
    # torch has no vmap rule: a functional collective then returns this rank's own data, or uninitialized memory.
    if current().simulated is None and dist.is_initialized() and is_batching():
        raise RuntimeError(
            "a collective cannot run inside torch.func.vmap: call it on the whole batch, outside of vmap"
        )
    n = world_size(group)
    moved = iter(_exchange_nonempty(kind, [payload for payload in payloads if payload.numel()], op, group, n))
    return [  # not `new_empty`: vmap may have batched a payload
        next(moved) if p.numel() else torch.empty(kind.joined_shape(tuple(p.shape), n), dtype=p.dtype, device=p.device)
        for p in payloads
    ]


def _exchange_nonempty(kind: Kind, payloads: list[Tensor], op: str | None, group: str | None, n: int) -> list[Tensor]:
    if is_alone():
        return [payload.clone() for payload in payloads]  # a result never shares memory with an input
    world = current()
    if world.simulated is not None:
        moved = [(world.simulated.moved(kind, payload, op, group), tuple(payload.shape)) for payload in payloads]
        return [result.reshape(kind.joined_shape(shape, n)) for result, shape in moved]
    if world.traced:
        return [_wait(each) for each in [kind.trace(payload, op, n, group or DEFAULT_GROUP) for payload in payloads]]
    if torch.compiler.is_compiling():
        return _moved(world.wire, kind, payloads, op, group, n)
    try:
        return _moved(world.wire, kind, payloads, op, group, n)
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError(
            f"{kind.name} of {len(payloads)} payloads over {n} ranks failed: {error}. Another rank has failed, left, "
            "or not called backward; see its own error"
        ) from error


def _moved(
    wire: Wire | None, kind: Kind, payloads: list[Tensor], op: str | None, group: str | None, n: int
) -> list[Tensor]:
    if wire is not None:
        return _started(wire, kind, payloads, op, group, n)()
    return [_wait(each) for each in issue(kind, payloads, op, n, live_name(group))]


def _started(
    wire: Wire, kind: Kind, payloads: list[Tensor], op: str | None, group: str | None, n: int
) -> Callable[[], list[Tensor]]:
    """Start a collective of each payload on `wire`; return a function that waits for all, and returns the results."""
    started: list[tuple[Any, Tensor, Tensor, tuple[int, ...]]] = []
    for payload in payloads:
        count_payload(payload.numel() * payload.element_size())
        send = payload.reshape(n, -1) if kind.sends_rows else payload.reshape(-1)
        send = send.clone() if kind is ALL_REDUCE else send.contiguous()
        width = send.shape[-1]
        receive = send if kind is ALL_REDUCE else send.new_empty((n, width) if kind.receives_rows else (width,))
        shape = kind.joined_shape(tuple(payload.shape), n)
        with without_modes():  # WireCounter's
            started.append((wire.start(kind, send, receive, op, group), send, receive, shape))

    def results() -> list[Tensor]:
        for work, *_ in started:
            waited(work)
        return [receive.reshape(shape) for *_, receive, shape in started]

    return results


def refuse_differentiation(tensors: Iterable[Tensor]) -> None:
    """Raise a RuntimeError inside torch.func.grad or jvp, and where forward-mode AD has a tangent of `tensors`."""
    # jvp through a functional collective gives a zero tangent, silently; under torch.compile, so does grad.
    is_forward = is_forward_ad() and (torch.compiler.is_compiling() or any(map(is_differentiated, tensors)))
    if is_forward or is_differentiating():
        raise RuntimeError(
            "a gradient synchronization cannot run inside torch.func.grad or jvp, linearize or forward-mode AD, "
            "because it has no derivative; synchronize the gradients that these return"
        )


def _encode(path: str, leaf: Tensor, op: str, n: Any) -> Tensor:
    if leaf.is_complex() and op in ("max", "min"):
        raise ValueError(f"all_reduce: leaf {path!r} is {leaf.dtype}, which has no {op}; reduce it with mean or sum")
    wire = layout.to_wire(leaf)
    if not is_inexact(leaf):
        return wire.to(torch.int64)
    return wire / n if op == "mean" else wire


def _decode(wire: Tensor, leaf: Tensor, op: str, n: Any) -> Tensor:
    if not is_inexact(leaf):
        if op == "mean":
            wire = torch.div(wire, n, rounding_mode="floor") + (2 * (wire % n) >= n)
        wire = wire.to(leaf.dtype)
    return layout.from_wire(wire, leaf)
