"""Communication hooks that torch's class takes, and what it asks of them."""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp.core.sync import Sync
from fnddp.reducers.all_reduce import allreduce
from fnddp.transforms.cast import fp16

BUILTIN: dict[Any, Sync] = {
    dist.BuiltinCommHookType.ALLREDUCE: allreduce,
    dist.BuiltinCommHookType.FP16_COMPRESS: fp16(allreduce),
}
"""The pipelines that do what torch's hooks in C++ do."""


def check_hook(hook: Any) -> None:
    """Checks `hook` as torch does.

    Raises:
        TypeError: It is not callable.
        ValueError: It is annotated to take or return something else.
    """
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is not None and bucket.annotation not in (inspect.Parameter.empty, dist.GradBucket, "dist.GradBucket"):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    returns = signature.return_annotation
    if returns not in (inspect.Signature.empty, torch.futures.Future[Tensor]) and not isinstance(returns, str):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")
