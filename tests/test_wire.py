"""Whole steps over a wire that is no process group, and engines that share a world."""

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fnddp
from fnddp import laws
from fnddp.ir.program import LeafSpec
from fnddp.laws import DONATIONS, SMALL_BUCKETS, bits, engine_step
from fnddp.plan.draft import Donation
from fnddp.run.engine import Engine
from fnddp.simulate.ranks import run_threads
from fnddp.wire.c10d import faster
from fnddp.wire.groups import World, within
from fnddp.wire.kinds import ALL_REDUCE
from tests.ranks import on_ranks
from tests.wires import AloneWire, ReadyWork


class Refuses(ReadyWork):
    def wait(self) -> bool:
        return False


class RefusingWire(AloneWire):
    def start(self, *args: Any, **kwargs: Any) -> ReadyWork:
        super().start(*args, **kwargs)
        return Refuses()


def test_a_wait_that_returns_false_is_an_error():
    grads, step = laws.model(0, 0), fnddp.jit(fnddp.allreduce, wire=RefusingWire())
    with pytest.raises(fnddp.CollectiveError, match="returned False"):
        step(grads, ())


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("allreduce", "all_reduce"),
        ("error_feedback(topk(allgather, ratio=0.1))", "all_gather"),
        ("error_feedback(quantize(two_shot))", "all_to_all"),
    ],
)
def test_value_and_grad_overlaps_and_jit_is_eager(text, kind):
    sync, side, wire = fnddp.parse(text), 600, AloneWire(3)  # a matrix fills the first bucket
    params = {name: torch.randn(side, side, generator=torch.Generator().manual_seed(7)) for name in ("first", "last")}
    x = torch.randn(3, side, generator=torch.Generator().manual_seed(1))

    def loss(params, x):
        return ((x @ params["first"]) @ params["last"]).sum()

    def watched(params, x):
        params["first"].register_hook(lambda grad: wire.log.append("last gradient"))
        return loss(params, x)

    _, grads, state = fnddp.value_and_grad(watched, sync, wire=wire)(params, sync.init(params), x)
    assert f"{kind} 0" in wire.log[: wire.log.index("last gradient")]
    local = torch.func.grad(loss)(params, x)
    jitted = fnddp.jit(sync, wire=wire)(local, sync.init(params))
    with within(World(wire)):
        expected = sync(local, sync.init(params))
    assert bits((grads, state)) == bits(jitted) == bits(tuple(expected))


@pytest.mark.parametrize(("sync", "plans"), [(fnddp.allreduce, 1), (fnddp.two_shot, 2)])  # rows are as many as ranks
def test_fewer_ranks_take_part(sync, plans):
    """With one plan, where nothing in it depends on how many they are."""
    wire, grads, seen = AloneWire(3), laws.model(0, 0), set()
    leaves = {path: LeafSpec.of(leaf) for path, leaf in grads.items()}
    options = {"learns_order": False, "bucket_caps": SMALL_BUCKETS, "wire": wire}
    engine = Engine(sync, leaves, donation=DONATIONS[2], **options)
    for wire.ranks in (3, 2, 3):
        with within(World(wire)):
            expected, _ = sync(grads, ())
        done = engine_step(engine, (), grads, random.Random(0))
        assert bits(done.mean) == bits({path: expected[path] for path in done.mean})
        seen.add(id(engine.plan))
    assert len(seen) == plans


@pytest.mark.parametrize("text", ["allreduce", "error_feedback(powersgd(allreduce))"])
def test_where_works_are_always_ready_launches_are_the_programs(text):
    """As on CUDA, whose streams order what is launched: nothing depends on when the host looks."""
    sync, grads = fnddp.parse(text), laws.model(0, 0)
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
        first, second = (
            Engine(fnddp.allreduce, leaves, state=(), donation=Donation(), learns_order=False) for _ in range(2)
        )
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


def test_from_a_world_of_one_to_two():
    steps = [fnddp.jit(fnddp.allreduce) for _ in range(2)]
    for step in steps:
        assert step({"w": torch.ones(2)}, ())[0]["w"].tolist() == [1.0, 1.0]
    means = run_threads(2, lambda rank: steps[rank]({"w": torch.full((2,), float(rank))}, ())[0])
    assert [mean["w"].tolist() for mean in means] == [[0.5, 0.5]] * 2


@on_ranks(2)
def test_live_objects_follow_the_world(rank):
    x, params = torch.full((3,), rank + 1.0), {"w": torch.ones(3)}
    jitted, grad_of = fnddp.jit(fnddp.allreduce), fnddp.value_and_grad(lambda p: (p["w"] * x).sum(), fnddp.allreduce)
    for mean in (1.5, rank + 1.0):
        for _ in range(2):
            assert jitted({"w": x}, ())[0]["w"].tolist() == grad_of(params, ())[1]["w"].tolist() == [mean] * 3
        dist.destroy_process_group()
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


@on_ranks(2)
def test_rings_that_go_on_in_another_order_on_each_rank(rank):
    """Later messages are posted when earlier ones have come, so those of one ring could be taken for another's."""
    buffers = [torch.full((4,), size * (rank + 1), dtype=torch.float16) for size in (1.0, 100.0)]
    rings = [faster(ALL_REDUCE, buffer, buffer, "sum", dist.group.WORLD) for buffer in buffers]
    posted = [next(ring) for ring in rings]
    for _ in range(2):
        for i in (0, 1) if rank == 0 else (1, 0):
            for work in posted[i]:
                work.wait()
            posted[i] = next(rings[i], [])
    assert [buffer.tolist() for buffer in buffers] == [[3.0] * 4, [300.0] * 4]
