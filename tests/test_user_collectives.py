"""Collectives of the user's own between ours, in backward."""

import random
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn as dist_nn
from torch import nn

import fnddp
from fnddp.laws import bits, gather
from tests.ranks import on_ranks

LAYERS, STEPS, SLOWER = 6, 10, 0.003


class Averaged(nn.Module):
    """Averages its outputs over ranks, as a SyncBatchNorm made by hand: in backward too.

    Of its two buckets the first waits for the slower rank, so whether its second round leaves before or behind the
    user's next collective would differ between ranks.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.random = random.Random(rank)
        self.is_slow = rank == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dist_nn.all_reduce(Slow.apply(self.second(self.first(x)), self)) / dist.get_world_size()


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.layer.is_slow and ctx.layer.random.random() < 0.5:
            time.sleep(SLOWER)
        return grad.clone(), None


def network(rank: int) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*(Averaged(rank) for _ in range(LAYERS)))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(100 * step + rank))


SYNC = fnddp.parse("powersgd(fp16(allreduce))")
SMALL = 0.002  # MiB, so that each layer is a bucket


def require_equal(parameters) -> None:
    mine = [p.detach() for p in parameters]
    assert all(p.isfinite().all() for p in mine)
    everyone = gather(mine)
    assert bits(everyone[0]) == bits(everyone[1])


@pytest.mark.thorough
@pytest.mark.parametrize("registers", [False, True])
@on_ranks(2)
def test_in_a_module(rank, registers):
    if registers:
        wrapped = nn.parallel.DistributedDataParallel(network(rank), bucket_cap_mb=SMALL)
        fnddp.register(wrapped, SYNC)
    else:
        wrapped = fnddp.DistributedDataParallel(network(rank), sync=SYNC, bucket_cap_mb=SMALL)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(batch(rank, step)).square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in wrapped.parameters())
        optimizer.step()
        require_equal(wrapped.parameters())
