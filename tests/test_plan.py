"""Lowering, pass by pass: each keeps the numbers, and each does what it is for. Plans are data: most need no ranks."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import fnddp
from fnddp import WireCounter, allreduce, error_feedback, fp16, lower, partition, powersgd
from fnddp.core.buckets import MB, assign_buckets
from fnddp.ir.program import Grad, LeafSpec, PayloadRange, StatePart
from fnddp.laws import DONATIONS, SMALL_BUCKETS, called, law_6_lowered_is_eager, weight_of
from fnddp.plan.draft import Donation, Draft, Request
from fnddp.plan.graph import tensor_nodes
from fnddp.plan.lower import Traces, lower_leaves
from fnddp.plan.passes.simplify import fuse, simplify
from fnddp.plan.passes.trace import trace
from fnddp.wire.groups import World, within
from tests.pipelines import EXAMPLES, HALVES, grads
from tests.ranks import on_ranks
from tests.rings import one_of
from tests.test_passes import Applied

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
    leaves, syncs = {"w": torch.ones(64, 32), "b": torch.ones(64)}, [allreduce, powersgd(allreduce)]
    # With error feedback the factors that this rank sent are multiplied too, with q as the other ranks saw it.
    syncs.append(error_feedback(syncs[1]))
    alone, without, with_memory = (operations(trace_of(sync, leaves, sync.init(leaves))) for sync in syncs)
    products = [sum(count for target, count in ops.items() if "mm" in str(target)) for ops in (without, with_memory)]
    assert products[0] < products[1]
    assert without.total() < with_memory.total()
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


KEPT: dict[str, tuple[tuple[int, ...], ...]] = {
    # Large leaves, which plans do not handle together with others, and whose steps they fuse.
    "all_reduce(op='sum')": ((600, 512), (3,)),
    "error_feedback(bf16(two_shot))": ((512, 64, 3, 3), (3,)),
    "ef21(quantize(allgather, bits=4))": ((600, 512), (3,)),
    "error_feedback(powersgd(fp16(allreduce), rank=1))": ((257, 300), (3,)),
    "error_feedback(powersgd(fp16(allreduce), rank=4))": ((512, 64, 3, 3), (3,)),
    "error_feedback(powersgd(fp16(allreduce), rank=7))": ((1031, 64), (3,)),
    # Numbers that are encoded by themselves, two leaves together: `two_shot` pads the one number that is sent.
    "random_k(sign(two_shot(server_memory=True), scale='none'), ratio=0.2)": ((40,), (5,)),
    # `_foreach_mul_` rounds a factor to the tensors' dtype first, as 48 / 10 here, and `mul_` does not.
    "ef21(bf16(random_k(fp8(allgather, 'e2m1', block=32, scale='e8m0'), ratio=0.2, unbiased=True)))": ((48,), (48,)),
    # A BLAS library may round in another way if an operand doesn't start at a multiple of 16 bytes of a message.
    "rotate(allreduce, block=4)": ((5,), (5, 3), (13, 3), (11, 5)),
    "powersgd(rotate(allreduce, block=4), rank=3, min_compression_rate=0)": ((5,), (5, 3), (13, 3), (11, 5)),
    "powersgd(squared(allreduce), refresh=3)": ((8, 6), (5,), (5, 8)),
}


@pytest.mark.parametrize("text", KEPT)
@on_ranks(2, threads=True)
def test_leaves_of_many_sizes_keep_the_bits(rank, text):
    def leaves(me: int, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(10 * step + me)
        return {f"{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(KEPT[text])}

    law_6_lowered_is_eager(rank, fnddp.parse(text), leaves, donation=DONATIONS[2])


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


def test_second_rounds_follow_the_first_round_of_the_next_bucket():
    # Leaf by leaf: otherwise small buckets share a stack, of factors or of matrices of one shape.
    leaves = params(**{f"w{i}": (32, 32 + i) for i in range(3)})
    sync = powersgd(allreduce, rank=1, orthogonalization="qr")
    plan = lower(sync, leaves, world_size=2, bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
    order = [(c.bucket, c.depth) for c in plan.collectives]
    assert order == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]
    assert [c.slot for c in plan.collectives] == [0, 1, 1, 2, 2, 3]
    assert [segment.launches.index for segment in plan.segments if segment.launches is not None] == list(range(6))
    slots = [segment.slot for segment in plan.segments]
    assert slots == sorted(slots)


@pytest.mark.parametrize("text", one_of(4, EXAMPLES.values()), ids=EXAMPLES)
def test_state_is_written_over_only_after_all_collectives(text):
    """A step that fails on another rank leaves the state alone, and gradients that are donated at the end."""
    sync, traces = fnddp.parse(text), Traces()
    with within(World(size=2)):
        state = sync.init(grads("model", 0))
    for donation in DONATIONS:
        options = {"world": World(size=2), "bucket_caps": SMALL_BUCKETS, "donation": donation, "traces": traces}
        plan = lower_leaves(sync, specs_of(grads("model", 0)), state, **options)
        assert not plan.overwrites_state or donation.state
        assert not plan.overwrites or donation.gradients != "no"
        kept, waited = (StatePart, Grad) if donation.gradients == "at_end" else (StatePart,), set[int]()
        for segment in plan.segments:
            waited |= set(segment.waits)
            if segment.commits:
                assert waited == set(range(len(plan.collectives)))
            else:
                assert not any(isinstance(operation.written, kept) for operation in segment.operations)


@pytest.mark.parametrize("text", ["allreduce", "fp16(allreduce)"])
def test_a_mean_of_many_small_leaves_is_a_few_operations_a_bucket(text):
    leaves = params(**{f"p{i}": (64, 64 - i % 3) for i in range(1000)})
    plan = lower(fnddp.parse(text), leaves, world_size=4)
    buckets = len(set(plan.buckets.values()))
    assert buckets == 2
    assert plan.operations <= 4 * buckets
    divisions = [each for segment in plan.segments for each in segment.operations if each.function == "div"]
    whole = [PayloadRange(c.index, 0, len(c.payloads) - 1) for c in plan.collectives]
    assert [each.made for each in divisions] == whole  # of a buffer, whatever the shapes in it


def test_operations_of_powersgd_do_not_grow_with_the_number_of_leaves():
    """Beside products of whole leaves, at most four of them, as many operations for 96 leaves as for 24."""

    def count(n: int) -> tuple[int, int]:
        leaves = params(**{f"p{i}": (96 + i, 128) for i in range(n)})
        leaves |= params(**{f"b{i}": (96 + i,) for i in range(n)})
        plan = lower(error_feedback(powersgd(fp16(allreduce), rank=4)), leaves, world_size=4, bucket_cap_mb=1000)
        names = [operation.function for segment in plan.segments for operation in segment.operations]
        views = ("transpose", "getitem", "view", "slice", "split_with_sizes")
        products = sum(name in ("mm", "addmm") for name in names)
        return products, sum(name not in ("mm", "addmm", *views) for name in names)

    (products, few), (more_products, many) = count(24), count(96)
    assert (products, more_products) == (4 * 24, 4 * 96)
    assert many <= few + 32  # rows to fill blocks of 32 up, of each number once


LARGE_TREE = params(**{f"fc{i}.weight": (512, 512) for i in range(3)}, **{f"fc{i}.bias": (512,) for i in range(3)})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "text", [*EXAMPLES.values(), "partition({'fc*': fp16(all_reduce(op='sum')), '*': all_reduce(op='max')})"]
)
@on_ranks(2)
def test_offline_plans_and_wire_bytes_are_those_of_a_real_world(rank: int, text: str) -> None:
    sync = fnddp.parse(text)
    step = fnddp.jit(sync)
    state = step.init(grads("model", rank))
    for i in range(3):
        with WireCounter() as eager:
            called(sync, grads("model", rank, i), state)
        with WireCounter() as counter:
            _, state = step(grads("model", rank, i), state, weight=weight_of(sync))
        assert step.plan is not None
        assert (counter.wire_bytes, counter.collectives) == (step.plan.wire_bytes, len(step.plan.collectives))
        assert counter.wire_bytes == eager.wire_bytes
        assert counter.collectives <= eager.collectives
    if "max" not in text:
        plan, offline = lower(sync, LARGE_TREE), lower(sync, LARGE_TREE, world_size=2)
        assert (plan.collectives, plan.wire_bytes) == (offline.collectives, offline.wire_bytes)
        if rank == 0 or text not in [EXAMPLES[name] for name in HALVES]:  # offline plans are those of the first rank
            assert str(plan) == str(offline)
        sizes = {c.world_size for c in lower(sync, LARGE_TREE, world_size=1024).collectives}
        assert sizes == ({1024} if plan.collectives else set())  # none sends nothing, and every not in its first step


def test_a_plan_for_the_learnt_order_needs_no_other_trace(monkeypatch):
    """And it is the one that a trace of its own would give, also in another phase."""
    traced: list[Request] = []
    monkeypatch.setattr("fnddp.plan.lower.trace", lambda request: traced.append(request) or trace(request))
    sync = fnddp.parse("warmup(error_feedback(powersgd(fp16(allreduce), rank=2)), steps=2)")
    leaves = grads("model", 0, 0)
    specs, state, traces = specs_of(leaves), sync.init(leaves), Traces()
    options = {"world": World(size=2), "bucket_caps": (100.0, 5000.0), "donation": Donation("yes", state=True)}

    def plan(order: list[str], step: int, traces: Traces | None) -> str:
        given = state._replace(step=step)
        return lower_leaves(sync, specs, given, arrival=order, traces=traces, **options).show(code=True)

    orders = [list(specs), list(specs)[::-1]]
    shown = [plan(order, step, traces) for step in (0, 1, 2, 3) for order in orders]
    assert len(traced) == 2
    monkeypatch.undo()
    assert shown == [plan(order, step, None) for step in (0, 1, 2, 3) for order in orders]
    assert len(set(shown)) == 4


def test_what_another_trace_has_asked_does_not_hold_for_another_default_dtype():
    sync, leaves = Applied(before=lambda x: x * torch.ones(7).sum().to(x.dtype)), {"w": torch.ones(7).half()}
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            operations = [each for segment in lower(sync, leaves, world_size=2).segments for each in segment.operations]
            assert {each.spec.dtype for each in operations if each.spec is not None} == {torch.float16, dtype}
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("text", "phases"),
    [
        ("allreduce", False),
        ("quantize(two_shot, rounding='stochastic')", False),  # counts steps for its random numbers, for ever
        ("error_feedback(powersgd(fp16(allreduce), warm_start=False))", False),
        ("warmup(allreduce, steps=0)", False),
        ("warmup(fp16(allreduce), 3)", True),
        ("every(2, allreduce)", True),
        ("powersgd(allreduce, rank=1, refresh=900)", True),
    ],
)
def test_a_plan_tells_whether_one_graph_replays_all_later_steps(text: str, phases: bool) -> None:
    params = {"w": torch.empty(64, 64, device="meta")}
    plan = fnddp.lower(text, params, world_size=2)
    assert (plan.uncapturable is not None) == phases
    assert ("CUDA graphs: another plan follows" in str(plan)) == phases
    if text.startswith("warmup"):
        state = plan.sync.init(params)
        last = fnddp.lower(text, params, world_size=2, state=state._replace(step=3))
        assert last.uncapturable is None
