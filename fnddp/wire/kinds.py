"""The kinds of collectives. A kind is one object that knows everything that differs between them.

With n ranks, a payload of shape s and its result: all_reduce s -> s; all_gather s -> [n, *s]; reduce_scatter
[n, *s] -> s; all_to_all [n, *s] -> [n, *s]. Payloads share a flat buffer, of which each is a range of columns; where a
kind has something for each rank, the buffer has a row for each.
"""

import abc
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fnddp.torch_private import functional_collectives as _functional
from fnddp.wire.in_order import sum_in_rank_order

# torch 2.13 renames them, and warns of the old names.
_dist: Any = dist
_all_gather: Any = getattr(dist, "all_gather_single", None) or _dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor
_REDUCE_OP = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class Pass:
    """One way of a payload around the ranks.

    Attributes:
        share: What a rank sends in it, relative to what it hands over.
        adds: Whether what is received is added to.
        is_direct: Whether every rank sends to each other one, in n - 1 messages; otherwise it is a ring's (or tree's).
    """

    share: float
    adds: bool = False
    is_direct: bool = False


class Kind(abc.ABC):
    """What plans, wires, costs and simulations ask of a collective. Each kind is one value."""

    name: str
    computes: bool
    """Whether payloads are added up, or the largest is taken. Otherwise dtypes do not matter: it moves bytes."""
    sends_rows: bool
    """Whether a rank hands over a part for each rank, `[n, ...]`."""
    receives_rows: bool
    """Whether a rank gets a part from each rank, `[n, ...]`."""
    operator: Any
    """The functional collective that stands for it in a traced graph."""

    @abc.abstractmethod
    def result_shape(self, shape: tuple[int, ...], n: int) -> tuple[int, ...]:
        """The shape of the result of a payload of `shape`."""

    @abc.abstractmethod
    def passes(self, n: int) -> tuple[Pass, ...]:
        """How payloads travel."""

    @abc.abstractmethod
    def levels(self, payload: float, g: int, nodes: int) -> tuple[float, float]:
        """What a rank hands over inside its node of `g` ranks, and across nodes, when it goes in two levels."""

    @abc.abstractmethod
    def together(self, sends: Tensor, op: str | None) -> Tensor:
        """What all ranks receive, `[n, *result]`, of what they send, `[n, *payload]`; sums are in rank order."""

    @abc.abstractmethod
    def start(self, send: Tensor, receive: Tensor, op: str | None, group: dist.ProcessGroup) -> Any:
        """Starts it on torch.distributed, in given memory."""

    @abc.abstractmethod
    def trace(self, payload: Tensor, op: str | None, n: int, group: str) -> Tensor:
        """Starts it as a functional collective, for graphs and torch.compile; the result must be waited for."""

    @abc.abstractmethod
    def read(self, arguments: tuple[Any, ...]) -> tuple[Any, str | None, str] | None:
        """Payload, op and group of a call of `operator`; None for a call that is not of this kind (uneven splits)."""

    @property
    def is_in_place(self) -> bool:
        """Whether the result lies where the payload lay."""
        return not (self.sends_rows or self.receives_rows)

    def __repr__(self) -> str:
        return self.name

    def link_bytes(self, payload: float, n: int) -> float:
        """What one rank sends over its link."""
        return payload * sum(one.share for one in self.passes(n))


class _AllReduce(Kind):
    name, computes, operator = "all_reduce", True, _functional.all_reduce.default
    sends_rows, receives_rows = False, False

    def result_shape(self, shape: tuple[int, ...], n: int) -> tuple[int, ...]:
        return shape

    def passes(self, n: int) -> tuple[Pass, ...]:
        return Pass((n - 1) / n, adds=True), Pass((n - 1) / n)

    def levels(self, payload: float, g: int, nodes: int) -> tuple[float, float]:
        return payload, payload / g

    def together(self, sends: Tensor, op: str | None) -> Tensor:
        return _reduced(sends, op).expand_as(sends)

    def start(self, send: Tensor, receive: Tensor, op: str | None, group: dist.ProcessGroup) -> Any:
        return dist.all_reduce(send, _REDUCE_OP[op or "sum"], group=group, async_op=True)

    def trace(self, payload: Tensor, op: str | None, n: int, group: str) -> Tensor:
        return self.operator(payload, op, group)

    def read(self, arguments: tuple[Any, ...]) -> tuple[Any, str | None, str] | None:
        payload, op, group = arguments
        return (payload, op, group) if op in _REDUCE_OP else None


