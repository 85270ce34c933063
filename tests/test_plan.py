"""Lowering, pass by pass: each keeps the numbers, and each does what it is for. Plans are data: most need no ranks."""

import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fnddp
from fnddp import WireCounter, allreduce, error_feedback, fp16, lower, partition, powersgd
from fnddp.core import tree
from fnddp.core.buckets import MB, assign_buckets
from fnddp.ir.program import Divisor, Grad, LeafSpec, Mean, Part, Received, Sent, Span
from fnddp.laws import DONATIONS, SMALL_BUCKETS, bits, engine_step, law_6_lowered_is_eager, make_engine
from fnddp.plan.draft import Donation, Draft, Request
from fnddp.plan.graph import tensor_nodes
from fnddp.plan.lower import Traces, lower_leaves
from fnddp.plan.passes.simplify import fuse, simplify
from fnddp.plan.passes.trace import trace
from fnddp.plan.plan import Plan
from fnddp.simulate.ranks import run_threads
from fnddp.wire.groups import World, within
from tests.pipelines import EXAMPLES, grads
from tests.ranks import on_ranks

aten: Any = torch.ops.aten


def specs_of(leaves: dict[str, Tensor]) -> dict[str, LeafSpec]:
    return {path: LeafSpec.of(leaf) for path, leaf in leaves.items()}


