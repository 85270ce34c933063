"""The kinds of collectives. A kind is an object that has everything that distinguishes it from other kinds.

Shapes of payload and result for n ranks: all_reduce s -> s; all_gather s -> [n, *s]; reduce_scatter [n, *s] -> s;
all_to_all [n, *s] -> [n, *s]. Payloads share a flat buffer, and each is a range of columns. If a kind has a part for
each rank, the buffer has a row for each rank.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp.torch_private import functional_collectives as _functional

_c10d: Any = dist.distributed_c10d
REDUCE_OP = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Work(Protocol):
    """A collective that has been started."""

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        ...

    def wait(self) -> object:
        """Wait for the collective (on an accelerator, make the current stream wait). Return False if it has failed."""
        ...


def waited(work: Work) -> None:
    """Wait for `work`; raise a RuntimeError if it raises one or returns False."""
    if work.wait() is False:
        raise RuntimeError("its wait() returned False: it did not complete")


@dataclass(frozen=True)
class Pass:
    """One pass of a payload around the ranks.

    Attributes:
        share: Bytes that a rank sends in the pass, relative to its payload.
        adds: True if a rank adds what it receives.
        is_direct: True if every rank sends a message to each of the n - 1 others; False for a ring (or tree).
    """

    share: float
    adds: bool = False
    is_direct: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class Kind:
    """A kind of collective, with everything that plans, wires, costs and simulations need to know.

    Attributes:
        computes: True if payloads are reduced; False if bytes of any dtype are moved.
        sends_rows: True if a rank sends a part to each rank, `[n, ...]`.
        receives_rows: True if a rank receives a part from each rank, `[n, ...]`.
        operator: The functional collective that represents it in a traced graph.
    """

    name: str
    computes: bool
    sends_rows: bool
    receives_rows: bool
    operator: Any

    @property
    def is_in_place(self) -> bool:
        """True if the result is written over the payload."""
        return not (self.sends_rows or self.receives_rows)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:  # copies are the same object
        return self.name.upper()

    def result_shape(self, shape: tuple[int, ...], n: int) -> tuple[int, ...]:
        """Return the shape of the result for a payload of `shape`."""
        rest = shape[1:] if self.sends_rows else shape
        return (n, *rest) if self.receives_rows else rest

    def joined_shape(self, shape: tuple[int, ...], n: int) -> tuple[int, ...]:
        """Return the shape of the result with rows from ranks joined along the first dimension of the payload."""
        if self.sends_rows == self.receives_rows:
            return shape
        return (shape[0] * n if self.receives_rows else shape[0] // n, *shape[1:])

    def passes(self, n: int) -> tuple[Pass, ...]:
        """Return the passes of a payload around `n` ranks."""
        if self is ALL_GATHER:
            return (Pass(n - 1),)
        first = Pass((n - 1) / n, adds=self.computes, is_direct=not self.computes)
        return (first, Pass((n - 1) / n)) if self.is_in_place else (first,)

    def link_bytes(self, payload: float, n: int) -> float:
        """Return the bytes that one rank sends over its link for a payload of `payload` bytes."""
        return payload * sum(one.share for one in self.passes(n))

    def levels(self, payload: float, g: int, nodes: int) -> tuple[float, float]:
        """Return the bytes that a rank sends inside its node of `g` ranks, and across nodes, in two levels."""
        if self is ALL_GATHER:  # first across nodes, then everything received within the node
            return payload * nodes, payload
        return payload, payload / g if self.computes else payload

    def together(self, sends: Tensor, op: str | None) -> Tensor:
        """Return all ranks' results `[n, *result]` for all ranks' payloads `[n, *payload]`; sums are in rank order."""
        if not self.computes:
            return sends.transpose(0, 1) if self.sends_rows else sends.expand(sends.shape[0], *sends.shape)
        computed = {"max": Tensor.amax, "min": Tensor.amin}.get(op or "sum")
        reduced = sum_in_rank_order(sends) if computed is None else computed(sends, 0)
        return reduced if self.sends_rows else reduced.expand_as(sends)

    def call(self, send: Tensor, receive: Tensor, op: str | None, group: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the method of `group` that starts a collective of this kind in existing memory, and its arguments.

        If the method is called from C (for example by `map`), no Python interrupt can come while it starts.
        """
        mine, theirs = send.view(-1), receive.view(-1)
        if self.is_in_place:
            return group.allreduce, ([send], _options(_c10d.AllreduceOptions(), op))
        if self.computes:
            return _method(group, "reduce_scatter_single", "_reduce_scatter_base"), (
                receive,
                mine,
                _options(_c10d.ReduceScatterOptions(), op),
            )
        if self.sends_rows:
            return _method(group, "all_to_all_single", "alltoall_base"), (
                theirs,
                mine,
                [],
                [],
                _options(_c10d.AllToAllOptions()),
            )
        return _method(group, "all_gather_single", "_allgather_base"), (
            theirs,
            mine,
            _options(_c10d.AllgatherOptions()),
        )

    def trace(self, payload: Tensor, op: str | None, n: int, group: str) -> Tensor:
        """Start a functional collective of this kind, for graphs and torch.compile. The caller waits for the result."""
        if self.computes:
            return self.operator(payload, op, n, group) if self.sends_rows else self.operator(payload, op, group)
        if not self.sends_rows:
            return self.operator(payload, n, group)
        rows = [payload.shape[0] // n] * n
        return self.operator(payload, rows, rows, group)

    def read(self, arguments: tuple[Any, ...]) -> tuple[Any, str | None, str] | None:
        """Return payload, op and group from the arguments of a call of `operator`; None if it is of another kind."""
        payload, *given, group = arguments
        if self.computes:
            return (payload, given[0], group) if given[0] in REDUCE_OP else None
        is_uneven = self.sends_rows and len({*given[0], *given[1]}) > 1
        return None if is_uneven else (payload, None, group)


def gather_call(receive: Tensor, send: Tensor, group: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the method and arguments that all-gather a few bytes into the rows of `receive`: see `Kind.call`."""
    return group.allgather, ([list(receive)], [send], _options(_c10d.AllgatherOptions()))


def _method(group: Any, name: str, before: str) -> Any:
    return getattr(group, name, None) or getattr(group, before)  # torch 2.13 renamed them


def _options(options: Any, op: str | None = None) -> Any:
    options.asyncOp = True
    if hasattr(options, "reduceOp"):
        options.reduceOp = REDUCE_OP[op or "sum"]
    return options


ALL_REDUCE = Kind("all_reduce", True, False, False, _functional.all_reduce.default)
ALL_GATHER = Kind("all_gather", False, False, True, _functional.all_gather_into_tensor.default)
REDUCE_SCATTER = Kind("reduce_scatter", True, True, False, _functional.reduce_scatter_tensor.default)
ALL_TO_ALL = Kind("all_to_all", False, True, True, _functional.all_to_all_single.default)

KINDS = {kind.name: kind for kind in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)}


def named(kind: Kind | str) -> Kind:
    """Return the kind of this name; raise a ValueError if there is none."""
    if isinstance(kind, Kind):
        return kind
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not a kind of collective; known: {', '.join(KINDS)}")
    return KINDS[kind]


def sum_in_rank_order(rows: Tensor, onto: Tensor | None = None) -> Tensor:
    """Return `((rows[0] + rows[1]) + rows[2]) + ...`, `[*shape]`.

    The order of torch's own sum over a dimension depends on the shape, the strides and the machine.

    Args:
        rows: One row of each rank, `[ranks, *shape]`.
        onto: The sum of earlier ranks, `[*shape]`: the result is `(onto + rows[0]) + ...`.

    >>> rows = torch.tensor([[1e8], [1.0], [-1e8]])
    >>> sum_in_rank_order(rows), sum_in_rank_order(rows[2:], onto=sum_in_rank_order(rows[:2]))
    (tensor([0.]), tensor([0.]))
    """
    return SUM(rows, onto)


def _add_up(rows: Tensor, onto: Tensor | None = None) -> Tensor:
    return _add_up_into(rows, onto, out=rows.new_empty(rows.shape[1:]))


def _add_up_into(rows: Tensor, onto: Tensor | None = None, *, out: Tensor) -> Tensor:
    first, *others = rows.unbind() if onto is None else (onto, *rows.unbind())
    if not others:
        return out.copy_(first)
    torch.add(first, others[0], out=out)
    for row in others[1:]:
        out += row
    return out


def _like_a_row(rows: Tensor, onto: Tensor | None = None) -> Tensor:
    return rows.new_empty(rows.shape[1:])


def _add_up_batch(
    info: Any, in_dims: tuple[int | None, ...], rows: Tensor, onto: Tensor | None = None
) -> tuple[Tensor, int]:
    of_rows, of_onto = (*in_dims, None)[:2]
    rows = rows.unsqueeze(1) if of_rows is None else rows.movedim(of_rows, 1)
    if onto is not None:
        onto = onto.unsqueeze(0) if of_onto is None else onto.movedim(of_onto, 0)
        batch = max(rows.shape[1], onto.shape[0])
        rows, onto = rows.expand(-1, batch, *rows.shape[2:]), onto.expand(batch, *onto.shape[1:])
    return SUM(rows, onto), 0


# A custom operation, so that the sum is one node of a graph for any number of ranks, and compilers cannot reorder it.
torch.library.define("fnddp::sum_in_rank_order", "(Tensor rows, Tensor? onto=None) -> Tensor", tags=())
torch.library.impl("fnddp::sum_in_rank_order", "CompositeExplicitAutograd", _add_up)
torch.library.register_fake("fnddp::sum_in_rank_order", _like_a_row)
torch.library.register_vmap("fnddp::sum_in_rank_order", _add_up_batch)
torch.library.define(
    "fnddp::sum_in_rank_order.out", "(Tensor rows, Tensor? onto=None, *, Tensor(a!) out) -> Tensor(a!)", tags=()
)
torch.library.impl("fnddp::sum_in_rank_order.out", "CompositeExplicitAutograd", _add_up_into)
SUM: Any = torch.ops.fnddp.sum_in_rank_order.default
SUM_INTO: Any = torch.ops.fnddp.sum_in_rank_order.out
