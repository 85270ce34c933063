"""The seven names of Lightning 1.x's `pytorch_lightning.utilities.distributed`, which Lightning 2 no longer has.

They take the same arguments and return new tensors. Each docstring lists the differences from Lightning.
"""

from fnddp.distributed.connection import init_dist_connection
from fnddp.distributed.gather import AllGatherGrad, all_gather_ddp_if_available, gather_all_tensors
from fnddp.distributed.hooks import register_ddp_comm_hook
from fnddp.distributed.reduce import sync_ddp, sync_ddp_if_available

__all__ = [
    "AllGatherGrad",
    "all_gather_ddp_if_available",
    "gather_all_tensors",
    "init_dist_connection",
    "register_ddp_comm_hook",
    "sync_ddp",
    "sync_ddp_if_available",
]
