"""Collectives of the user's own between ours, and worlds that change under live objects."""

import random
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn as dist_nn
from torch import nn

import fnddp
from fnddp import allreduce
from fnddp.ir.program import LeafSpec
from fnddp.laws import DONATIONS, bits, gather, model
from fnddp.plan.draft import Donation
from fnddp.run.engine import Engine
from fnddp.simulate.ranks import run_threads
from tests.ranks import on_ranks
from tests.wires import AloneWire

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


@pytest.mark.parametrize("text", ["allreduce", "error_feedback(powersgd(allreduce))"])
def test_where_works_are_always_ready_launches_are_the_programs(text):
    """As on CUDA, whose streams order what is launched: nothing depends on when the host looks."""
    sync, grads = fnddp.parse(text), model(0, 0)
    logs = []
    for trial in range(4):
        wire, timing = AloneWire(), random.Random(trial)
        leaves = {path: LeafSpec.of(leaf) for path, leaf in grads.items()}
        engine = Engine(sync, leaves, donation=DONATIONS[1], learns_order=False, bucket_caps=(200, 500), wire=wire)
        engine.begin(sync.init(grads))
        for path in reversed(grads):
            wire.log.append(f"user's before {path}")
            time.sleep(timing.uniform(0, 0.002))
            for _ in range(timing.randrange(3)):
                engine.step.advance()
            engine.step.feed(path, grads[path].clone())
            for _ in range(timing.randrange(3)):
                engine.step.advance()
            wire.log.append(f"user's after {path}")
        engine.step.finish()
        logs.append(wire.log)
    assert all(log == logs[0] for log in logs)
    ours = [i for i, what in enumerate(logs[0]) if what.startswith("all_reduce")]
    assert len(ours) == len(engine.plan.collectives)
    assert ours[0] < logs[0].index(f"user's after {next(iter(grads))}")  # among the user's, not behind them all


def test_engines_that_wait_for_each_other():
    """One that has ended a step and begun another is behind those that have waited, and they are not behind it."""

    def body(rank: int) -> list[float]:
        leaves = {"w": LeafSpec.of(torch.ones(1))}
        first, second = (Engine(allreduce, leaves, state=(), donation=Donation(), learns_order=False) for _ in range(2))
        grad = torch.tensor([float(rank)])
        early, late = first.begin(), second.begin()
        early.feed("w", grad)
        means = [early.finish().mean["w"]]
        last = first.begin()
        last.feed("w", grad)
        late.feed("w", 10 * grad)
        means += [late.finish().mean["w"], last.finish().mean["w"]]
        return [mean.item() for mean in means]

    assert run_threads(2, body) == [[0.5, 5.0, 0.5]] * 2


@pytest.mark.thorough
@on_ranks(3)
def test_live_objects_follow_the_world(rank):
    (folder,) = set(gather(tempfile.mkdtemp() if rank == 0 else None)) - {None}
    x = torch.full((3,), float(rank + 1))
    params = {"w": torch.ones(3)}
    jitted = fnddp.jit(allreduce)
    grad_of = fnddp.value_and_grad(lambda p, x: (p["w"] * x).sum(), allreduce)

    def require(expected):
        for _ in range(2):
            assert jitted({"w": x}, ())[0]["w"].tolist() == pytest.approx([expected] * 3)
            assert grad_of(params, (), x)[1]["w"].tolist() == pytest.approx([expected] * 3)

    require(2.0)  # of 1, 2 and 3
    for n, expected in ((2, 1.5), (3, 2.0)):
        dist.barrier()
        dist.destroy_process_group()
        if rank < n:
            dist.init_process_group("gloo", rank=rank, world_size=n, store=dist.FileStore(f"{folder}/{n}", n))
            require(expected)
            if n == 2:
                (Path(folder) / f"done{rank}").touch()
        while n == 2 and len(list(Path(folder).glob("done*"))) < 2:
            time.sleep(0.01)
        if rank >= n:  # a world of its own, so that it can be destroyed too
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
            require(3.0)


def test_from_a_world_of_one_to_two():
    """Stepped before there is any process group."""
    steps = [fnddp.jit(allreduce) for _ in range(2)]
    for step in steps:
        assert step({"w": torch.ones(2)}, ())[0]["w"].tolist() == [1.0, 1.0]
    means = run_threads(2, lambda rank: steps[rank]({"w": torch.full((2,), float(rank))}, ())[0])
    assert [mean["w"].tolist() for mean in means] == [[0.5, 0.5]] * 2


class Synchronizing(torch.autograd.Function):
    """Runs another pipeline of ours in the middle of a backward, as a statistic of the gradient might be shared."""

    @staticmethod
    def forward(ctx, x, sync, seen):
        ctx.sync, ctx.seen = sync, seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        mine = torch.full_like(grad, 100 * (dist.get_rank() + 1))
        ctx.seen.append(ctx.sync({"x": mine}, ())[0]["x"])
        return grad, None, None


class Scale(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.thorough
@on_ranks(2)
def test_messages_of_two_pipelines_under_way_on_one_group(rank: int) -> None:
    """Rings in float16, whose later messages are posted when earlier ones have come."""
    sync, n, seen = fnddp.fp16(allreduce), 2_000_000, []
    other, first, last = fnddp.jit(sync), Scale(n), Scale(n)

    class Net(nn.Sequential):
        def forward(self, x):
            return self[1](Synchronizing.apply(self[0](x), other, seen))

    model = fnddp.DistributedDataParallel(Net(first, last), sync=sync, bucket_cap_mb=0.001)
    for step in range(12):
        model.zero_grad()
        (model(torch.ones(n)).sum() * (2 * rank + 2 + step % 5)).backward()
        for parameter in model.parameters():
            assert torch.equal(parameter.grad, torch.full((n,), 3.0 + step % 5))
    assert all(torch.equal(mean, torch.full((n,), 150.0)) for mean in seen)
