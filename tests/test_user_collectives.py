"""Collectives of the user's own between ours, and worlds that change under live objects."""

import random
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fnddp
from fnddp import allreduce
from fnddp.ir.program import LeafSpec
from fnddp.laws import DONATIONS, gather, model
from fnddp.plan.draft import Donation
from fnddp.run.engine import Engine
from fnddp.simulate.ranks import run_threads
from tests.ranks import on_ranks
from tests.wires import AloneWire


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
