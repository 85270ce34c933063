"""Whole steps over a wire that is no process group: queues between threads."""

import random
import threading
from typing import Any

import pytest
import torch

import fnddp
from examples.topk import largest
from examples.two_shot import int8_two_shot
from fnddp import laws
from fnddp.core import tree
from fnddp.core.sync import Sync
from fnddp.ir.program import LeafSpec
from fnddp.laws import DONATIONS, SMALL_BUCKETS, bits, engine_step
from fnddp.run.engine import Engine
from fnddp.wire.groups import World, within
from tests.traces import check_laws
from tests.wires import AloneWire, ReadyWork, over_threads

TOPK, TWO_SHOT = fnddp.error_feedback(largest(0.1)), fnddp.error_feedback(int8_two_shot())


def engine_for(sync: Sync, grads: Any, wire: Any) -> Engine:
    leaves = {path: LeafSpec.of(leaf) for path, leaf in tree.flatten(grads)[0].items()}
    return Engine(sync, leaves, donation=DONATIONS[2], learns_order=True, bucket_caps=SMALL_BUCKETS, wire=wire)


@pytest.mark.parametrize(("n", "grads"), [(2, laws.mixed), (3, laws.bare)])
@pytest.mark.parametrize("sync", [TOPK, TWO_SHOT])
def test_own_carriers_keep_the_laws(sync, n, grads):
    check_laws(n, sync, grads)


def test_bytes_of_two_shot():
    matrices = {name: torch.empty(1 << 18, device="meta") for name in "ab"}  # 1 MiB each
    plan = fnddp.lower(TWO_SHOT, matrices, world_size=1024)
    blocks = 2**18 // 64  # each of 64 bytes and a float32; each rank owns 4 of them
    assert [(c.kind.name, c.slot, c.wire_bytes) for c in plan.collectives] == [
        ("all_to_all", 0, blocks * 68),
        ("all_to_all", 1, blocks * 68),
        ("all_gather", 1, 4 * 68),
        ("all_gather", 2, 4 * 68),
    ]
    exact = 2 * (blocks * 68 * 1023 / 1024 + 4 * 68 * 1023)
    assert sum(c.link_bytes for c in plan.collectives) == exact


SIDE = 600  # a matrix fills the first bucket


@pytest.mark.parametrize(
    ("sync", "kind"), [(fnddp.allreduce, "all_reduce"), (TOPK, "all_gather"), (TWO_SHOT, "all_to_all")]
)
def test_value_and_grad_overlaps_and_jit_is_eager(sync, kind):
    def body(wire):
        generator = torch.Generator().manual_seed(7)
        params = {name: torch.randn(SIDE, SIDE, generator=generator) for name in ("first", "last")}
        x = torch.randn(3, SIDE, generator=torch.Generator().manual_seed(wire.me))

        def loss(params, x):
            return ((x @ params["first"]) @ params["last"]).sum()

        def watched(params, x):
            params["first"].register_hook(lambda grad: wire.hub.log.append((wire.me, "last gradient")))
            return loss(params, x)

        _, grads, state = fnddp.value_and_grad(watched, sync, wire=wire)(params, sync.init(params), x)
        mine = [what for rank, what in wire.hub.log if rank == wire.me]
        assert kind in mine[: mine.index("last gradient")], mine
        local = torch.func.grad(loss)(params, x)
        jitted = fnddp.jit(sync, wire=wire)(local, sync.init(params))
        with within(World(wire)):
            expected = sync(local, sync.init(params))
        assert bits((grads, state)) == bits(jitted) == bits(tuple(expected))

    over_threads(3, body, delay=0.002)


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


def test_fewer_ranks_take_part_without_lowering_again():
    grads = {"w": torch.arange(6.0), "count": torch.tensor([3, 5])}
    barrier = threading.Barrier(3)

    def body(wire):
        engine = engine_for(fnddp.allreduce, grads, wire)
        means, plans = [], {}
        for active in (3, 2, 3):
            barrier.wait()
            wire.hub.active = active
            barrier.wait()
            if wire.me < active:
                mine = {path: leaf * (wire.me + 1) for path, leaf in grads.items()}
                means.append(engine_step(engine, (), mine, random.Random(0)).mean)
                plans[id(engine.plan)] = engine.plan
        assert len(plans) == 1
        return means

    first, second, _ = over_threads(3, body)
    for means in (first, second):
        assert torch.equal(means[0]["w"], (grads["w"] / 3 + grads["w"] * 2 / 3) + grads["w"] * 3 / 3)
        assert torch.equal(means[1]["w"], grads["w"] / 2 + grads["w"] * 2 / 2)
        assert means[1]["count"].tolist() == [5, 8]  # 4.5 and 7.5, halves up
        assert bits(means[2]) == bits(means[0])


def test_rows_are_planned_for_the_ranks_that_take_part():
    barrier = threading.Barrier(3)
    sync = int8_two_shot()

    def body(wire):
        engine = engine_for(sync, laws.model(0, 0), wire)
        for active in (3, 2):
            barrier.wait()
            wire.hub.active = active
            barrier.wait()
            if wire.me < active:
                with within(World(wire)):
                    expected, _ = sync(laws.model(wire.me, active), ())
                done = engine_step(engine, (), laws.model(wire.me, active), random.Random(wire.me))
                assert bits(done.mean) == bits({path: expected[path] for path in done.mean})

    over_threads(3, body)
