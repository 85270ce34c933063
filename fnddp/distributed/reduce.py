"""Reductions: the sum, mean, maximum, minimum or product of all ranks' tensors."""

import torch.distributed as dist
from torch import Tensor

from fnddp.core import collectives, layout
from fnddp.core.agreement import agree
from fnddp.core.group import Group, group_name
from fnddp.core.state import describe
from fnddp.distributed.gather import dense

_OPS = {"avg": "mean", "mean": "mean", "sum": "sum", "max": "max", "min": "min", "product": "product"}


def sync_ddp(result: Tensor, group: Group = None, reduce_op: dist.ReduceOp | str | None = None) -> Tensor:
    """Reduce a tensor over the ranks, into a new one. Every rank of the group must call this.

    For metrics and counters. No gradient flows: the wrong choice in a loss. Each call first compares shapes, dtypes and
    operations in one gather of 32 bytes, where Lightning waits at a barrier.

    Differs from Lightning: `result` is not written to. None means the sum, where Lightning raises. The mean of integers
    is of their dtype, rounded to the nearest (halves up), where Lightning truncates it or makes it float, by version:
    for a fraction pass `result.double()`. The mean of bools is the majority (ties are True). Integers are summed as
    int64. A mean is divided before it is summed, so it does not overflow. Products of complex numbers are those of the
    numbers, where backends multiply real and imaginary parts.

    Args:
        result: Any shape and any dense dtype, the same on all ranks.
        group: The ranks that take part; None for the default group.
        reduce_op: "sum", "mean" or "avg", "max", "min", "product" in any case, or the `ReduceOp` of one of them; None
            for the sum.

    Returns:
        The reduction, with shape and dtype of `result`, the same on all ranks. Without torch.distributed a copy.

    Raises:
        RankMismatchError: On all ranks, if shapes, dtypes or operations differ.
        RuntimeError: A launcher started several ranks, but torch.distributed is not initialized.
        TypeError: `result` is not a dense tensor. The other ranks raise a RankMismatchError.
        ValueError: `reduce_op` is none of these; the maximum or minimum of complex numbers.

    Source: `sync_ddp` of Lightning 1.x.

    >>> import torch
    >>> sync_ddp(torch.tensor([1.0, 2.0]), reduce_op="mean")
    tensor([1., 2.])
    """
    name = group_name(group)
    agree(lambda: {"reduce_op": _op_name(reduce_op), "the tensor to reduce": describe(dense(result))}, group)
    op = _op_name(reduce_op)
    if op == "product":
        product = collectives.all_gather(result.detach(), name).prod(0).to(result.dtype)
        return layout.in_format_of(result, product)
    return collectives.all_reduce({"result": result.detach()}, op, name)["result"]


def sync_ddp_if_available(result: Tensor, group: Group = None, reduce_op: dist.ReduceOp | str | None = None) -> Tensor:
    """Return `sync_ddp(...)` where torch.distributed is initialized, and `result` itself where it is not.

    The wrong choice where a missing process group is a mistake: `sync_ddp` raises under a launcher. Arguments, errors
    and differences from Lightning are those of `sync_ddp`.

    Source: `sync_ddp_if_available` of Lightning 1.x.

    >>> import torch
    >>> result = torch.ones(2)
    >>> sync_ddp_if_available(result) is result
    True
    """
    return sync_ddp(result, group, reduce_op) if dist.is_initialized() else result


def _op_name(reduce_op: dist.ReduceOp | str | None) -> str:
    if reduce_op is None:
        return "sum"
    if isinstance(reduce_op, str):
        asked = reduce_op
    elif isinstance(reduce_op, dist.ReduceOp.RedOpType):  # what dist.ReduceOp.SUM is
        asked = reduce_op.name
    elif isinstance(reduce_op, dist.ReduceOp):  # what dist.ReduceOp(dist.ReduceOp.SUM) is
        asked = reduce_op.op.name  # pyright: ignore[reportAttributeAccessIssue]
    else:
        asked = repr(reduce_op)
    if asked.lower() not in _OPS:
        raise ValueError(f"sync_ddp: reduce_op must be one of {', '.join(_OPS)}, or None, got {asked!r}")
    return _OPS[asked.lower()]
