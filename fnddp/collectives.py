"""The collectives as pure functions on tensors: what reducers and codecs are written with.

They use the functional collectives of torch.distributed, which trace under make_fx and Dynamo, or whatever wire the
pipeline runs on. Without a process group the world has one rank and a collective is a copy, so a pipeline runs, and
loses what it loses, in a plain Python process.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fnddp import layout
from fnddp.torch_private import functional_collectives
from fnddp.tree import Leaves, is_inexact
from fnddp.wire import guards
from fnddp.wire.counter import count_payload
from fnddp.wire.groups import DEFAULT_GROUP, current, is_alone, live_name, rank, ranks, world_size
from fnddp.wire.kinds import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Kind
from fnddp.wire.protocol import Wire, waited
from fnddp.wire.weights import scale_of

__all__ = [
    "OPS",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "rank",
    "ranks",
    "reduce_scatter",
    "world_size",
]

_wait: Any = functional_collectives.wait_tensor

_WIRE_OP = {"mean": "sum", "sum": "sum", "max": "max", "min": "min"}
OPS = tuple(_WIRE_OP)


def all_reduce(leaves: Leaves, op: str, group: str | None) -> Leaves:
    """Reduces every leaf over the ranks of `group`: all are issued, in the order of their paths, then all are awaited.

    A mean is divided before it is summed, so what fits the dtype never overflows in the sum (torch's hooks do the
    same). Integers travel as int64, which their sum must fit; their mean is rounded to the nearest, halves up, and the
    mean of a bool is the majority, ties True. Leaves without elements do not travel.

    Raises:
        RuntimeError: Inside torch.func.grad or jvp; inside vmap with a process group; on a failed collective.
        ValueError: "max" or "min" of complex numbers.
    """
    guards.refuse_differentiation()
    n = ranks(group) if op == "mean" else 1
    # By path, not by insertion: dicts that were filled in another order on another rank still match.
    paths = sorted(leaves)
    wires = [_encode(path, leaves[path], op, n) for path in paths]
    reduced = dict(zip(paths, _exchanged(ALL_REDUCE, wires, _WIRE_OP[op], group), strict=True))
    return {path: _decode(reduced[path], leaf, op, n) for path, leaf in leaves.items()}


def all_gather(tensor: Tensor, group: str | None = None) -> Tensor:
    """Every rank's `tensor`, of one shape and dtype on all, in rank order: `[ranks, *shape]`."""
    (gathered,) = _carried(ALL_GATHER, tensor.unsqueeze(0), group)
    return gathered.reshape(world_size(group), *tensor.shape)


def all_to_all(tensor: Tensor, group: str | None = None) -> Tensor:
    """Sends row r of `tensor: [ranks, *shape]` to rank r, and gives back what came from each: `[ranks, *shape]`.

    Raises:
        ValueError: `tensor` does not have a row for each rank.
    """
    _require_rows("all_to_all", tensor, group)
    (received,) = _carried(ALL_TO_ALL, tensor, group)
    return received.reshape(tensor.shape)


def reduce_scatter(tensor: Tensor, group: str | None = None) -> Tensor:
    """This rank's slice, `[*shape]`, of the sum over ranks of `tensor: [ranks, *shape]`.

    Raises:
        ValueError: `tensor` does not have a row for each rank.
    """
    _require_rows("reduce_scatter", tensor, group)
    (part,) = _exchanged(REDUCE_SCATTER, [layout.to_wire(tensor)], "sum", group)
    return layout.from_wire(part[0], tensor[0])


def scale_of_weight(weight: float | Tensor, group: str | None, device: torch.device) -> float | Tensor:
    """By what this rank scales its gradients, so that their mean over `group` is one weighted by `weight`.

    Under torch.compile it is a tensor, and that all weights are zero is an error of its backend's.

    Raises:
        ValueError: On all ranks: all weights are zero, or one is negative or not finite.
    """
    mine = torch.as_tensor(weight, dtype=torch.float64, device=device).reshape(())
    everyone = all_gather(mine, group)
    if not torch.compiler.is_compiling():
        return scale_of(float(mine), everyone.tolist())
    total = everyone.sum()
    are_weights = (everyone >= 0).all() & (total > 0) & total.isfinite()
    torch.ops.aten._assert_async.msg(are_weights, "weight: one is negative or not finite, or all ranks gave 0")
    return everyone.shape[0] * mine / total


