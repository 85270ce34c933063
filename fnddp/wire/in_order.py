"""Sums over ranks in the order of their numbers: the same bits on every device and in any layout."""

from typing import Any

import torch
from torch import Tensor


def sum_in_rank_order(rows: Tensor, onto: Tensor | None = None) -> Tensor:
    """Return `((rows[0] + rows[1]) + rows[2]) + ...`, `[*shape]`.

    torch's own sum over a dimension adds in an order that depends on the shape, the strides and the machine.

    Args:
        rows: Of each rank, `[ranks, *shape]`.
        onto: The sum of the ranks before these, `[*shape]`: `(onto + rows[0]) + ...`.

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


# An operation of its own: one node of a graph for any number of ranks, which no compiler may reorder.
torch.library.define("fnddp::sum_in_rank_order", "(Tensor rows, Tensor? onto=None) -> Tensor", tags=())
torch.library.impl("fnddp::sum_in_rank_order", ("CPU", "CUDA"), _add_up)
torch.library.register_fake("fnddp::sum_in_rank_order", _like_a_row)
torch.library.register_vmap("fnddp::sum_in_rank_order", _add_up_batch)
torch.library.define(
    "fnddp::sum_in_rank_order.out", "(Tensor rows, Tensor? onto=None, *, Tensor(a!) out) -> Tensor(a!)", tags=()
)
torch.library.impl("fnddp::sum_in_rank_order.out", ("CPU", "CUDA"), _add_up_into)
SUM: Any = torch.ops.fnddp.sum_in_rank_order.default
SUM_INTO: Any = torch.ops.fnddp.sum_in_rank_order.out
