"""Passes keep the numbers of pipelines that are made to mislead them: each was wrong once."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fnddp
from fnddp import Exchange, State, Sync, allreduce, collectives, laws, torch_private, tree
from fnddp.device import Device
from fnddp.ir.program import LeafSpec
from fnddp.laws import bits
from fnddp.plan.draft import Donation
from fnddp.plan.lower import Traces, lower_leaves
from fnddp.plan.passes.trace import Recorder
from fnddp.simulation.ranks import run_threads
from fnddp.tree import Leaves, Tree
from fnddp.wire.groups import World
from tests.pipelines import EXAMPLES, TREES
from tests.ranks import on_ranks
from tests.rings import one_of
from tests.traces import TracesOfThreads


def summed(leaves: Leaves) -> Leaves:
    return collectives.all_reduce(leaves, "sum", None)


def gathered(leaves: Leaves) -> Leaves:
    return {path: collectives.all_gather(leaf, None) for path, leaf in leaves.items()}


@dataclass(frozen=True, repr=False)
class Applied(Sync):
    """`before` is done to each leaf, `send` moves it, and `after` is done to what came."""

    before: Callable[[Tensor], Tensor] = lambda x: x
    send: Callable[[Leaves], Leaves] = summed
    after: Callable[[Tensor], Tensor] = lambda x: x

    groups, ops = frozenset({None}), frozenset({"mean"})

    def init(self, grads: Tree) -> State:
        return ()

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        sent = self.send({path: self.before(leaf) for path, leaf in leaves.items()})
        return Exchange({path: self.after(each) for path, each in sent.items()}, leaves, state)


class Sorted(Applied):
    """Gives its state back in another order than it got it."""

    def init(self, grads: Tree) -> State:
        return {path: torch.zeros_like(leaf) for path, leaf in tree.flatten(grads)[0].items()}

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        return Exchange(dict(leaves), leaves, {path: state[path] + leaves[path] for path in sorted(leaves)})


def test_a_state_that_is_returned_in_another_order_is_not_mixed_up():
    grads = {"w": torch.ones(2), "b": 10 * torch.ones(2)}
    sync = Sorted()
    for step in (sync, fnddp.jit(sync)):
        state = sync.init(grads)
        for _ in range(2):
            _, state = step(grads, state)
        assert (state["w"].tolist(), state["b"].tolist()) == ([2.0, 2.0], [20.0, 20.0])


class Restarted(Sorted):
    """Begins its state anew with a number of its own code, which the caller then changes."""

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        ones = torch.tensor([1.0, 1.0]) * 2 - 1
        mean = {path: leaf * ones + state[path] for path, leaf in leaves.items()}
        return Exchange(mean, leaves, {path: ones.view(1, 2)[0] if path == "w" else ones for path in leaves})


def test_numbers_of_the_code_are_computed_once_but_not_those_of_results():
    grads = {"b": torch.ones(2), "w": torch.ones(2)}
    step = fnddp.jit(Restarted())
    state = step.init(grads)
    for step_of in range(3):
        mean, state = step(grads, state)
        assert [each.tolist() for each in mean.values()] == [[1.0 + (step_of > 0)] * 2] * 2
        kept = {path: part.clone() for path, part in state.items()}
        for part in state.values():
            part.zero_()
        state = kept
    inner = Applied(after=lambda x: x * (torch.tensor([1.0, 3.0]) + 1).sum())
    plan = plan_of_steps(inner, lambda i: {"w": torch.full((3,), float(i))})
    assert plan is not None
    assert [each.function for segment in plan.segments for each in segment.operations] == ["clone", "mul"]


def turned(x: Tensor) -> Tensor:
    """Has another shape at each step, and always the same identity."""
    y = x.clone()
    y.unsqueeze_(0)
    y = y * 2
    return y[0]


def sent_in_two_ways(leaves: Leaves, parity: int) -> Leaves:
    """Every other one in a buffer of bytes."""
    added = summed({path: leaf for i, (path, leaf) in enumerate(leaves.items()) if i % 2 == parity})
    return {path: added[path] if path in added else collectives.all_to_all(leaf) for path, leaf in leaves.items()}


def signed_views(x: Tensor) -> Tensor:
    negative = torch._neg_view(x)
    return torch._neg_view(negative).clone() + torch._neg_view(negative) * 2


def doubled(parity: int) -> Applied:
    return Applied(
        before=lambda x: torch.stack([x, x + 1]) * 2,
        send=lambda leaves: sent_in_two_ways(leaves, parity),
        after=lambda rows: rows.sum(0),
    )


def thrice(x: Tensor) -> Tensor:
    return x * 2 * 2 * 2


def added_twice(x: Tensor) -> Tensor:
    return torch.add(x, 1, alpha=2)


APPLIED = {
    "doubled in buffers of bytes and numbers": doubled(0),
    "doubled in buffers of numbers and bytes": doubled(1),
    "halves in a buffer of bytes": Applied(before=lambda x: x / 2, send=gathered, after=lambda rows: rows.sum(0)),
    "rows that are looked at as one line": Applied(
        before=thrice, send=gathered, after=lambda rows: rows.view(-1).view(len(rows), -1).sum(0)
    ),
    "a chain of one kind": Applied(before=thrice),
    "a chain of one kind, behind": Applied(after=thrice),
    "what is read twice": Applied(before=lambda x: (y := x * 3) * y),
    "gradients that are read twice": Applied(before=lambda x: x * x),
    "gradients that are sent twice": Applied(
        send=lambda leaves: {p: summed({"": x, " ": x})[" "] for p, x in leaves.items()}
    ),
    "alpha and a number": Applied(before=added_twice),
    "alpha and a number, behind": Applied(after=added_twice),
    "shapes that change in place": Applied(before=turned),
    "operations in place": Applied(before=lambda x: torch.zeros_like(x).copy_(x).mul_(2).mul_(2)),
    "means of operations in place": Applied(after=lambda x: x.clone().mul_(3)),
    "means that are copies": Applied(after=torch.clone),
    "means that are copies of gradients": Applied(send=lambda leaves: tree.map_leaves(torch.clone, leaves)),
    "views of views": Applied(before=lambda x: torch.cat([x[1:][1:2], x[1:][:1] * 2, x[:1].expand(4)[1:2], x[3:]])),
    "views that carry a sign": Applied(before=signed_views),
}


def plan_of_steps(sync: Sync, leaves_of: Callable[[int], dict[str, Tensor]]) -> fnddp.Plan | None:
    """The plan of three steps whose results are those of the pipeline, and stay so."""
    step, kept = fnddp.jit(sync), []
    state = expected = sync.init(leaves_of(0))
    for i in range(3):
        want, expected = sync(leaves_of(i), expected)
        got, state = step(leaves_of(i), state)
        kept.append(((want, expected), (got, state)))
    for want, got in kept:  # which later steps leave alone
        assert bits(got) == bits(want)
    return step.plan


@pytest.mark.parametrize("name", APPLIED)
@on_ranks(2, threads=True)
def test_small_leaves_that_run_together_are_not_mixed_up(rank: int, name) -> None:
    def leaves_of(step: int) -> dict[str, Tensor]:
        return {f"leaf {k}": torch.arange(3.0 + k % 2) + k + 10 * rank + 100 * step for k in range(6)}

    plan = plan_of_steps(APPLIED[name], leaves_of)
    if name == "shapes that change in place":
        assert plan is None
    else:
        assert plan is not None
        assert any(operation.count > 1 for segment in plan.segments for operation in segment.operations)


def test_products_of_small_integers_keep_their_numbers_where_devices_convert_them(monkeypatch):
    monkeypatch.setattr(Device, "converts_in_place", True)
    sync = Applied(before=lambda x: (y := (x * 30).to(torch.int8).to(torch.float32)) * y + y * x)
    grads = {"w": torch.arange(4.0)}
    got, want = fnddp.jit(sync, backend=None)(grads, ())[0], sync(grads, ())[0]
    assert got["w"].tolist() == want["w"].tolist() == [0.0, 930.0, 3720.0, 8370.0]


# Leaves of a bucket whose parts a codec encodes by themselves are encoded together.

TOGETHER = [
    "quantize(two_shot)",
    "error_feedback(quantize(two_shot(server_memory=True), bits=4, block=8))",
    "error_feedback(quantize(bf16(two_shot), bits=2))",
    "error_feedback(quantize(fp8(allgather, block=2), block=8))",
    "error_feedback(fp8(two_shot, block=32))",
    "sign(allgather, scale='max', chunk=16)",
    "majority_vote(two_shot)",
    "bf16(two_shot)",
    "bf16(allgather)",
]


@pytest.mark.parametrize("text", one_of(3, TOGETHER))
@pytest.mark.parametrize("converts", [False, True])
@on_ranks(3, threads=True)
def test_leaves_that_are_encoded_together_are_not_mixed_up(rank: int, monkeypatch, text, converts):
    monkeypatch.setattr(Device, "converts_in_place", converts)
    leaves = {f"leaf {i}": torch.zeros(size) for i, size in enumerate([64, 64, 300, 300, 7, 7, 7, 2, 2])}
    leaves["complex"] = torch.zeros(5, dtype=torch.complex64)

    def leaves_of(step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return {path: torch.randn_like(leaf, generator=generator) for path, leaf in leaves.items()}

    plan = plan_of_steps(fnddp.parse(text), leaves_of)
    assert plan is not None
    assert len({payload.label for c in plan.collectives for payload in c.payloads}) < len(leaves)


def test_leaves_of_other_buckets_and_dropped_ones_are_encoded_apart():
    """Or a bucket would wait for the next one."""
    sync = fnddp.parse("quantize(allgather)")
    leaves = {f"leaf {i}": LeafSpec.of(torch.zeros(256)) for i in range(6)}
    traces = Traces()
    options = {"world": World(size=2), "donation": Donation(), "traces": traces}

    def labels(caps: list[float], dropped: set[str]) -> list[str]:
        plan = lower_leaves(sync, leaves, (), bucket_caps=caps, dropped=dropped, **options)
        return [payload.label for collective in plan.collectives for payload in collective.payloads]

    assert labels([1e6], set()) == ["leaf 5..leaf 0"] * 2
    assert labels([3000], set()) == ["leaf 5..leaf 3"] * 2 + ["leaf 2..leaf 0"] * 2
    assert labels([1e6], {"leaf 0", "leaf 5"}) == ["leaf 4..leaf 1"] * 2


# No result is written over what it is still computed from.

FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x + x.T": lambda x, y: x + x.t(),
    "x.T - x": lambda x, y: x.t() - x,
    "x * reversed x": lambda x, y: x * x.flip(0).view_as(x).t(),
    "x @ x": lambda x, y: x @ x,
    "x @ y": lambda x, y: x @ y,
    "y @ x": lambda x, y: y @ x,
    "x + x @ y": lambda x, y: torch.addmm(x, x, y),
    "y + x @ x": lambda x, y: torch.addmm(y, x, x),
}


@dataclass(frozen=True, repr=False)
class Folded(Sync):
    """Folds square leaves before the wire and behind it, there with this rank's own gradient, and a state."""

    fold: Callable[[Tensor, Tensor], Tensor]
    inner: Sync = allreduce

    def init(self, grads: Tree) -> State:
        return {path: torch.eye(len(leaf)) + 0.1 for path, leaf in grads.items()}

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        mean, _, _ = self.inner.exchange({path: self.fold(leaf * 2, leaf) / 8 for path, leaf in leaves.items()}, ())
        power = {path: self.fold(state[path], leaf) / 8 for path, leaf in mean.items()}
        return Exchange({path: self.fold(leaves[path], leaf * 3) for path, leaf in mean.items()}, leaves, power)