def _require_rows(name: str, tensor: Tensor, group: str | None) -> None:
    n = world_size(group)
    if tensor.ndim == 0 or tensor.shape[0] != n:
        raise ValueError(f"{name}: expected a row for each of {n} ranks, got a tensor of shape {tuple(tensor.shape)}")


def _carried(kind: Kind, tensor: Tensor, group: str | None) -> list[Tensor]:
    """The results of a kind that computes nothing: rows of `tensor` travel as bytes, so that any dtype may."""
    wire = layout.to_wire(tensor)
    world = current()
    if world is not None and world.traced:  # a plan lays payloads of all dtypes out in one buffer by itself
        results = _exchanged(kind, [wire], None, group)
        return [_from_wire(result, tensor) for result in results]
    # A view as bytes needs a last stride of 1, which a single element of a strided tensor does not have.
    flat = wire.reshape(wire.shape[0], -1).contiguous()
    as_bytes = flat.unsqueeze(-1).view(torch.uint8).reshape(wire.shape[0], -1)
    results = _exchanged(kind, [as_bytes], None, group)
    shape = _joined_shape(kind, wire, world_size(group))
    return [_from_wire(result.reshape(-1).view(wire.dtype).reshape(shape), tensor) for result in results]


def _from_wire(wire: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_complex(wire) if like.is_complex() else wire


def _exchanged(kind: Kind, payloads: Sequence[Tensor], op: str | None, group: str | None) -> list[Tensor]:
    """The results of `kind`, one for each payload: all are issued, then all are awaited.

    Rows that come from the ranks, or stay here, are joined along the first dimension of the payload.
    """
    guards.refuse_batching()
    n = world_size(group)
    results = {i: p.new_empty(_joined_shape(kind, p, n)) for i, p in enumerate(payloads) if not p.numel()}
    travelling = {i: payload for i, payload in enumerate(payloads) if payload.numel()}
    results |= zip(travelling, _moved(kind, list(travelling.values()), op, group, n), strict=True)
    return [results[i] for i in range(len(payloads))]


def _moved(kind: Kind, payloads: list[Tensor], op: str | None, group: str | None, n: int) -> list[Tensor]:
    if is_alone():
        return [payload.clone() for payload in payloads]  # a result never shares memory with an input
    world = current()
    if world is not None and world.wire is not None and not world.traced:
        return _over(world.wire, kind, payloads, op, group, n)
    name = group or DEFAULT_GROUP if world is not None and world.traced else live_name(group)
    issued = [kind.trace(payload, op, n, name) for payload in payloads]
    return [_wait(each) for each in issued]


def _joined_shape(kind: Kind, payload: Tensor, n: int) -> tuple[int, ...]:
    if kind.sends_rows == kind.receives_rows:
        return tuple(payload.shape)
    first = payload.shape[0] * n if kind.receives_rows else payload.shape[0] // n
    return (first, *payload.shape[1:])


def _over(wire: Wire, kind: Kind, payloads: list[Tensor], op: str | None, group: str | None, n: int) -> list[Tensor]:
    started: list[tuple[Any, Tensor, tuple[int, ...]]] = []
    for tag, payload in enumerate(payloads):
        count_payload(payload.numel() * payload.element_size())
        send = payload.reshape(n, -1) if kind.sends_rows else payload.reshape(-1)
        send = send.clone() if kind is ALL_REDUCE else send.contiguous()
        width = send.shape[-1]
        receive = send if kind is ALL_REDUCE else send.new_empty((n, width) if kind.receives_rows else (width,))
        started.append((wire.start(kind, send, receive, op, group, tag), receive, _joined_shape(kind, payload, n)))
    for work, _, _ in started:
        waited(work)
    return [receive.reshape(shape) for _, receive, shape in started]


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
