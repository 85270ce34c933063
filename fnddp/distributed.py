"""The seven names of Lightning 1.x's `pytorch_lightning.utilities.distributed`; Lightning 2 removed them.

They take the same arguments and return new tensors; `docs/distributed.md` has a table of the differences. All but
`init_dist_connection` are to be called by every rank of `group`, where None is the default group. If ranks disagree,
all of them raise a RankMismatchError; so do the others where a tensor is not dense, a TypeError on its own rank.
"""

import inspect
import math
import os
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fnddp.adapters.ddp import Handle, register
from fnddp.adapters.module.wrapper import DistributedDataParallel as OurDDP
from fnddp.core import collectives, layout
from fnddp.core.agreement import agree
from fnddp.core.group import Group, group_name
from fnddp.core.state import describe
from fnddp.core.sync import Sync
from fnddp.wire import control, groups

__all__ = [
    "AllGatherGrad",
    "all_gather_ddp_if_available",
    "gather_all_tensors",
    "init_dist_connection",
    "register_ddp_comm_hook",
    "sync_ddp",
    "sync_ddp_if_available",
]

Hook: TypeAlias = Callable[[Any, Any], torch.futures.Future[Tensor]]
"""`hook(state, bucket)`, for torch's DDP."""

_OPS = {"avg": "mean", "mean": "mean", "sum": "sum", "max": "max", "min": "min", "product": "product"}


def gather_all_tensors(result: Tensor, group: Group = None) -> list[Tensor]:
    """Gather a tensor from every rank, also where their shapes differ.

    No gradient flows through it: in a loss, use `all_gather_ddp_if_available` with `sync_grads`. It costs two small
    gathers, of a digest and of the shapes, and one gather of tensors padded to the longest.

    Args:
        result: A dense tensor of any shape, with the same dtype and number of dimensions on all ranks.

    Returns:
        The tensors in the order of the group's ranks, each contiguous, in its own memory, on the device of `result`.
        Without torch.distributed a list of `result` itself.

    Raises:
        RuntimeError: A launcher started several ranks, but torch.distributed is not initialized.

    >>> gather_all_tensors(torch.tensor([1, 2]))
    [tensor([1, 2])]
    """
    name = group_name(group)
    if not dist.is_initialized():
        groups.world_size(name)  # raises if there ought to be more
        return [result]
    agree(lambda: {"dtype": str(_dense(result).dtype), "the number of dimensions": str(result.ndim)}, group)
    packing = f"<{result.ndim}q"
    packed = control.all_gather_bytes(struct.pack(packing, *result.shape), name) if result.ndim else None
    shapes = [struct.unpack(packing, each) for each in packed or [b""] * groups.world_size(name)]
    sizes = [math.prod(shape) for shape in shapes]
    padded = torch.nn.functional.pad(result.detach().reshape(-1), (0, max(sizes) - result.numel()))
    rows = collectives.all_gather(padded, name)
    # Copies, so that keeping or saving one tensor does not keep all of them.
    return [row[:size].reshape(shape).clone() for row, size, shape in zip(rows, sizes, shapes, strict=True)]


