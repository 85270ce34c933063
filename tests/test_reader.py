"""Regressions of the engine and the passes, by pipelines made for them: each was wrong once."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fnddp
from fnddp import Exchange, State, allreduce, partition
from fnddp.core import collectives, tree
from fnddp.core.tree import Leaves, Tree
from fnddp.ir.program import LeafSpec
from fnddp.plan.draft import Donation
from fnddp.run.engine import Engine
from fnddp.simulate.ranks import run_threads
from fnddp.transforms.orthogonalize import unit_rows
from tests.ranks import on_ranks


@on_ranks(2)
def test_ranks_ask_several_groups_in_one_order(rank: int) -> None:
    """Not in that of hashes, which differ between processes."""
    names = [dist.new_group([0, 1]).group_name for _ in range(4)]
    rules = {f"{i}": allreduce.over(name) for i, name in enumerate(names)}
    step = fnddp.jit(partition({**rules, "*": allreduce}))
    grads = {key: torch.full((3,), float(rank)) for key in [*rules, "rest"]}
    for _ in range(2):
        mean, _ = step(grads, step.init(grads))
        assert all(leaf.tolist() == [0.5] * 3 for leaf in mean.values())


class Gathered(fnddp.Sync):
    """Gathers flat leaves and looks at the result as one line, which a column of a shared buffer is not."""

    groups, ops = frozenset({None}), frozenset({"mean"})

    def init(self, grads: Tree) -> State:
        return ()

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        rows = {path: collectives.all_gather(leaf, None) for path, leaf in leaves.items()}
        n = collectives.world_size(None)
        mean = {path: row.view(-1).view(n, -1).sum(0).view(leaves[path].shape) / n for path, row in rows.items()}
        return Exchange(mean, leaves, state)

    def __post_init__(self) -> None: ...
    def __repr__(self) -> str:
        return "gathered"

    def children(self) -> Any:
        return iter(())


def test_flat_leaves_that_share_a_gather():
    def body(rank: int) -> None:
        grads = {path: torch.arange(4.0) + 10 * i + rank for i, path in enumerate("abc")}
        sync = Gathered()
        want, _ = sync(grads, ())
        got, _ = fnddp.jit(sync)(grads, ())
        assert {path: leaf.tolist() for path, leaf in got.items()} == {p: leaf.tolist() for p, leaf in want.items()}

    run_threads(3, body)


class Sorted(Gathered):
    """Gives its state back in another order than it got it."""

    def init(self, grads: Tree) -> State:
        return {path: torch.zeros_like(leaf) for path, leaf in tree.flatten(grads)[0].items()}

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        return Exchange(dict(leaves), leaves, {path: state[path] + leaves[path] for path in sorted(leaves)})


def test_a_state_in_another_order():
    grads = {"w": torch.ones(2), "b": 10 * torch.ones(2)}
    sync = Sorted()
    for step in (sync, fnddp.jit(sync)):
        state = sync.init(grads)
        for _ in range(2):
            _, state = step(grads, state)
        assert (state["w"].tolist(), state["b"].tolist()) == ([2.0, 2.0], [20.0, 20.0])


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


def test_a_step_that_cannot_begin_refuses_the_next(monkeypatch):
    """On this rank memory ran out; the others may be in the step."""

    def body(rank: int) -> None:
        leaves = {"w": LeafSpec.of(torch.ones(1))}
        engine = Engine(allreduce, leaves, state=(), donation=Donation(), learns_order=False)
        engine.begin()
        engine.step.feed("w", torch.ones(1))
        engine.step.finish()

        def out_of_memory(*_: Any) -> Tensor:
            raise MemoryError

        engine._current.pools = [SimpleNamespace(take=out_of_memory)]  # pyright: ignore
        with pytest.raises(MemoryError):
            engine.begin()
        with pytest.raises(RuntimeError, match="an earlier step failed on this rank"):
            engine.begin()

    run_threads(2, body)


@on_ranks(2)
def test_a_forward_that_raises_where_a_weight_was_told(rank: int) -> None:
    model = fnddp.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model.module.weight.fill_(1.0)
    for step in range(3):
        model.zero_grad()
        fails = step == 1
        expected = pytest.raises((ValueError, fnddp.StepFailedError)) if fails else nullcontext()
        with expected, model.weight([1, 3][rank]):
            if fails and rank == 1:
                raise ValueError("no batch")
            model(torch.tensor([[2.0 + 2 * rank]])).sum().backward()
        if not fails:
            assert model.module.weight.grad.item() == 3.5


class Applied(Gathered):
    """`before` is done to each leaf, `send` moves it, and `after` is done to what came."""

    def __init__(self, *, before: Any = lambda x: x, send: Any = None, after: Any = lambda x: x) -> None:
        self.before, self.send, self.after = before, send or summed, after

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        sent = self.send({path: self.before(leaf) for path, leaf in leaves.items()})
        return Exchange({path: self.after(each) for path, each in sent.items()}, leaves, state)


def summed(leaves: Leaves) -> Leaves:
    return collectives.all_reduce(leaves, "sum", None)


def copied(leaves: Leaves) -> Leaves:
    return {path: leaf.clone() for path, leaf in leaves.items()}


def gathered(leaves: Leaves) -> Leaves:
    return {path: collectives.all_gather(leaf, None) for path, leaf in leaves.items()}


def added_twice(x: Tensor) -> Tensor:
    return torch.add(x, 1, alpha=2)


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


def doubled_rows(x: Tensor) -> Tensor:
    return torch.stack([x, x + 1]) * 2


def signed_views(x: Tensor) -> Tensor:
    negative = torch._neg_view(x)
    return torch._neg_view(negative).clone() + torch._neg_view(negative) * 2


APPLIED = {
    "doubled in buffers of bytes and numbers": {
        "before": doubled_rows,
        "send": lambda leaves: sent_in_two_ways(leaves, 0),
        "after": lambda rows: rows.sum(0),
    },
    "doubled in buffers of numbers and bytes": {
        "before": doubled_rows,
        "send": lambda leaves: sent_in_two_ways(leaves, 1),
        "after": lambda rows: rows.sum(0),
    },
    "halves in a buffer of bytes": {
        "before": lambda x: x / 2,
        "send": gathered,
        "after": lambda rows: rows.sum(0),
    },
    "a chain of one kind": {"before": lambda x: x * 2 * 2 * 2},
    "a chain of one kind, behind": {"after": lambda x: x * 2 * 2 * 2},
    "what is read twice": {"before": lambda x: (y := x * 3) * y},
    "alpha and a number": {"before": added_twice},
    "alpha and a number, behind": {"after": added_twice},
    "shapes that change in place": {"before": turned},
    "means of operations in place": {"after": lambda x: x.clone().mul_(3)},
    "means that are copies": {"after": lambda x: x.clone()},
    "means that are copies of gradients": {"send": copied},
    "views of views": {"before": lambda x: torch.cat([x[1:][1:2], x[1:][:1] * 2, x[:1].expand(4)[1:2], x[3:]])},
    "views that carry a sign": {"before": signed_views},
}


@pytest.mark.parametrize("name", APPLIED)
def test_many_small_leaves_are_each_their_own(name):
    sync = Applied(**APPLIED[name])

    def body(rank: int) -> None:
        step, kept = fnddp.jit(sync), []
        for i in range(3):
            grads = {f"leaf {k}": torch.arange(3.0 + k % 2) + k + 10 * rank + 100 * i for k in range(6)}
            want, _ = sync(grads, ())
            got, _ = step(grads, ())
            kept.append((want, got))
        for want, got in kept:  # which later steps leave alone
            assert {path: leaf.tolist() for path, leaf in got.items()} == {p: leaf.tolist() for p, leaf in want.items()}
        if name == "shapes that change in place":
            assert step.plan is None
        else:
            assert step.plan is not None
            assert any(operation.count > 1 for segment in step.plan.segments for operation in segment.operations)

    run_threads(2, body)


@on_ranks(2)
def test_a_backward_from_within_after_one_that_broke_off(rank: int) -> None:
    class Breaks(torch.autograd.Function):
        is_on = False

        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:  # pyright: ignore
            return x.clone()

        @staticmethod
        def backward(_: Any, grad: Tensor) -> Tensor:  # pyright: ignore
            if Breaks.is_on:
                raise RuntimeError("it broke off")
            return grad

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.first(x)
            return self.second(Breaks.apply(self.hidden))

    torch.manual_seed(0)
    model = fnddp.DistributedDataParallel(Layers())
    x = torch.full((1, 2), 1.0 + rank)
    for _ in range(2):
        model(x).sum().backward()
    model.zero_grad()
    loss = model(x).sum()
    Breaks.is_on = True
    with pytest.raises(RuntimeError, match="it broke off"):
        loss.backward()
    Breaks.is_on = False
    model.module.hidden.sum().backward()
    grad = model.module.first.weight.grad
    assert grad is not None
    assert grad.tolist() == [[1.5, 1.5]] * 2


def test_rows_of_any_magnitude_have_unit_norm():
    """Squares of float64 numbers vanish and overflow."""
    for size in (1e-200, 1.0, 1e200):
        rows = size * torch.tensor([[3.0, 4.0, 5.0, 12.0]], dtype=torch.float64)
        unit = unit_rows(rows, [2, 2], torch.zeros_like(rows))
        assert torch.allclose(unit, torch.tensor([[0.6, 0.8, 5 / 13, 12 / 13]], dtype=torch.float64))
