"""Devices, and the order of operations on them. This is the only file that distinguishes kinds of devices.

On the CPU an operation has ended when its call returns, so there are no streams and nothing waits. An accelerator of
any kind that torch knows runs asynchronously, in streams. To add a kind of device, write a class and `register` it.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp.torch_private import filled

Stream: TypeAlias = Any
"""A queue of operations: a `torch.Stream`, or another object of the device; None on the CPU."""

Mark: TypeAlias = Any
"""A point in time: an event of a device, or seconds."""


class Device:
    """Operations on streams and events of a device. This class is for the CPU; others are subclasses."""

    is_asynchronous = False  # True if calls of operations return before the operations have ended
    light_bytes = 2**20  # up to this size an operation's call costs more than its pass over memory
    stacked_bytes = 2**15  # up to this size of matrices, a product of their stack is faster than a product for each
    divides_lists_alike = True  # dividing a list of tensors by a number gives the same bits as dividing each
    converts_in_place = False  # True if an elementwise operation reads other dtypes without a pass for conversion
    has_slow_pages = True  # allocating memory costs many times more than filling it, as with system pages

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> Stream:
        """Return a new stream, different from the user's."""
        return None

    def current(self) -> Stream:
        """Return the stream on which this thread starts operations."""
        return None

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Make operations in the block start on `stream`."""
        return _NOTHING

    def wait(self, stream: Stream, other: Stream) -> None:
        """Make `stream` wait for everything started on `other` so far. The host does not wait."""

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Prevent reuse of the memory of `tensor` until `stream` has done everything started on it so far."""

    def is_capturing(self) -> bool:
        """Return whether operations on the current stream are captured in a graph, instead of run."""
        return False

    def refuse_capture(self, what: str) -> None:
        """Raise a RuntimeError that names `what` if operations on the current stream are captured in a graph."""
        if self.is_capturing():
            raise RuntimeError(f"{what}, which cannot be captured in a graph")

    def graph(self, stream: Stream) -> tuple[Any, AbstractContextManager[object]]:
        """Return a new graph, and a context that captures the block's operations in it, on `stream`.

        Raises:
            RuntimeError: torch has no graphs for such devices.
        """
        raise RuntimeError(f"torch captures no graphs on {self.device.type}")

    def selected(self) -> AbstractContextManager[object]:
        """Make this the current device of its kind within the block."""
        return _NOTHING

    def of_host(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Return a tensor of Python numbers, without waiting for the device."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def to_host(self, tensor: Tensor) -> Callable[[], list[int]]:
        """Return a function that returns the numbers of `tensor`. The host waits for them when it calls the function.

        The tensor's memory must belong to the current stream, because that stream copies the numbers.
        """
        return tensor.tolist

    def mark(self, stream: Stream) -> Mark:
        """Return a mark of the time when `stream` has done everything started on it so far."""
        return time.perf_counter()

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Return the time between two marks of one stream. The host waits for `end`."""
        return end - begin

    def future(self) -> "torch.futures.Future[Any]":
        """Return a future of a result on this device. A stream that waits for the future waits for the result."""
        return torch.futures.Future()

    def synchronize(self) -> None:
        """Make the host wait for everything started so far."""

    @property
    def name(self) -> str:
        """The name of the product."""
        return self.device.type

    @property
    def backend(self) -> str:
        """The backend that torch.distributed uses for it by default."""
        return dist.get_default_backend_for_device(self.device)


class Meta(Device):
    """The meta device: tensors have no memory."""

    has_slow_pages = False


class Accelerator(Device):
    """A device of `torch.accelerator`: CUDA, ROCm, XPU, NPU, and others that torch knows."""

    is_asynchronous = True
    light_bytes = stacked_bytes = 2**24
    has_slow_pages = False  # torch caches memory
    converts_in_place = True
    divides_lists_alike = False  # CUDA multiplies by the inverse for a tensor, but not for a list of tensors

    def stream(self) -> Stream:
        return torch.Stream(self.device)

    def current(self) -> Stream:
        return torch.accelerator.current_stream(self.device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return stream

    def wait(self, stream: Stream, other: Stream) -> None:
        stream.wait_stream(other)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        if tensor.device == self.device:  # parts of a state may be on the host
            tensor.record_stream(stream)

    def is_capturing(self) -> bool:
        ask = getattr(torch.get_device_module(self.device), "is_current_stream_capturing", None)
        return ask is not None and ask()

    def graph(self, stream: Stream) -> tuple[Any, AbstractContextManager[object]]:
        module: Any = torch.get_device_module(self.device)
        if not hasattr(module, "CUDAGraph"):
            return super().graph(stream)
        made = module.CUDAGraph()
        # Other threads may query events meanwhile, as NCCL's watchdog does.
        return made, module.graph(made, stream=stream, capture_error_mode="thread_local")

    def selected(self) -> AbstractContextManager[object]:
        return torch.accelerator.device_index(self.device.index)

    def of_host(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        if self.is_capturing():  # a replay would copy from memory of the host that is not kept
            return filled(values, dtype, self.device)
        # From pinned memory: to copy from other memory, the host would wait for everything started before.
        return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True).to(self.device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Callable[[], list[int]]:
        self.refuse_capture("numbers are copied to the host")
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(
            tensor, non_blocking=True
        )
        event = torch.Event(self.device)
        event.record(self.current())

        def numbers() -> list[int]:
            event.synchronize()
            return pinned.tolist()

        return numbers

    def mark(self, stream: Stream) -> Mark:
        event = torch.Event(self.device, enable_timing=True)
        event.record(stream)
        return event

    def seconds(self, begin: Mark, end: Mark) -> float:
        begin.synchronize()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def future(self) -> "torch.futures.Future[Any]":
        return torch.futures.Future(devices=[self.device])

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    @property
    def name(self) -> str:
        module: Any = torch.get_device_module(self.device)
        return module.get_device_name(self.device) if hasattr(module, "get_device_name") else self.device.type


_NOTHING = nullcontext()
_KINDS: dict[str, type[Device]] = {"cpu": Device, "meta": Meta}


def register(kind: str, device: type[Device]) -> None:
    """Use the class `device` for tensors with the `device.type` `kind`."""
    _KINDS[kind] = device
    device_of.cache_clear()


@cache
def device_of(device: torch.device) -> Device:
    """Return the device of tensors on `device`."""
    return _KINDS.get(device.type, Accelerator)(device)


def device_of_backends(backends: str) -> torch.device:
    """Return the device for payloads of a process group with these backends: the CPU, if one of them supports it."""
    kind = accelerator()
    if kind is None or "cpu:" in backends:
        return torch.device("cpu")
    return current(kind)


def one_of(devices: Mapping[str, torch.device]) -> torch.device:
    """Return the device of all leaves, given by path; the CPU if there are none.

    Raises:
        ValueError: The leaves are on several devices.
    """
    first = next(iter(devices.items()), ("", torch.device("cpu")))
    for path, device in devices.items():
        if device != first[1]:
            raise ValueError(
                f"leaf {path!r} is on {device}, and leaf {first[0]!r} on {first[1]}, but all leaves of a pipeline "
                "must be on one device; move them, or give the leaves of each device their own pipeline"
            )
    return first[1]


def require_carried(device: torch.device, group: dist.ProcessGroup) -> None:
    """Raise a ValueError if no backend of a process group moves tensors of `device`."""
    backends = dist.get_backend_config(group)
    if f"{device.type}:" not in backends:
        raise ValueError(
            f"process group {group.group_name!r} has no backend for leaves on {device}, only {backends}; move them, "
            f'or make the group with such a backend, as in dist.init_process_group("{device.type}:...") does'
        )


def accelerator() -> str | None:
    """Return the kind of the accelerator of this machine, such as "cuda"; None without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def select(kind: str, rank: int, ranks: int) -> None:
    """Select this rank's device on the host as the current one of its kind, before the process group is created.

    If there are more ranks than devices, they share devices, and NCCL needs a setting for that (CUDA only).
    """
    if kind == "cpu":
        return
    count = torch.accelerator.device_count()
    if ranks > count:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        os.environ["NCCL_HOSTID"] = f"fnddp-{rank}"  # otherwise NCCL refuses two ranks of one host on one device
    torch.accelerator.set_device_index(rank % count)


def current(kind: str) -> torch.device:
    """Return the selected device of this kind."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def built_for() -> str:
    """Return the platform that torch was built for: an accelerator toolkit with its version, or "cpu"."""
    names = ("cuda", "hip", "xpu")
    return next((f"{name} {made}" for name in names if (made := getattr(torch.version, name, None))), "cpu")