def all_gather_ddp_if_available(tensor: Tensor, group: Group = None, sync_grads: bool = False) -> Tensor:
    """Stack the tensors of all ranks along a new first dimension.

    With `sync_grads`, every rank must run backward through it. If shapes differ, use `gather_all_tensors`. Each call
    first compares shapes and dtypes, in a gather of 32 bytes that the host waits for.

    Args:
        tensor: Any shape and any dense dtype, the same on all ranks.
        sync_grads: Let gradients flow: see `AllGatherGrad`.

    Returns:
        `[ranks, *shape]`, in the order of the group's ranks. Without torch.distributed `tensor` itself: the same
        object, without a new dimension, and differentiable for any `sync_grads`, as in Lightning.

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
    """Gather and stack, `AllGatherGrad.apply(tensor, group=None)`; backward sums the gradients of all ranks.

    Each rank computes its loss from all tensors; the gradient is that of the sum of all ranks' losses with respect to
    this rank's tensor. So every rank must run backward. Divide the loss by the number of ranks if it is a mean over
    them. Differentiable again, and within torch.func's grad, vjp, jvp and vmap.

    Arguments, result and errors: see `all_gather_ddp_if_available`. Without torch.distributed it stacks one tensor.

    >>> tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> AllGatherGrad.apply(tensor).square().sum().backward()
    >>> tensor.grad
    tensor([2., 4.])
    """

    @staticmethod
    def forward(tensor: Tensor, group: Group = None) -> Tensor:
        agree(lambda: {"the tensor to gather": describe(_dense(tensor))}, group)
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

    setup_context = AllGatherGrad.setup_context

    @staticmethod
    def forward(grads: Tensor, group: Group) -> Tensor:
        return collectives.reduce_scatter(grads, group_name(group))

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


def sync_ddp(result: Tensor, group: Group = None, reduce_op: dist.ReduceOp | str | None = None) -> Tensor:
    """Reduce a tensor over the ranks, into a new one.

    For metrics and counters, not in a loss: no gradient flows through it. Each call first compares shapes, dtypes and
    operations in one gather of 32 bytes. Integers are summed as int64, and their mean is rounded to the nearest (halves
    up): for a fraction pass `result.double()`. The mean of bools is the majority (ties are True). A mean is divided
    before it is summed, so it does not overflow.

    Args:
        result: Any shape and any dense dtype, the same on all ranks.
        reduce_op: "sum", "mean" or "avg", "max", "min", "product" in any case, or its `ReduceOp`; None for the sum.

    Returns:
        The reduction, with shape and dtype of `result`, the same on all ranks. Without torch.distributed a copy.

    Raises:
        RuntimeError: A launcher started several ranks, but torch.distributed is not initialized.
        ValueError: `reduce_op` has another value; or it is the maximum or minimum, of complex numbers.

    >>> sync_ddp(torch.tensor([1.0, 2.0]), reduce_op="mean")
    tensor([1., 2.])
    """
    name = group_name(group)
    agree(lambda: {"reduce_op": _op_name(reduce_op), "the tensor to reduce": describe(_dense(result))}, group)
    op = _op_name(reduce_op)
    if op == "product":
        product = collectives.all_gather(result.detach(), name).prod(0).to(result.dtype)
        return layout.in_format_of(result, product)
    return collectives.all_reduce({"result": result.detach()}, op, name)["result"]


def sync_ddp_if_available(result: Tensor, group: Group = None, reduce_op: dist.ReduceOp | str | None = None) -> Tensor:
    """Return `sync_ddp(...)` if torch.distributed is initialized, else `result` itself.

    The wrong choice if a missing process group is a mistake: `sync_ddp` raises under a launcher.

    >>> result = torch.ones(2)
    >>> sync_ddp_if_available(result) is result
    True
    """
    return sync_ddp(result, group, reduce_op) if dist.is_initialized() else result


def init_dist_connection(
    cluster_environment: Any,
    torch_distributed_backend: str,
    global_rank: int | None = None,
    world_size: int | None = None,
    **kwargs: Any,
) -> None:
    """Initialize torch.distributed with the address, rank and world size of a cluster environment.

    Do nothing if it is initialized. Set the environment variables MASTER_ADDR and MASTER_PORT. torchrun sets these
    itself: call `torch.distributed.init_process_group()` under torchrun.

    Args:
        cluster_environment: Lightning's, or any object with `main_address` and `main_port`; `global_rank()` and
            `world_size()` are called if the arguments of these names are None.
        torch_distributed_backend: "gloo", "nccl", or another backend of `init_process_group`.
        global_rank, world_size: The rank of this process, and the number of ranks.
        **kwargs: Further arguments of `init_process_group`, such as `timeout`.

    >>> class Cluster:
    ...     main_address, main_port = "127.0.0.1", 0
    ...     def global_rank(self): return 0
    ...     def world_size(self): return 1
    >>> init_dist_connection(Cluster(), "gloo", store=dist.HashStore())
    >>> dist.get_world_size()
    1
    >>> dist.destroy_process_group()
    """
    if not dist.is_available():
        raise RuntimeError("init_dist_connection: torch.distributed is not available in this build of torch")
    if dist.is_initialized():
        return
    rank = cluster_environment.global_rank() if global_rank is None else global_rank
    size = cluster_environment.world_size() if world_size is None else world_size
    os.environ["MASTER_ADDR"] = cluster_environment.main_address
    os.environ["MASTER_PORT"] = str(cluster_environment.main_port)
    dist.init_process_group(torch_distributed_backend, rank=rank, world_size=size, **kwargs)


def register_ddp_comm_hook(
    model: Any,
    ddp_comm_state: object = None,
    ddp_comm_hook: Hook | Sync | None = None,
    ddp_comm_wrapper: Callable[[Hook], Hook] | None = None,
) -> Handle | None:
    """Register a communication hook, or a pipeline, in a DDP model.

    The wrong choice for torch's fp16, bf16 and PowerSGD hooks: use them as pipelines instead. A pipeline keeps its
    state by parameter name, can be saved, and runs without CUDA (torch refuses `bf16_compress_hook` there).

    Args:
        model: torch's `DistributedDataParallel`, or another with `register_comm_hook(state, hook)`.
        ddp_comm_state: The hook's first argument.
        ddp_comm_hook: Any callable, `hook(state, bucket) -> Future[Tensor]`; or a pipeline: torch's class gets it by
            `fnddp.register`, and fnddp's class as its `sync`. None registers no hook.
        ddp_comm_wrapper: A function that wraps the hook, such as torch's `fp16_compress_wrapper`.

    Returns:
        For a pipeline in torch's class the handle of `fnddp.register`, with its state; otherwise None.

    Raises:
        RankMismatchError: On all ranks, if they disagree about a pipeline.
        RuntimeError: The model has a hook already.
        TypeError: A pipeline for another model than these two; or torch refuses the hook.
        ValueError: A pipeline with a state or a wrapper.

    >>> from fnddp import allreduce, fp16
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> model = DistributedDataParallel(torch.nn.Linear(8, 8))
    >>> register_ddp_comm_hook(model, ddp_comm_hook=fp16(allreduce)).sync
    fp16(allreduce)
    >>> del model  # before its process group: torch joins a thread there, which may wait for this one
    >>> dist.destroy_process_group()
    """
    if ddp_comm_hook is None:
        return None
    if not isinstance(ddp_comm_hook, Sync):
        hook = ddp_comm_hook if ddp_comm_wrapper is None else ddp_comm_wrapper(ddp_comm_hook)
        model.register_comm_hook(ddp_comm_state, hook if inspect.isfunction(hook) else _as_function(hook))
        return None
    if ddp_comm_state is not None or ddp_comm_wrapper is not None:
        raise ValueError(
            f"register_ddp_comm_hook: {ddp_comm_hook!r} is a pipeline, which takes neither ddp_comm_state nor "
            "ddp_comm_wrapper; wrap it in another transform, such as fp16(...), and set the handle's state"
        )
    if isinstance(model, OurDDP):
        model.sync = ddp_comm_hook
        return None
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"register_ddp_comm_hook: {ddp_comm_hook!r} is a pipeline, which needs a DistributedDataParallel as the "
            f"model, got {type(model).__name__}"
        )
    return register(model, ddp_comm_hook)


def _as_function(hook: Hook) -> Hook:
    """Return `hook` as a function with the names, the parameter and the annotations that DDP requires."""

    def run(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    inner = getattr(hook, "func", hook)  # of a partial
    run.__name__ = getattr(inner, "__name__", type(hook).__name__)
    run.__qualname__ = getattr(inner, "__qualname__", type(hook).__qualname__)
    return run


def _dense(tensor: Tensor) -> Tensor:
    """Return `tensor`; raise a TypeError unless it is a dense tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected a tensor, got a {type(tensor).__name__}; wrap it with torch.as_tensor")
    if tensor.layout != torch.strided:
        raise TypeError(f"expected a dense tensor, got layout {tensor.layout}; pass tensor.to_dense()")
    return tensor


def _op_name(reduce_op: dist.ReduceOp | str | None) -> str:
    if reduce_op is None:
        return "sum"
    kind: Any = getattr(reduce_op, "op", reduce_op)  # dist.ReduceOp(dist.ReduceOp.SUM) holds the latter
    asked: str = kind if isinstance(kind, str) else getattr(kind, "name", repr(reduce_op))
    if asked.lower() not in _OPS:
        raise ValueError(f"sync_ddp: reduce_op must be one of {', '.join(_OPS)}, or None, got {asked!r}")
    return _OPS[asked.lower()]
