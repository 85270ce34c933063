"""The device `sim`, made of the CPU: its registration, and the module that torch takes for `torch.sim`.

Streams, events, memory that is handed out again, autograd's threads and a backend of torch.distributed, `simccl`, with
the rules of NCCL's: see device.h. The order in which streams run is `configure`'s.
"""

import importlib.util
import os
import sys
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.accelerator.build import NAME, library

# Gloo's flight recorder wants the GIL, for tracebacks, where this device holds its lock; whoever has the GIL and frees
# memory wants that lock.
os.environ["TORCH_FR_BUFFER_SIZE"] = "0"


def _loaded() -> Any:
    spec = importlib.util.spec_from_file_location(NAME, library())
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


_C = _loaded()
device_count, current_device = _C.device_count, _C.current_device
configure, on_wait, trace, wait_for_all = _C.configure, _C.on_wait, _C.trace, _C.wait_for_all
is_current_stream_capturing = _C.is_capturing
Stream, Event = torch.Stream, torch.Event
current_stream, set_stream = torch.accelerator.current_stream, torch.accelerator.set_stream


def _index(device: Any) -> int:
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return -1 if index is None else index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def set_device(device: Any) -> None:
    if _index(device) >= 0:
        _C.set_device(_index(device))


@contextmanager
def device(given: Any) -> Any:
    before = current_device()
    set_device(given)
    try:
        yield
    finally:
        set_device(before)


def synchronize(device: Any = None) -> None:
    _C.synchronize(_index(device))


def stream(given: Any) -> Any:
    return given


class CUDAGraph:
    """A captured graph, with the methods of torch's class of this name."""

    _number: int | None = None

    def capture_begin(self) -> None:
        _C.capture_begin()

    def capture_end(self) -> None:
        self._number = _C.capture_end()

    def replay(self) -> None:
        _C.replay(self._number)

    def reset(self) -> None:
        self._number = None


@contextmanager
def graph(made: CUDAGraph, *, stream: Any, capture_error_mode: str = "global") -> Any:
    """As torch's, which synchronizes before, and ends the capture if the block raises."""
    synchronize()
    with stream:
        made.capture_begin()
        try:
            yield
        finally:
            made.capture_end()


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _C.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _C.default_generator(_index(device)).set_state(state)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _C.default_generator(index).manual_seed(int(seed))


def manual_seed(seed: int) -> None:
    _C.default_generator(-1).manual_seed(int(seed))


def _create_backend(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    wait_for_all()  # ranks meet here: none may wait for another's collective
    return _C.create_backend(dist.ProcessGroupGloo(store, rank, size, timeout), timeout.total_seconds())


def _register() -> None:
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _C.start()
    dist.Backend.register_backend("simccl", _create_backend, devices=["sim"])


_register()
configure(0, os.environ.get("FNDDP_TEST_LAST", ""))


def autoload() -> None:
    """Do nothing: torch, which calls this when it is imported, has imported the module for it."""
