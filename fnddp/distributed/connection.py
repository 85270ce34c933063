"""Initialization of torch.distributed from a cluster environment."""

import os
from typing import Any

import torch.distributed as dist


def init_dist_connection(
    cluster_environment: Any,
    torch_distributed_backend: str,
    global_rank: int | None = None,
    world_size: int | None = None,
    **kwargs: Any,
) -> None:
    """Initialize torch.distributed with the address, rank and world size of a cluster environment.

    Does nothing if it is initialized. Sets the environment variables MASTER_ADDR and MASTER_PORT. The wrong choice
    under torchrun, which has set them and the ranks: `torch.distributed.init_process_group()`.

    Differs from Lightning: it logs nothing, and takes the properties `main_address` and `main_port` only, not the
    methods `master_address()` and `master_port()` of Lightning before 1.6.

    Args:
        cluster_environment: Lightning's, or any object with `main_address` and `main_port`; `global_rank()` and
            `world_size()` are called where the next arguments are None.
        torch_distributed_backend: "gloo", "nccl", or another of `init_process_group`.
        global_rank: This process's rank.
        world_size: The number of processes.
        **kwargs: Further arguments of `init_process_group`, such as `timeout`.

    Raises:
        RuntimeError: torch.distributed is not available.

    Source: `init_dist_connection` of Lightning 1.x.

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
