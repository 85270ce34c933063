"""Whole steps over a wire that is no process group, and engines that share a world, or a group with the user."""

import copy
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fnddp
from fnddp import laws
from fnddp.laws import DONATIONS, SMALL_BUCKETS, bits, engine_step
from fnddp.simulation.ranks import run_threads
from fnddp.wire.c10d import faster
from fnddp.wire.groups import World, warn_of_lone_ranks, within
from fnddp.wire.kinds import ALL_REDUCE
from tests.ranks import on_ranks
from tests.wires import AloneWire, engine_for


def module_step(linear: nn.Linear) -> None:
    fnddp.DistributedDataParallel(linear, sync="bf16(allreduce)")


def functional_step(linear: nn.Linear) -> None:
    params = {name: p.detach() for name, p in linear.named_parameters()}
    fnddp.value_and_grad(lambda p: p["weight"].sum(), fnddp.allreduce)(params, ())


def pure_step(linear: nn.Linear) -> None:
    fnddp.allreduce({"w": torch.ones(2)}, ())


@pytest.mark.parametrize("train", [module_step, functional_step, pure_step])
@pytest.mark.parametrize("launched", ["2", "1", None])
def test_fewer_ranks_than_were_started_are_warned_of_once(train, launched, monkeypatch, caplog):
    """As where each rank of torchrun makes a world of its own."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if launched:
        monkeypatch.setenv("WORLD_SIZE", launched)
    warn_of_lone_ranks.cache_clear()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    for _ in range(2):
        train(nn.Linear(2, 2))
    said = [each.getMessage() for each in caplog.records if each.name == "fnddp" and "WORLD_SIZE" in each.getMessage()]
    assert len(said) == (launched == "2")
    assert all("WORLD_SIZE=2, but the default process group has 1: " in line for line in said)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("allreduce", "all_reduce"),
        ("error_feedback(topk(allgather, ratio=0.1))", "all_gather"),
        ("error_feedback(quantize(two_shot))", "all_to_all"),
    ],
)
def test_value_and_grad_sends_before_the_last_gradient(text, kind):
    """Its bits are in test_adapters."""
    sync, side, wire = fnddp.parse(text), 600, AloneWire(3)  # a matrix fills the first bucket
    params = {name: torch.ones(side, side) for name in ("first", "last")}

    def loss(params, x):
        params["first"].register_hook(lambda grad: wire.log.append("last gradient"))
        return ((x @ params["first"]) @ params["last"]).sum()

    fnddp.value_and_grad(loss, sync, wire=wire)(params, sync.init(params), torch.ones(3, side))
    assert f"{kind} 0" in wire.log[: wire.log.index("last gradient")]


@pytest.mark.parametrize(("sync", "plans"), [(fnddp.allreduce, 1), (fnddp.two_shot, 2)])  # rows are as many as ranks
def test_fewer_ranks_take_part(sync, plans):
    """With one plan, where nothing in it depends on how many they are."""
    wire, grads, seen = AloneWire(3), laws.model(0, 0), set()
    engine = engine_for(sync, grads, donation=DONATIONS[2], bucket_caps=SMALL_BUCKETS, wire=wire)
    for wire.ranks in (3, 2, 3):
        with within(World(wire)):
            expected, _ = sync(grads, ())
        done = engine_step(engine, (), grads, random.Random(0))
        assert bits(done.mean) == bits({path: expected[path] for path in done.mean})
        seen.add(id(engine.plan))
    assert len(seen) == plans


@pytest.mark.parametrize("text", ["allreduce", "error_feedback(powersgd(allreduce))"])
def test_the_order_of_launches_does_not_depend_on_the_hosts_time(text):
    """As on CUDA, whose streams order what is launched: nothing depends on when the host looks."""
    sync, grads = fnddp.parse(text), laws.model(0, 0)
    logs = []
    for trial in range(4):
        wire, timing = AloneWire(), random.Random(trial)
        engine = engine_for(sync, grads, donation=DONATIONS[1], bucket_caps=(200, 500), wire=wire)
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
        grad = torch.tensor([float(rank)])
        first, second = (engine_for(fnddp.allreduce, {"w": grad}, state=()) for _ in range(2))
        early, late = first.begin(), second.begin()
        early.feed("w", grad)
        means = [early.finish().mean["w"]]
        last = first.begin()
        last.feed("w", grad)
        late.feed("w", 10 * grad)
        means += [late.finish().mean["w"], last.finish().mean["w"]]
        return [mean.item() for mean in means]

    assert run_threads(2, body) == [[0.5, 5.0, 0.5]] * 2


@on_ranks(2)
def test_steps_follow_a_new_default_process_group(rank):
    x, params = torch.full((3,), rank + 1.0), {"w": torch.ones(3)}
    jitted, grad_of = fnddp.jit(fnddp.allreduce), fnddp.value_and_grad(lambda p: (p["w"] * x).sum(), fnddp.allreduce)
    again = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    for mean, store in ((1.5, dist.HashStore()), (rank + 1.0, again), (1.5, None)):
        for _ in range(2):
            assert jitted({"w": x}, ())[0]["w"].tolist() == grad_of(params, ())[1]["w"].tolist() == [mean] * 3
        if store is not None:
            dist.destroy_process_group()
            size = 2 if store is again else 1
            dist.init_process_group("gloo", rank=rank % size, world_size=size, store=store)


@on_ranks(2)
def test_a_pipeline_over_a_group_is_not_one_over_a_later_group_of_its_name(rank):
    again = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    group, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(2)][rank]
    sync = fnddp.error_feedback(fnddp.all_reduce(group))
    pipelines = {
        "itself": sync,
        "its text": fnddp.parse(repr(sync)),
        "a copy": copy.deepcopy(sync),
        "in a hierarchy": fnddp.hierarchical(fnddp.allreduce.over(alone), intra=group, shard=False),
        "put over it": fnddp.allreduce.over(group),
    }
    grads = {"w": torch.full((2,), 1.0 + rank)}
    states = {what: each.init(grads) for what, each in pipelines.items()}
    steps = {what: fnddp.jit(each) for what, each in pipelines.items()}
    steps |= {f"{what}, plain": each for what, each in pipelines.items()}
    grad_of = fnddp.value_and_grad(lambda p: (p["w"] * (1.0 + rank)).sum(), sync)
    steps["value_and_grad"] = lambda grads, state: grad_of(grads, state)[1:]
    steps["compiled"] = torch.compile(sync, backend="eager")

    def run(what):
        return steps[what](grads, states.get(what.split(",")[0], states["itself"]))[0]["w"].tolist()

    assert [run(what) for what in steps] == [[1.5, 1.5]] * len(steps)
    name = group.group_name
    del group, alone  # Dynamo's guard is about a group that nothing holds
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=rank, world_size=2, store=again)
    later = dist.new_group([0, 1])
    assert later.group_name == name
    for what in steps:
        with pytest.raises(RuntimeError, match="process group '.*was destroyed"):
            run(what)
    made = fnddp.error_feedback(fnddp.all_reduce(later))
    assert made == sync  # in writing
    assert fnddp.jit(made)(grads, made.init(grads))[0]["w"].tolist() == [1.5, 1.5]


@on_ranks(2)
def test_rings_that_go_on_in_another_order_on_each_rank(rank):
    """Later messages are posted when earlier ones have come, so those of one ring could be taken for another's."""
    buffers = [torch.full((4,), size * (rank + 1), dtype=torch.float16) for size in (1.0, 100.0)]
    rings = [faster(ALL_REDUCE, buffer, buffer, "sum", dist.group.WORLD)(tag) for tag, buffer in enumerate(buffers)]
    posted = [next(ring) for ring in rings]
    for _ in range(2):
        for i in (0, 1) if rank == 0 else (1, 0):
            for work in posted[i]:
                work.wait()
            posted[i] = next(rings[i], [])
    assert [buffer.tolist() for buffer in buffers] == [[3.0] * 4, [300.0] * 4]
