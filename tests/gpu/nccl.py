"""Ranks on one GPU."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fnddp.core import tree

SECONDS = 200


def run_nccl(n: int, fn: Callable[..., Any], *arguments: Any) -> None:
    """Run `fn(rank, *arguments)` on `n` ranks, all on the first GPU.

    Raises:
        TimeoutError: They have not finished after `SECONDS`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.spawn(_rank, args=(n, store.port, fn, arguments), nprocs=n, join=False)
    try:
        deadline = time.monotonic() + SECONDS
        while not context.join(timeout=max(0.0, deadline - time.monotonic())):  # one call ends with one process
            if time.monotonic() > deadline:
                raise TimeoutError(f"{n} ranks over NCCL did not finish in {SECONDS} s")
    finally:
        for process in context.processes:
            process.kill()


def _rank(rank: int, n: int, port: int, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    # Newer NCCL allows several ranks on one GPU; older ones only refuse ranks of one host.
    several = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_HOSTID": str(rank)}
    os.environ.update(several, NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("nccl", rank=rank, world_size=n, store=store)
    try:
        fn(rank, *arguments)
    finally:
        dist.destroy_process_group()


def on(device: str, grads: Any) -> Any:
    """A tree of tensors on `device`, with the strides they have."""
    return tree.map_leaves(lambda leaf: leaf.to(device), grads)
