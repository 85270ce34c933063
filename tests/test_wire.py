"""Whole steps over a wire that is no process group."""

import random
from typing import Any

import pytest
import torch

import fnddp
from fnddp import laws
from fnddp.ir.program import LeafSpec
from fnddp.laws import DONATIONS, SMALL_BUCKETS, bits, engine_step
from fnddp.run.engine import Engine
from fnddp.wire.groups import World, within
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
