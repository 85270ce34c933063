"""On a CUDA device: the laws on CUDA tensors, and DDP over NCCL with several ranks on one GPU.

Collected everywhere, skipped where there is no GPU. Run alone: `python -m pytest tests/gpu`.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fnddp
from fnddp.core import tree
from fnddp.laws import bits
from tests.gpu.nccl import on, run_nccl
from tests.pipelines import EXAMPLES, grads

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


# float32 products in another order than the CPU's, three exchanges deep; half-precision leaves round once more
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-9, torch.complex64: 1e-3, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("text", EXAMPLES.values())
def test_cuda_gives_what_the_cpu_gives(text):
    sync = fnddp.parse(text)
    name = "model" if "*weight" in text else "mixed"
    states = {device: sync.init(on(device, grads(name, 0, 0))) for device in ("cpu", "cuda")}
    for step in range(3):
        means = {}
        for device in states:
            means[device], states[device] = sync(on(device, grads(name, 0, step)), states[device])
        for path, want in tree.flatten(means["cpu"])[0].items():
            got = tree.flatten(means["cuda"])[0][path]
            assert got.is_cuda
            tolerance = CLOSE.get(want.dtype, 0)
            torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)


def check_disagreement(rank: int) -> None:
    sync = fnddp.fp16(fnddp.allreduce) if rank == 1 else fnddp.allreduce
    with pytest.raises(fnddp.RankMismatchError, match="ranks disagree about pipeline"):
        fnddp.verify(sync, {"w": torch.ones(2, device="cuda")})


def test_disagreement_over_nccl():
    run_nccl(2, check_disagreement)
