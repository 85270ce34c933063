"""Gathers: all ranks receive the tensors of all ranks."""

import math
import struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp.core import collectives
from fnddp.core.agreement import agree
from fnddp.core.group import Group, group_name
from fnddp.core.state import describe
from fnddp.wire import control, groups


def gather_all_tensors(result: Tensor, group: Group = None) -> list[Tensor]:
    """Gather a tensor from every rank, also where their shapes differ. Every rank of the group must call this.

    No gradient flows: the wrong choice in a loss, for which there is `all_gather_ddp_if_available` with `sync_grads`.
    It costs two small gathers, of a digest and of the shapes, and one of the tensors as long as the longest.

    Differs from Lightning: without a process group it returns `[result]`, where Lightning raises a ValueError. Ranks
    that disagree about dtype or number of dimensions raise, where Lightning hangs or returns wrong values.

    Args:
        result: Any shape and any dense dtype, of the same dtype and number of dimensions on all ranks.
        group: The ranks that take part; None for the default group.

    Returns:
        The tensors in the order of the group's ranks, each contiguous, in memory of its own, on the device of `result`.
        Without torch.distributed a list of `result` itself.

    Raises:
        RankMismatchError: On all ranks, if dtypes or numbers of dimensions differ.
        RuntimeError: A launcher started several ranks, but torch.distributed is not initialized.
        TypeError: `result` is not a dense tensor. The other ranks raise a RankMismatchError.

    Source: `gather_all_tensors` of Lightning 1.x.

    >>> gather_all_tensors(torch.tensor([1, 2]))
    [tensor([1, 2])]
    """
    name = group_name(group)
    if not dist.is_initialized():
        groups.world_size(name)  # raises if there ought to be more
        return [result]
    agree(lambda: {"dtype": str(dense(result).dtype), "the number of dimensions": str(result.ndim)}, group)
    shapes = _gather_shapes(result.shape, name)
    sizes = [math.prod(shape) for shape in shapes]
    padded = torch.nn.functional.pad(result.detach().reshape(-1), (0, max(sizes) - result.numel()))
    rows = collectives.all_gather(padded, name)
    # Copies, so that one that is kept or saved does not keep all of them.
    return [row[:size].reshape(shape).clone() for row, size, shape in zip(rows, sizes, shapes, strict=True)]


def all_gather_ddp_if_available(tensor: Tensor, group: Group = None, sync_grads: bool = False) -> Tensor:
    """Stack the tensors of all ranks along a new first dimension.

    Every rank of the group must call it and, with `sync_grads`, run backward through it. The wrong choice where shapes
    differ: `gather_all_tensors`. Each call first compares shapes and dtypes, in a gather of 32 bytes that the host
    waits for.

    Differs from Lightning: uneven shapes raise on all ranks, where Lightning returns uninitialized memory; gradients
    are right in subgroups, and can be differentiated again.

    Args:
        tensor: Any shape and any dense dtype, the same on all ranks.
        group: The ranks that take part; None for the default group.
        sync_grads: Let gradients flow: see `AllGatherGrad`.

    Returns:
        `[ranks, *shape]`, in the order of the group's ranks. Without torch.distributed `tensor` itself: the same
        object, without a new dimension, and differentiable whatever `sync_grads`, as in Lightning.

    Raises:
        RankMismatchError: On all ranks, if shapes or dtypes differ: it names those of every rank.
        TypeError: `tensor` is not a dense tensor. The other ranks raise a RankMismatchError.

    Source: `all_gather_ddp_if_available` of Lightning 1.x.

    >>> tensor = torch.ones(2)
    >>> all_gather_ddp_if_available(tensor) is tensor
    True
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> all_gather_ddp_if_available(tensor)
    tensor([[1., 1.]])
    >>> dist.destroy_process_group()
    """
    if not dist.is_initialized():
        return tensor
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        return AllGatherGrad.apply(tensor, group)  # pyright: ignore[reportReturnType]  # torch annotates it as Any


class AllGatherGrad(torch.autograd.Function):
    """`AllGatherGrad.apply(tensor, group=None)`: gathers and stacks; backward sums what the ranks send back.

    Each rank computes its loss from all tensors; the gradient is that of the sum of all ranks' losses with respect to
    this rank's tensor. So every rank must run backward. Divide the loss by the number of ranks if it is a mean over
    them. Differentiable again, and within torch.func's grad, vjp, jvp and vmap.

    Differs from Lightning: the slice that backward returns is that of this rank in the *group*, where Lightning takes
    the rank in the world; and the sum is scattered, not sent whole to all. Without torch.distributed it is the stack of
    one tensor, where Lightning fails. Arguments, result and errors are those of `all_gather_ddp_if_available`.

    Source: `AllGatherGrad` of Lightning 1.x; here an all-gather and a reduce-scatter, each the other's transpose.

    >>> tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> AllGatherGrad.apply(tensor).square().sum().backward()
    >>> tensor.grad
    tensor([2., 4.])
    """

    @staticmethod
    def forward(tensor: Tensor, group: Group = None) -> Tensor:
        agree(lambda: {"the tensor to gather": describe(dense(tensor))}, group)
        return collectives.all_gather(tensor, group_name(group))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        _, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return _SumAndScatter.apply(*grad_outputs, ctx.group), None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        return AllGatherGrad.apply(grad_inputs[0], ctx.group)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:  # noqa: ARG004
        tensor, group = args
        return AllGatherGrad.apply(tensor.movedim(in_dims[0], 0), group), 1  # [ranks, batch, *shape]


class _SumAndScatter(torch.autograd.Function):
    """The transpose of `AllGatherGrad`: sums `[ranks, *shape]` over ranks, and returns this rank's slice."""

    @staticmethod
    def forward(grads: Tensor, group: Group) -> Tensor:
        return collectives.reduce_scatter(grads, group_name(group))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        _, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return AllGatherGrad.apply(*grad_outputs, ctx.group), None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        return _SumAndScatter.apply(grad_inputs[0], ctx.group)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:  # noqa: ARG004
        grads, group = args
        return _SumAndScatter.apply(grads.movedim(in_dims[0], 1), group), 0  # grads: [ranks, batch, *shape]


def dense(tensor: Tensor) -> Tensor:
    """Return `tensor`; raise a TypeError unless it is a dense tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected a tensor, got a {type(tensor).__name__}; wrap it with torch.as_tensor")
    if tensor.layout != torch.strided:
        raise TypeError(f"expected a dense tensor, got layout {tensor.layout}; pass tensor.to_dense()")
    return tensor


def _gather_shapes(shape: torch.Size, group: str | None) -> list[tuple[int, ...]]:
    """Return the shapes of all ranks, which have the same number of dimensions."""
    if not shape:
        return [()] * groups.world_size(group)
    layout = f"<{len(shape)}q"
    return [struct.unpack(layout, packed) for packed in control.all_gather_bytes(struct.pack(layout, *shape), group)]
