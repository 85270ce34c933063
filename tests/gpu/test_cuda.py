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


def check_register(rank: int, options: dict) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)).cuda()
    ddp = DistributedDataParallel(model, device_ids=[0], **options)
    handle = fnddp.register(ddp, fnddp.parse("error_feedback(powersgd(fp16(allreduce), rank=4))"))
    sync, params = handle.sync, {name: p.detach().clone() for name, p in model.named_parameters()}
    state = sync.init(params)
    for step in range(4):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * rank + step)).cuda()
        ddp.zero_grad()
        ddp(x).square().mean().backward()
        loss = torch.func.grad(lambda p, x: torch.func.functional_call(model, p, (x,)).square().mean())
        mean, state = sync(loss(params, x), state)
        assert bits(dict(mean)) == bits({name: p.grad for name, p in model.named_parameters()})
    assert bits(handle.state) == bits(state)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, bits([p.grad for p in model.parameters()]))
    assert all(other == everyone[0] for other in everyone)


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.1, "gradient_as_bucket_view": True}], ids=str)
def test_register_over_nccl(options):
    run_nccl(2, check_register, options)


def check_disagreement(rank: int) -> None:
    sync = fnddp.fp16(fnddp.allreduce) if rank == 1 else fnddp.allreduce
    with pytest.raises(fnddp.RankMismatchError, match="ranks disagree about pipeline"):
        fnddp.verify(sync, {"w": torch.ones(2, device="cuda")})


def test_disagreement_over_nccl():
    run_nccl(2, check_disagreement)
