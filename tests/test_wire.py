"""Whole steps over a wire that is no process group: queues between threads."""

import copy
import random
import threading
from typing import Any

import pytest
import torch
from torch import nn

import fnddp
from examples.topk import largest
from examples.two_shot import int8_two_shot
from fnddp import laws
from fnddp.core import tree
from fnddp.core.sync import Sync
from fnddp.ir.program import LeafSpec
from fnddp.laws import DONATIONS, SMALL_BUCKETS, bits, engine_step
from fnddp.plan.lower import Traces
from fnddp.run.engine import Engine
from fnddp.wire.groups import World, within
from fnddp.wire.kinds import ALL_REDUCE
from tests.pipelines import EXAMPLES
from tests.traces import TracesOfThreads, check_laws
from tests.wires import AloneWire, Hub, ReadyWork, ThreadWire, over_threads

ALLOWED = 2e-2  # of the largest gradient: bfloat16 on the wire
OWN = {"topk": fnddp.error_feedback(largest(0.1)), "two_shot": fnddp.error_feedback(int8_two_shot())}
PIPELINES = {name: fnddp.parse(text) for name, text in EXAMPLES.items()} | OWN


def engine_for(sync: Sync, grads: Any, wire: Any, donation: Any = DONATIONS[2], traces: Traces | None = None) -> Engine:
    leaves = {path: LeafSpec.of(leaf) for path, leaf in tree.flatten(grads)[0].items()}
    options = {"learns_order": True, "bucket_caps": SMALL_BUCKETS, "wire": wire, "traces": traces}
    return Engine(sync, leaves, donation=donation, **options)


def eager_and_lowered(wire: ThreadWire, sync: Sync, grads: Any, traces: Traces) -> list[tuple[Any, Any]]:
    """Law 6, and for each step the mean and what this rank has sent."""
    engine = engine_for(sync, grads(wire.me, 0), wire, traces=traces)
    order = random.Random(wire.me)
    expected = sync.init(grads(wire.me, 0))
    start, steps = copy.deepcopy(expected), []
    for step in range(3):
        with within(World(wire)), torch.no_grad():
            done = sync.exchange(tree.flatten(grads(wire.me, step))[0], expected)
        expected = done.state
        lowered = engine_step(engine, start, grads(wire.me, step), order)
        start = None
        paths = list(lowered.mean)
        assert bits(lowered.mean) == bits({path: done.mean[path] for path in paths}), f"step {step}"
        assert bits(engine.state) == bits(expected), f"step {step}"
        steps.append((done.mean, done.sent))
    assert engine.plan is not None
    return steps


@pytest.mark.thorough
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", PIPELINES)
def test_laws_2_4_and_6(name, n):
    sync = PIPELINES[name]
    grads = laws.model if "partition" in name or n == 3 else laws.mixed
    everyone = over_threads(n, eager_and_lowered, sync, grads, TracesOfThreads(), delay=0.002)
    for step in range(3):
        mean = everyone[0][step][0]
        if not sync.ops:  # nothing is reduced
            continue
        for other in everyone:
            assert bits(other[step][0]) == bits(mean)
        for path, leaf in mean.items():
            if tree.is_inexact(leaf) and sync.sent_is_exact:
                sent = torch.stack([other[step][1][path].to(torch.complex128) for other in everyone])
                total = sent.sum(0) if sync.ops == {"sum"} else sent.mean(0)
                scale = max(1.0, *[each.abs().max().item() for each in sent if each.numel()], 1.0)
                torch.testing.assert_close(leaf.to(torch.complex128), total, rtol=0, atol=ALLOWED * scale)


@pytest.mark.parametrize(("n", "grads"), [(2, laws.mixed), (3, laws.model), (3, laws.bare), (4, laws.model)])
@pytest.mark.parametrize("name", OWN)
def test_own_carriers_keep_the_laws(name, n, grads):
    check_laws(n, OWN[name], grads)


MATRICES = {"a": torch.empty(1 << 18, device="meta"), "b": torch.empty(1 << 18, device="meta")}  # 1 MiB each


def test_bytes_of_topk():
    plan = fnddp.lower(OWN["topk"], MATRICES, world_size=1024)
    kept = 26214  # a tenth of 2 ** 18
    assert plan.wire_bytes == 2 * kept * (4 + 4)
    assert sum(c.link_bytes for c in plan.collectives) == 1023 * plan.wire_bytes
    assert [(c.kind.name, c.slot, c.depth) for c in plan.collectives] == [("all_gather", 0, 0), ("all_gather", 1, 0)]


def test_bytes_of_two_shot():
    plan = fnddp.lower(OWN["two_shot"], MATRICES, world_size=1024)
    blocks = 2**18 // 64  # each of 64 bytes and a float32; each rank owns 4 of them
    assert [(c.kind.name, c.slot, c.wire_bytes) for c in plan.collectives] == [
        ("all_to_all", 0, blocks * 68),
        ("all_to_all", 1, blocks * 68),
        ("all_gather", 1, 4 * 68),
        ("all_gather", 2, 4 * 68),
    ]
    exact = 2 * (blocks * 68 * 1023 / 1024 + 4 * 68 * 1023)
    assert sum(c.link_bytes for c in plan.collectives) == exact


@pytest.mark.parametrize("name", OWN)
def test_own_carriers_survive_zeros(name):
    with within(World(AloneWire())):
        mean, state = OWN[name]({"w": torch.zeros(100)}, OWN[name].init({"w": torch.zeros(100)}))
    assert not mean["w"].any()
    assert not state.residual["w"].any()


