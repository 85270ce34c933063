"""Sums over ranks in the order of their numbers: the same bits wherever they are computed, and in whatever layout."""

from typing import Any

import torch
from torch import Tensor


def sum_in_rank_order(rows: Tensor) -> Tensor:
    """`((rows[0] + rows[1]) + rows[2]) + ...`: `[ranks, *shape]` becomes `[*shape]`.

    torch's own sum over a dimension adds in an order that depends on the shape, the strides and the machine.

    >>> sum_in_rank_order(torch.tensor([[1e8], [1.0], [-1e8]]))
    tensor([0.])
    """
    return SUM(rows)


def _add_up(rows: Tensor) -> Tensor:
    return _add_up_into(rows, out=rows.new_empty(rows.shape[1:]))


def _add_up_into(rows: Tensor, *, out: Tensor) -> Tensor:
    first, *others = rows.unbind()
    out.copy_(first)
    for row in others:
        out += row
    return out


def _like_a_row(rows: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[1:])


def _add_up_batch(info: Any, in_dims: tuple[int | None, ...], rows: Tensor) -> tuple[Tensor, int]:
    (batch,) = in_dims
    assert batch is not None
    return SUM(rows.movedim(batch, 1)), 0


# An operation of its own: one node of a graph for any number of ranks, which no compiler may reorder.
torch.library.define("fnddp::sum_in_rank_order", "(Tensor rows) -> Tensor", tags=())
torch.library.impl("fnddp::sum_in_rank_order", ("CPU", "CUDA"), _add_up)
torch.library.register_fake("fnddp::sum_in_rank_order", _like_a_row)
torch.library.register_vmap("fnddp::sum_in_rank_order", _add_up_batch)
torch.library.define("fnddp::sum_in_rank_order.out", "(Tensor rows, *, Tensor(a!) out) -> Tensor(a!)", tags=())
torch.library.impl("fnddp::sum_in_rank_order.out", ("CPU", "CUDA"), _add_up_into)
SUM: Any = torch.ops.fnddp.sum_in_rank_order.default
SUM_INTO: Any = torch.ops.fnddp.sum_in_rank_order.out
