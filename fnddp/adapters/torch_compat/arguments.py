"""Check the constructor's arguments, with the rules of torch's `DistributedDataParallel`."""

import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from fnddp import torch_private
from fnddp.adapters.module.slots import OWNER
from fnddp.core.buckets import MB
from fnddp.core.options import checked_float
from fnddp.core.sync import Sync
from fnddp.reducers.all_reduce import allreduce
from fnddp.transforms.cast import cast

T = TypeVar("T")


def checked_group(
    process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None, module: nn.Module
) -> dist.ProcessGroup | None:
    """Return the process group, None for the default one. Make parameters that a parent mesh shards local tensors."""
    if mesh is None:
        return process_group
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}.")
    if torch_private.root_mesh(mesh) != mesh:
        torch_private.make_local_tensors_of_shards(module)
    return mesh.get_group(mesh_dim=0)


def checked_devices(
    module: nn.Module, parameters: Sequence[nn.Parameter], device_ids: list[Any] | None, output_device: Any
) -> tuple[list[int] | None, int | None]:
    """Return the device indices for inputs and for the output; None if inputs are not moved."""
    if isinstance(device_ids, Sync | str):
        raise TypeError(
            f"{OWNER}: the second argument is device_ids, a list as in torch's class; give the pipeline by name: "
            f"DistributedDataParallel(module, sync={device_ids!r})"
        )
    if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
        raise RuntimeError(
            f"{OWNER}: the module has uninitialized lazy parameters; run its forward once before wrapping it"
        )
    devices = {parameter.device for parameter in parameters}
    types = {device.type for device in devices}
    if len(types) > 1:
        raise ValueError(f"{OWNER}: all parameters must be on one type of device, got {sorted(types)}")
    if types == {"cpu"} and any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        raise ValueError("SyncBatchNorm layers only work with GPU modules")
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"{OWNER}: device_ids must name one device, got {device_ids}")
    if not device_ids and output_device is None:
        return None, None
    if len(devices) != 1 or types == {"cpu"} or not device_ids:
        raise ValueError(
            f"{OWNER}: device_ids {device_ids} and output_device {output_device} are for modules on one GPU, got "
            f"parameters on {sorted(map(str, devices))}; remove both arguments, and move the inputs yourself"
        )
    indices = [torch_private.device_index(device, True) for device in device_ids]
    return indices, indices[0] if output_device is None else torch_private.device_index(output_device, True)


def checked_buffer_flags(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Return whether buffers are broadcast before each forward, and whether they are when the module is wrapped."""
    if broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated in torch 2.13, and ignored if `forward_sync_buffers` is given; use "
            "that instead. Unlike `broadcast_buffers=False`, `forward_sync_buffers=False` still makes buffers equal "
            "once, when the module is wrapped",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    keep_equal = broadcast_buffers is None or broadcast_buffers
    return keep_equal, keep_equal


def bucket_caps(bucket_cap_mb: float | None, bucket_cap_mb_list: list[int] | None) -> tuple[int, ...]:
    """Return the sizes of buckets in bytes (the last for all later ones). The list has priority; default 1, 25 MiB."""
    given: list[Any] = list(bucket_cap_mb_list or ([1, 25] if bucket_cap_mb is None else [bucket_cap_mb]))
    sizes = [checked_float("bucket_cap_mb: the size of a bucket in MiB", size) for size in given]
    if min(sizes) <= 0:
        raise ValueError(f"bucket_cap_mb: buckets must have a positive size in MiB, got {sizes}")
    return tuple(int(size * MB) for size in sizes)


def with_wire_dtype(sync: T, mixed_precision: Any) -> T | Sync:
    """Return the pipeline for `mixed_precision`: a plain mean is sent in its `reduce_dtype`, as in torch."""
    if mixed_precision is None:
        return sync
    if sync == allreduce:
        dtype = mixed_precision.reduce_dtype or mixed_precision.param_dtype
        return sync if dtype is None else cast(allreduce, dtype)
    if mixed_precision.reduce_dtype is not None:
        raise ValueError(
            f"{OWNER}: mixed_precision has reduce_dtype={mixed_precision.reduce_dtype}, but the pipeline {sync!r} "
            "decides which dtype is sent; remove reduce_dtype and put a cast in the pipeline, as in fp16(allreduce)"
        )
    return sync