def squares(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {path: torch.randn(6, 6, generator=generator) for path in ("a", "b")}


@pytest.mark.thorough
@pytest.mark.parametrize("donation", laws.DONATIONS, ids=lambda d: f"{d.gradients}-{d.state}")
@pytest.mark.parametrize("how", FOLDS)
def test_operations_are_not_written_over_operands_that_they_read_in_another_order(how, donation):
    run_threads(2, partial(laws.law_6_lowered_is_eager, donation=donation), Folded(FOLDS[how]), squares)


@pytest.mark.thorough
@pytest.mark.parametrize("name", EXAMPLES)
def test_results_do_not_share_memory_with_the_next_step(monkeypatch, name):
    """Large results of operations lie in memory that steps share; here all of them are large."""
    monkeypatch.setattr(Device, "light_bytes", 0)
    sync, traces = fnddp.parse(EXAMPLES[name]), TracesOfThreads()
    for donation in laws.DONATIONS[1:]:
        law = partial(laws.law_6_lowered_is_eager, donation=donation, traces=traces)
        run_threads(2, law, sync, TREES["model"])


@pytest.mark.parametrize("text", ["error_feedback(topk(allgather, ratio=0.5))", "powersgd(bf16(allreduce), rank=2)"])
def test_a_trace_asks_once_what_an_operation_makes_of_leaves_of_one_shape(monkeypatch, text):
    asked: list[object] = []
    dispatch = FakeTensorMode.dispatch
    monkeypatch.setattr(
        FakeTensorMode, "dispatch", lambda mode, func, *rest: asked.append(func) or dispatch(mode, func, *rest)
    )

    def answers(n: int) -> Counter[object]:
        asked.clear()
        monkeypatch.setattr(Recorder, "_shared", {})
        fnddp.lower(fnddp.parse(text), {f"{i}": torch.empty(9, 8) for i in range(n)}, world_size=2)
        return Counter(map(str, asked))

    more = answers(9) - answers(3)
    assert {*more} <= {"aten.detach.default"}  # which is no operation of a plan


@pytest.mark.thorough
@pytest.mark.parametrize("name", EXAMPLES)
def test_kernels_make_what_the_rules_of_fake_tensors_make(monkeypatch, name):
    plans, sync = list[str](), fnddp.parse(EXAMPLES[name])
    leaves = TREES["model" if sync.takes_weight else "mixed"](0, 0)  # integers have no weight
    for is_made_by_kernel in (torch_private._is_made_by_kernel, lambda operation: False):
        monkeypatch.setattr(torch_private, "_is_made_by_kernel", is_made_by_kernel)
        monkeypatch.setattr(Recorder, "_shared", {})
        plan = fnddp.lower(sync, leaves, world_size=3)
        # Strides of dimensions of one element may differ, and with them what is written in place.
        plans.append(re.sub(r" in \w+$", "", plan.show(code=True), flags=re.MULTILINE) + repr(plan.means))
    assert plans[0] == plans[1]
