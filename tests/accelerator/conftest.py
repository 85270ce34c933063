"""Ranks on the device: processes of their own, which keep it."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tests.accelerator.build import build, missing
from tests.ranks import GlooPool

ORDERS = ["side", "default"]  # streams that run only when no other can: each order finds waits that the other does not

GRACE = timedelta(seconds=2)  # a rank that ends resets its connections, from which others may still read


@pytest.fixture(scope="session")
def built() -> Path:
    """The folder of the device; skips where it cannot be built."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    return build()


@pytest.fixture(scope="session")
def _device_pools(built: Path) -> Iterator[list[GlooPool]]:
    pools: list[GlooPool] = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def ranks(_device_pools: list[GlooPool]) -> Callable[..., list[Any]]:
    """`ranks(n, last, fn, *arguments)`: the results of `fn(rank, device, *arguments)` on n ranks.

    `last` is one of ORDERS, or "cpu" for the CPU and gloo.
    """
    if not _device_pools or not _device_pools[-1].alive:
        _device_pools.append(GlooPool(module="tests.accelerator.device"))  # before autograd starts its threads

    def run(n: int, last: str, fn: Callable[..., Any], *arguments: Any, seed: int = 0) -> list[Any]:
        backend = "gloo" if last == "cpu" else "simccl"
        return _device_pools[-1].run(n, _on_device, last, seed, fn, arguments, backend=backend)

    return run


def _on_device(rank: int, last: str, seed: int, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if last == "cpu":
        return fn(rank, "cpu", *arguments)
    from tests.accelerator import device

    device.configure(seed, last)
    torch.accelerator.set_device_index(rank % device.device_count())
    store = _get_default_store()
    try:
        result = fn(rank, f"sim:{rank % device.device_count()}", *arguments)
        device.wait_for_all()
    finally:
        is_done(rank)
    with suppress(dist.DistStoreError):  # some wait for this one's end
        store.wait([f"rank {other} is done" for other in range(dist.get_world_size())], GRACE)
    return result


def is_done(rank: int) -> None:
    """Let the other ranks end: this one reads nothing more from them."""
    _get_default_store().set(f"rank {rank} is done", "")
