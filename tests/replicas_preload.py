"""What takes seconds, once for all replicas: they are forked from a process that has imported this."""

import torch
import torchft

import fnddp
import fnddp.integrations.torchft
import tests.replica

torch.set_num_threads(1)
fnddp.lower(fnddp.allreduce, {"weight": torch.empty(2)}, world_size=2)  # whose first call imports most of torch
__all__ = ["torchft", "tests"]