class _AllGather(Kind):
    name, computes, operator = "all_gather", False, _functional.all_gather_into_tensor.default
    sends_rows, receives_rows = False, True

    def result_shape(self, shape: tuple[int, ...], n: int) -> tuple[int, ...]:
        return (n, *shape)

    def passes(self, n: int) -> tuple[Pass, ...]:
        return (Pass(n - 1),)

    def levels(self, payload: float, g: int, nodes: int) -> tuple[float, float]:
        return payload * nodes, payload  # across nodes first, then what came from there to the neighbours

    def together(self, sends: Tensor, op: str | None) -> Tensor:
        return sends.expand(sends.shape[0], *sends.shape)

    def start(self, send: Tensor, receive: Tensor, op: str | None, group: dist.ProcessGroup) -> Any:
        return _all_gather(receive.view(-1), send, group=group, async_op=True)

    def trace(self, payload: Tensor, op: str | None, n: int, group: str) -> Tensor:
        return self.operator(payload, n, group)

    def read(self, arguments: tuple[Any, ...]) -> tuple[Any, str | None, str] | None:
        payload, _, group = arguments
        return payload, None, group


class _ReduceScatter(Kind):
    name, computes, operator = "reduce_scatter", True, _functional.reduce_scatter_tensor.default
    sends_rows, receives_rows = True, False

    def result_shape(self, shape: tuple[int, ...], n: int) -> tuple[int, ...]:
        return shape[1:]

    def passes(self, n: int) -> tuple[Pass, ...]:
        return (Pass((n - 1) / n, adds=True),)

    def levels(self, payload: float, g: int, nodes: int) -> tuple[float, float]:
        return payload, payload / g

    def together(self, sends: Tensor, op: str | None) -> Tensor:
        return _reduced(sends, op)

    def start(self, send: Tensor, receive: Tensor, op: str | None, group: dist.ProcessGroup) -> Any:
        return _reduce_scatter(receive, send.view(-1), _REDUCE_OP[op or "sum"], group=group, async_op=True)

    def trace(self, payload: Tensor, op: str | None, n: int, group: str) -> Tensor:
        return self.operator(payload, op, n, group)

    def read(self, arguments: tuple[Any, ...]) -> tuple[Any, str | None, str] | None:
        payload, op, _, group = arguments
        return (payload, op, group) if op in _REDUCE_OP else None


class _AllToAll(Kind):
    name, computes, operator = "all_to_all", False, _functional.all_to_all_single.default
    sends_rows, receives_rows = True, True

    def result_shape(self, shape: tuple[int, ...], n: int) -> tuple[int, ...]:
        return shape

    def passes(self, n: int) -> tuple[Pass, ...]:
        return (Pass((n - 1) / n, is_direct=True),)

    def levels(self, payload: float, g: int, nodes: int) -> tuple[float, float]:
        return payload, payload

    def together(self, sends: Tensor, op: str | None) -> Tensor:
        return sends.transpose(0, 1)

    def start(self, send: Tensor, receive: Tensor, op: str | None, group: dist.ProcessGroup) -> Any:
        return dist.all_to_all_single(receive.view(-1), send.view(-1), group=group, async_op=True)

    def trace(self, payload: Tensor, op: str | None, n: int, group: str) -> Tensor:
        rows = [payload.shape[0] // n] * n
        return self.operator(payload, rows, rows, group)

    def read(self, arguments: tuple[Any, ...]) -> tuple[Any, str | None, str] | None:
        payload, received, sent, group = arguments
        return (payload, None, group) if len({*received, *sent}) == 1 else None


ALL_REDUCE: Kind = _AllReduce()
ALL_GATHER: Kind = _AllGather()
REDUCE_SCATTER: Kind = _ReduceScatter()
ALL_TO_ALL: Kind = _AllToAll()

KINDS: dict[str, Kind] = {kind.name: kind for kind in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)}


def of_operator(target: Any) -> Kind | None:
    """The kind that a function of a traced graph stands for."""
    return next((kind for kind in KINDS.values() if kind.operator is target), None)


def named(kind: Kind | str) -> Kind:
    """The kind of that name.

    Raises:
        ValueError: There is none.
    """
    if isinstance(kind, Kind):
        return kind
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of collective; known: {', '.join(KINDS)}")
    return KINDS[kind]


def _reduced(sends: Tensor, op: str | None) -> Tensor:
    if op in (None, "sum"):
        return sum_in_rank_order(sends)
    return sends.amax(0) if op == "max" else sends.amin(0)