def params(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def operations(draft: Draft) -> Counter:
    return Counter(node.target for node in tensor_nodes(draft.graph))


def trace_of(sync: fnddp.Sync, leaves: dict[str, Tensor], state: Any) -> Draft:
    nbytes = {path: leaves[path].nbytes for path in reversed(leaves)}
    buckets = assign_buckets(nbytes, caps=(200, 500))
    return trace(Request(sync, specs_of(leaves), state, buckets, Donation(), frozenset(), World(), None))


def test_what_only_sent_needs_is_not_computed():
    leaves = {"w": torch.ones(64, 32), "b": torch.ones(64)}

    def traced(sync: fnddp.Sync) -> Draft:
        return trace_of(sync, leaves, sync.init(leaves))

    # With error feedback the factors that this rank sent are multiplied too, with q as the other ranks saw it.
    without, with_memory = (operations(traced(s)) for s in (powersgd(allreduce), error_feedback(powersgd(allreduce))))
    products = [sum(count for target, count in ops.items() if "mm" in str(target)) for ops in (without, with_memory)]
    assert products[0] < products[1]
    assert without.total() < with_memory.total()
    alone = operations(traced(allreduce))
    assert {str(target).split(".")[1] for target in alone} <= {"div", "all_reduce", "wait_tensor", "view", "clone"}


LARGE = {"w": torch.randn(256, 256, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize(
    ("leaves", "fused"),
    [
        (LARGE, 1),
        ({"w": LARGE["w"].view(256, 32, 8, 1)}, 1),  # through a matrix view
        ({"w": LARGE["w"].double()}, 0),  # a product in double precision is not summed first
        ({"w": LARGE["w"][:255]}, 0),  # not worth it
    ],
    ids=["float32", "4-d", "float64", "small"],
)
def test_residuals_of_large_matrices_are_one_product(leaves, fused, monkeypatch):
    monkeypatch.setitem(fuse.__globals__, "_keeps_bits", lambda *_: True)  # BLAS libraries differ in that
    sync = error_feedback(powersgd(allreduce, rank=2))
    draft = trace_of(sync, leaves, sync.init(leaves))
    before = operations(draft)
    after = operations(fuse(simplify(draft)))
    assert after[aten.addmm.default] - before[aten.addmm.default] == fused
    assert before[aten.mm.default] - after[aten.mm.default] == fused


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(257, 300), (1031, 64), (64, 1031), (512, 64, 3, 3)])
@pytest.mark.parametrize("rank", [1, 4, 7])
def test_fused_steps_keep_the_bits(shape, rank):
    def large(me: int, step: int) -> dict[str, Tensor]:
        return {"w": torch.randn(shape, generator=torch.Generator().manual_seed(10 * step + me))}

    sync = fnddp.parse(f"error_feedback(powersgd(fp16(allreduce), rank={rank}))")
    run_threads(2, partial(law_6_lowered_is_eager, donation=DONATIONS[2]), sync, large)


def test_buckets_are_closed_at_the_cap_and_the_first_one_early():
    half = (MB // 8,)  # half a MiB of float32
    leaves = params(**{f"w{i:02}": half for i in range(60)})
    plan = lower(allreduce, leaves, world_size=4)
    assert [c.wire_bytes / MB for c in plan.collectives] == [1, 25, 4]
    assert list(plan.buckets) == list(reversed(leaves))  # the last layer's gradients come first
    assert {payload.label for payload in plan.collectives[0].payloads} == {"w59", "w58"}
    plan = lower(allreduce, leaves, world_size=4, bucket_cap_mb=2, first_bucket_mb=0.5)
    assert [c.wire_bytes / MB for c in plan.collectives] == [0.5, *[2] * 14, 1.5]


def test_arrival_decides_the_buckets():
    leaves = params(a=(4,), b=(4,), c=(4,))
    plan = lower(allreduce, leaves, world_size=2, arrival=["b", "c", "a"], bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
    assert [c.payloads[0].label for c in plan.collectives] == ["b", "c", "a"]
    for wrong in (["a", "b"], ["a", "b", "c", "c"], ["a", "b", "d"]):
        with pytest.raises(ValueError, match=r"arrival must name each of the leaves \['a', 'b', 'c'\] once"):
            lower(allreduce, leaves, world_size=2, arrival=wrong)
    with pytest.raises(ValueError, match="bucket_cap_mb and first_bucket_mb must be positive"):
        lower(allreduce, leaves, world_size=2, bucket_cap_mb=0)


def test_groups_and_operations_travel_apart():
    rules = {
        "a*": fnddp.all_reduce(op="sum"),
        "b*": fnddp.all_reduce(op="max"),
        "c*": fnddp.all_reduce(group="other"),
        "d*": allreduce,  # divided first: on the wire a sum too
    }
    leaves = params(a1=(1,), b1=(2,), b2=(4,), c1=(8,), d1=(16,), a2=(32,))
    plan = lower(partition(rules), leaves, world_size={None: 2, "other": 2})
    assert {(c.op, c.group, c.numel) for c in plan.collectives} == {
        ("sum", None, 1 + 16 + 32),
        ("max", None, 2 + 4),
        ("sum", "other", 8),
    }


def test_leaves_without_elements_do_not_travel():
    plan = lower(allreduce, params(empty=(0, 3), w=(3,)), world_size=2)
    assert [[payload.label for payload in c.payloads] for c in plan.collectives] == [["w"]]
    assert lower(allreduce, {}, world_size=2).collectives == ()


def test_second_rounds_go_behind_the_next_buckets_first_one():
    leaves = params(**{f"w{i}": (32, 32) for i in range(3)})
    sync = powersgd(allreduce, rank=1, orthogonalization="qr")  # leaf by leaf: small buckets share a stack otherwise
    plan = lower(sync, leaves, world_size=2, bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
    order = [(c.bucket, c.depth) for c in plan.collectives]
    assert order == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]
    assert [c.slot for c in plan.collectives] == [0, 1, 1, 2, 2, 3]
    assert [segment.launches.index for segment in plan.segments if segment.launches is not None] == list(range(6))
    slots = [segment.slot for segment in plan.segments]
    assert slots == sorted(slots)


@pytest.fixture(scope="module")
def first_steps() -> list[tuple[fnddp.Sync, Any, Traces]]:
    with within(World(size=2)):
        return [(sync, sync.init(grads("model", 0)), Traces()) for sync in map(fnddp.parse, EXAMPLES.values())]


@pytest.mark.parametrize("donation", DONATIONS, ids=str)
def test_segments_read_what_is_there_and_overwrite_what_they_may(first_steps, donation):
    """A step that fails on another rank leaves the state alone, and gradients that are donated at the end."""
    for sync, state, traces in first_steps:
        options = {"world": World(size=2), "bucket_caps": SMALL_BUCKETS, "donation": donation, "traces": traces}
        plan = lower_leaves(sync, specs_of(grads("model", 0)), state, **options)
        assert not plan.overwrites_state or donation.state
        assert not plan.overwrites or donation.gradients != "no"
        kept = (Part, Grad) if donation.gradients == "at_end" else (Part,)
        parts, _ = tree.flatten_any(state)
        there = {*map(Part, range(len(parts))), *plan.constants, *plan.scratch, *map(Mean, plan.results), Divisor(None)}
        at = [(c.index, i) for c in plan.collectives for i in range(len(c.payloads))]
        placed = {kind(*place) for place in at for kind in (Sent, Received)}
        placed |= {Span(c, first, last) for c, first in at for d, last in at if c == d}
        arrived: set[Grad] = set()
        launched: set[int] = set()
        waited: set[int] = set()
        for segment in plan.segments:
            arrived |= set(map(Grad, segment.needs))
            assert set(segment.waits) <= launched
            waited |= set(segment.waits)
            assert set(segment.inputs) <= there | placed | arrived
            there |= set(segment.outputs)
            there -= set(segment.frees)
            arrived -= set(segment.frees)
            if segment.launches is not None:
                launched.add(segment.launches.index)
            if segment.commits:
                assert waited == set(range(len(plan.collectives)))
            else:
                assert not any(isinstance(operation.written, kept) for operation in segment.operations)
        wanted = {*plan.means.values(), *(part for part in plan.state if not isinstance(part, int))}
        assert wanted <= there | placed | arrived | set(map(Grad, plan.leaves))
        assert launched == set(range(len(plan.collectives)))


@pytest.mark.parametrize("text", ["allreduce", "fp16(allreduce)"])
def test_a_mean_of_many_small_leaves_is_a_few_operations_a_bucket(text):
    leaves = params(**{f"p{i}": (64, 64 - i % 3) for i in range(1000)})
    plan = lower(fnddp.parse(text), leaves, world_size=4)
    buckets = len(set(plan.buckets.values()))
    assert buckets == 2
    assert plan.operations <= 4 * buckets
    divisions = [each for segment in plan.segments for each in segment.operations if each.function == "div"]
    whole = [Span(c.index, 0, len(c.payloads) - 1) for c in plan.collectives]
    assert [each.made for each in divisions] == whole  # of a buffer, whatever the shapes in it


def test_the_algebra_of_many_factors_does_not_grow_with_them():
    """Beside products of whole leaves, at most four of them, as many operations for 96 leaves as for 24."""

    def count(n: int) -> tuple[int, int]:
        leaves = params(**{f"p{i}": (96 + i, 128) for i in range(n)})
        leaves |= params(**{f"b{i}": (96 + i,) for i in range(n)})
        plan = lower(error_feedback(powersgd(fp16(allreduce), rank=4)), leaves, world_size=4, bucket_cap_mb=1000)
        names = [operation.function for segment in plan.segments for operation in segment.operations]
        views = ("transpose", "getitem", "view", "split_with_sizes")
        products = sum(name in ("mm", "addmm") for name in names)
        return products, sum(name not in ("mm", "addmm", *views) for name in names)

    (products, few), (more_products, many) = count(24), count(96)
    assert (products, more_products) == (4 * 24, 4 * 96)
    assert many <= few + 32  # rows to fill blocks of 32 up, of each number once


@pytest.mark.parametrize(
    ("text", "plans"),
    [
        ("allreduce", 1),
        ("error_feedback(powersgd(fp16(allreduce), warm_start=False))", 1),
        ("warmup(powersgd(allreduce, warm_start=False), steps=3)", 2),
        ("warmup(warmup(powersgd(allreduce), steps=1, before=fp16(allreduce)), steps=2)", 3),
        ("warmup(allreduce, steps=0)", 1),
        ("powersgd(allreduce, alternate=True)", 2),
        ("powersgd(allreduce, refresh=3)", 2),
        ("powersgd(allreduce, alternate=True, refresh=4)", 3),
    ],
)
def test_a_plan_for_each_phase(text, plans):
    sync = fnddp.parse(text)

    def body(rank: int) -> None:
        example = grads("model", rank)
        engine, state, expected = make_engine(sync, example), sync.init(example), sync.init(example)
        seen: dict[int, Plan | None] = {}
        for step in range(6):
            mean, expected = sync(grads("model", rank, step), expected)
            done = engine_step(engine, state, grads("model", rank, step), random.Random(rank))
            state = engine.state
            assert bits(done.mean) == bits(mean), f"step {step}"
            assert bits(state) == bits(expected), f"step {step}"
            seen[id(engine.plan)] = engine.plan
        assert len(seen) == plans

    run_threads(2, body)


LARGE_TREE = params(
    **{f"layer{i}.weight": (512, 512) for i in range(3)}, **{f"layer{i}.bias": (512,) for i in range(3)}
)


@pytest.mark.thorough
@pytest.mark.parametrize("text", EXAMPLES.values(), ids=EXAMPLES)
def test_offline_plans_are_those_of_a_real_world(text):
    sync = fnddp.parse(text)
    offline = lower(sync, LARGE_TREE, world_size=4)

    def body(rank: int) -> tuple[Any, ...] | None:
        if rank in (1, 2):  # the first and the last one say enough: lowering takes a while, and no other rank
            return None
        plan = lower(sync, LARGE_TREE)
        return plan.collectives, plan.wire_bytes, str(plan)

    for collectives, wire_bytes, shown in run_threads(4, body)[::3]:
        assert collectives == offline.collectives
        assert wire_bytes == offline.wire_bytes
        assert shown == str(offline)
    sizes = {c.world_size for c in lower(sync, LARGE_TREE, world_size=1024).collectives}
    assert sizes == ({1024} if offline.collectives else set())  # none sends nothing, and every not in its first step


@pytest.mark.thorough
@on_ranks(2)
def test_wire_bytes_are_what_is_sent(rank: int) -> None:
    for text in [*EXAMPLES.values(), "partition({'fc*': fp16(all_reduce(op='sum')), '*': all_reduce(op='max')})"]:
        sync = fnddp.parse(text)
        step = fnddp.jit(sync)
        state = step.init(grads("model", rank))
        for i in range(3):
            with WireCounter() as eager:
                sync(grads("model", rank, i), state)
            with WireCounter() as counter:
                _, state = step(grads("model", rank, i), state)
            assert step.plan is not None
            assert (counter.wire_bytes, counter.collectives) == (step.plan.wire_bytes, len(step.plan.collectives))
            assert counter.wire_bytes == eager.wire_bytes
            assert counter.collectives <= eager.collectives


def test_a_plan_for_the_learnt_order_needs_no_other_trace(monkeypatch):
    """And it is the one that a trace of its own would give, also in another phase."""
    traced: list[Request] = []

    def counted(request: Request) -> Draft:
        traced.append(request)
        return trace(request)

    monkeypatch.setattr("fnddp.plan.lower.trace", counted)
    sync = fnddp.parse("warmup(error_feedback(powersgd(fp16(allreduce), rank=2)), steps=2)")
    leaves = grads("model", 0, 0)
    specs = {path: LeafSpec.of(leaf) for path, leaf in tree.flatten(leaves)[0].items()}
    state, traces = sync.init(leaves), Traces()

    def plan(order: list[str], step: int, traces: Traces | None) -> str:
        given = state._replace(step=step)
        caps = (100.0, 5000.0)
        options = {"world": World(size=2), "bucket_caps": caps, "donation": Donation("yes", state=True)}
        return lower_leaves(sync, specs, given, arrival=order, traces=traces, **options).show(code=True)

    orders = [list(specs), list(specs)[::-1]]
    shown = [plan(order, step, traces) for step in (0, 1, 2, 3) for order in orders]
    assert len(traced) == 2
    monkeypatch.undo()
    assert shown == [plan(order, step, None) for step in (0, 1, 2, 3) for order in orders]
    assert len(set(shown)) == 4


def test_what_another_trace_has_asked_does_not_hold_for_another_default_dtype(own_transforms):
    @fnddp.transform
    class scaled_by_ones(fnddp.Sync):
        inner: fnddp.Sync

        def init(self, grads):
            return self.inner.init(grads)

        def exchange(self, grads, state):
            return self.inner.exchange({path: g * torch.ones(7).sum().to(g.dtype) for path, g in grads.items()}, state)

    def dtypes() -> set[torch.dtype]:
        plan = lower(scaled_by_ones(allreduce), {"w": torch.ones(7, dtype=torch.float16)}, world_size=2)
        return {each.spec.dtype for segment in plan.segments for each in segment.operations if each.spec is not None}

    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert dtypes() == {torch.float16, dtype}
    finally:
        torch.set_default_dtype(before)