def backward_of(wire: ThreadWire, params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    params["first"].register_hook(lambda grad: wire.hub.log.append((wire.me, "last gradient")))
    return ((x @ params["first"]) @ params["last"]).sum()


SIDE = 600  # a matrix fills the first bucket


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, SIDE, generator=torch.Generator().manual_seed(10 * step + rank))


def parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(SIDE, SIDE, generator=generator) for name in ("first", "last")}


def gradients(rank: int, step: int = 0) -> dict[str, torch.Tensor]:
    params = parameters()
    return torch.func.grad(lambda p: ((batch(rank, step) @ p["first"]) @ p["last"]).sum())(params)


def require_overlap(wire: ThreadWire, kind: str) -> None:
    mine = [what for rank, what in wire.hub.log if rank == wire.me]
    assert f"{kind} 0" in mine[: mine.index("last gradient")], mine


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("name", "kind"), [("allreduce", "all_reduce"), ("topk", "all_gather"), ("two_shot", "all_to_all")]
)
def test_value_and_grad_overlaps(name, kind, n):
    def body(wire):
        sync, params = PIPELINES[name], parameters()
        step = fnddp.value_and_grad(lambda p, x: backward_of(wire, p, x), sync, wire=wire)
        _, grads, state = step(params, sync.init(params), batch(wire.me))
        require_overlap(wire, kind)
        with within(World(wire)):
            expected, expected_state = sync(gradients(wire.me), sync.init(params))
        assert bits(grads) == bits(expected)
        assert bits(state) == bits(expected_state)

    over_threads(n, body)


@pytest.mark.parametrize("name", ["error_feedback", "topk", "two_shot"])
def test_jit(name):
    def body(wire):
        sync = PIPELINES[name]
        step = fnddp.jit(sync, wire=wire)
        state = expected_state = sync.init(laws.model(0, 0))
        for i in range(3):
            mean, state = step(laws.model(wire.me, i), state)
            with within(World(wire)):
                expected, expected_state = sync(laws.model(wire.me, i), expected_state)
            assert bits(mean) == bits(expected)
        assert step.plan is not None

    over_threads(3, body, delay=0.002)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", ["allreduce", "topk", "two_shot"])
def test_wrapped_module(name, n):
    lock = threading.Lock()

    def body(wire):
        with lock:  # the global generator
            torch.manual_seed(wire.me)
            module = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE))
        model = fnddp.DistributedDataParallel(module, sync=PIPELINES[name], wire=wire)
        module[0].bias.register_hook(lambda grad: wire.hub.log.append((wire.me, "last gradient")))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(wire.me, step)).square().mean().backward()
            optimizer.step()
        mine = [what for rank, what in wire.hub.log if rank == wire.me]
        first = mine.index("last gradient")
        assert any(what.startswith("all_") and what.endswith(" 0") for what in mine[:first]), mine
        return {name: p.detach() for name, p in module.named_parameters()}

    everyone = over_threads(n, body)
    assert all(bits(other) == bits(everyone[0]) for other in everyone)


def test_a_failing_rank_ends_the_step_on_all():
    def body(wire):
        sync, params = PIPELINES["two_shot"], parameters()
        fails = [False, True, False]

        def loss_of(params, x, step):
            if fails[step] and wire.me == 1:
                params["first"].register_hook(lambda grad: 1 // 0)  # when the last layer's gradient is on its way
            return ((x @ params["first"]) @ params["last"]).sum()

        step = fnddp.value_and_grad(loss_of, sync, wire=wire)
        _, _, state = step(params, sync.init(params), batch(wire.me), 0)
        before = copy.deepcopy(state)
        with pytest.raises(ZeroDivisionError if wire.me == 1 else fnddp.StepFailedError):
            step(params, state, batch(wire.me), 1)
        assert bits(state) == bits(before)
        _, grads, _ = step(params, state, batch(wire.me), 2)
        return grads

    everyone = over_threads(3, body)
    assert all(bits(other) == bits(everyone[0]) for other in everyone)


class Refuses(ReadyWork):
    def wait(self) -> bool:
        return False


class RefusingWire(AloneWire):
    def start(self, *args: Any, **kwargs: Any) -> ReadyWork:
        super().start(*args, **kwargs)
        return Refuses()


@pytest.mark.parametrize("name", ["allreduce", "topk", "two_shot"])
def test_a_wait_that_returns_false_is_an_error(name):
    wire, grads = RefusingWire(), laws.model(0, 0)
    sync = PIPELINES[name]
    step = fnddp.jit(sync, wire=wire)
    with pytest.raises(fnddp.CollectiveError, match="returned False"):
        step(grads, sync.init(grads))
    with pytest.raises(RuntimeError, match="out of step"):
        step(grads, sync.init(grads))


def test_fewer_ranks_take_part_without_lowering_again():
    grads = {"w": torch.arange(6.0), "count": torch.tensor([3, 5])}
    barrier = threading.Barrier(3)

    def body(wire):
        engine = engine_for(fnddp.allreduce, grads, wire)
        means = []
        for active in (3, 2, 3):
            barrier.wait()
            wire.hub.active = active
            barrier.wait()
            if wire.me < active:
                mine = {path: leaf * (wire.me + 1) for path, leaf in grads.items()}
                means.append(engine_step(engine, (), mine, random.Random(0)).mean)
        assert len(engine._prepared) == 1
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


def test_the_hub_notices_ranks_that_differ():
    hub = Hub(2)
    one, other = ThreadWire(hub, 0), ThreadWire(hub, 1)
    one.vote(torch.zeros(2), None)
    with pytest.raises(RuntimeError, match="the others"):
        other.start(ALL_REDUCE, torch.zeros(2), torch.zeros(2), "sum", None)
