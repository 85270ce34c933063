"""Registration of communication hooks."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fnddp.adapters.ddp import Handle, register
from fnddp.adapters.module.wrapper import DistributedDataParallel as OurDDP
from fnddp.core.sync import Sync

Hook: TypeAlias = Callable[[Any, Any], torch.futures.Future[Tensor]]
"""`hook(state, bucket)`, for torch's DDP."""


def register_ddp_comm_hook(
    model: Any,
    ddp_comm_state: object = None,
    ddp_comm_hook: Hook | Sync | None = None,
    ddp_comm_wrapper: Callable[[Hook], Hook] | None = None,
) -> Handle | None:
    """Register a communication hook, or a pipeline, in a DDP model.

    The wrong choice for torch's fp16, bf16 and PowerSGD hooks: as a pipeline these keep their state by parameter name,
    can be saved, and run off CUDA (torch refuses `bf16_compress_hook` there).

    Differs from Lightning: hooks may be any callable, such as a `functools.partial` or an object with `__call__`, where
    torch wants a function; a pipeline may stand for a hook; nothing is logged.

    Args:
        model: torch's `DistributedDataParallel`, or another with `register_comm_hook(state, hook)`.
        ddp_comm_state: The hook's first argument.
        ddp_comm_hook: `hook(state, bucket) -> Future[Tensor]`; or a pipeline, which `fnddp.register` puts into torch's
            class, and which becomes `sync` of fnddp's. None registers nothing.
        ddp_comm_wrapper: Wraps the hook, such as torch's `fp16_compress_wrapper`.

    Returns:
        For a pipeline in torch's class the handle of `fnddp.register`, with its state; otherwise None.

    Raises:
        RankMismatchError: On all ranks, if they disagree about a pipeline.
        RuntimeError: The model has a hook already.
        TypeError: A pipeline for another model than these two; or torch refuses the hook.
        ValueError: A pipeline with a state or a wrapper.

    Source: `register_ddp_comm_hook` of Lightning 1.x.

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
    if isinstance(ddp_comm_hook, Sync):
        return _register_pipeline(model, ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper)
    hook = ddp_comm_hook if ddp_comm_wrapper is None else ddp_comm_wrapper(ddp_comm_hook)
    model.register_comm_hook(ddp_comm_state, hook if inspect.isfunction(hook) else _as_function(hook))
    return None


def _register_pipeline(model: Any, state: object, sync: Sync, wrapper: Callable[[Hook], Hook] | None) -> Handle | None:
    if state is not None or wrapper is not None:
        raise ValueError(
            f"register_ddp_comm_hook: {sync!r} is a pipeline, which takes no ddp_comm_state and no ddp_comm_wrapper; "
            "wrap it in another transform, such as fp16(...), and set the state of the handle that is returned"
        )
    if isinstance(model, OurDDP):
        model.sync = sync
        return None
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"register_ddp_comm_hook: {sync!r} is a pipeline, which goes into a DistributedDataParallel, got "
            f"{type(model).__name__}"
        )
    return register(model, sync)


def _as_function(hook: Hook) -> Hook:
    """Return `hook` as a function with the names, the parameter and the annotations that DDP insists on."""

    def run(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    inner = getattr(hook, "func", hook)  # of a partial
    run.__name__ = getattr(inner, "__name__", type(hook).__name__)
    run.__qualname__ = getattr(inner, "__qualname__", type(hook).__qualname__)
    return run
