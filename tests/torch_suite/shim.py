"""Lets torch's own DDP tests, most of which ask for GPUs, run on gloo and the CPU, against another class.

`cuda:N` and integer devices become the CPU, and GPUs are said to be as many as ranks. Nothing of torch is changed on
disk. Both functions must be called before torch.testing._internal.distributed.distributed_test is imported.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

CPU = torch.device("cpu")


class OnCpu(TorchFunctionMode):
    """Factories with `device="cuda"` make tensors on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return func(*args, **with_cpu(dict(kwargs or {})))


def run_on_cpu() -> None:
    for name, value in {"BACKEND": "gloo", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}.items():
        os.environ.setdefault(name, value)
    (Path(os.environ["TEMP_DIR"]) / "barrier").mkdir(exist_ok=True)

    undecorated = lambda *args, **kwargs: lambda test: test  # noqa: E731
    common_distributed.skip_if_lt_x_gpu = common_distributed.nccl_skip_if_lt_x_gpu = undecorated
    common_distributed.skip_if_no_gpu = lambda test: test
    common_distributed.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(world_size)}
    for feature in ("gpu", "cuda", "ddp", "subgroup"):
        backends = common_distributed.DistTestCases.backend_feature
        backends[feature] = {*backends.get(feature, ()), "gloo"}

    nn.Module.to = moves(nn.Module.to)
    nn.Module.cuda = lambda self, device=None: self
    torch.Tensor.to = moves(torch.Tensor.to)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    OnCpu().__enter__()  # for good

    cuda = torch.cuda
    cuda.set_device = cuda.synchronize = cuda.empty_cache = lambda *args, **kwargs: None
    cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
    cuda.current_device = lambda: 0
    cuda.Stream = cuda.Event = cuda.current_stream = cuda.stream = cuda.device = MagicMock()


def replace_ddp(spec: str | None) -> None:
    """Makes `module:Class` torch's DistributedDataParallel; None for torch's own. Devices are dropped."""
    torch_ddp = torch.nn.parallel.distributed
    cls: Any = torch_ddp.DistributedDataParallel
    if spec is not None:
        module, name = spec.split(":")
        cls = getattr(importlib.import_module(module), name)

    class DistributedDataParallel(cls):
        def __init__(
            self, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
        ):
            super().__init__(module, None, None, *args, **kwargs)

    DistributedDataParallel.__qualname__ = "DistributedDataParallel"
    DistributedDataParallel.__module__ = torch_ddp.__name__
    torch_ddp.DistributedDataParallel = torch.nn.parallel.DistributedDataParallel = DistributedDataParallel


def on_cpu(device: Any) -> Any:
    """The CPU for what names a GPU; anything else, such as a dtype, as it is."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int) or (isinstance(device, str | torch.device) and str(device).startswith("cuda")):
        return CPU
    return device


def with_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": on_cpu(kwargs["device"])} if "device" in kwargs else kwargs


def moves(to: Callable[..., Any]) -> Callable[..., Any]:
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        return to(self, *map(on_cpu, args[:1]), *args[1:], **with_cpu(kwargs))

    return moved
