"""What takes seconds, once for all processes of tests: they are forked from one that has imported this."""

import gc
from contextlib import suppress

import torch

import fnddp
import tests.pipelines

with suppress(ImportError):  # of extras
    import sklearn.datasets  # for the digits of examples
with suppress(ImportError):
    import torchft

    import fnddp.integrations.torchft

torch.set_num_threads(1)
fnddp.lower(fnddp.allreduce, {"weight": torch.empty(2)}, world_size=2)  # whose first call imports most of torch
gc.freeze()  # nobody looks through it again: pages stay shared
__all__ = ["sklearn", "tests", "torchft"]
