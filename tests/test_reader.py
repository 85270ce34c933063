"""What a reader of the engine could break: each was wrong once, or would be with one word less."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fnddp
from fnddp import Exchange, State, allreduce, collectives, partition, tree
from fnddp.plan.draft import Donation
from fnddp.plan.ir import LeafSpec
from fnddp.ranks import run_threads
from fnddp.run.engine import Engine
from fnddp.tree import Leaves, Tree
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


@pytest.mark.parametrize("n", [2, 3])
def test_flat_leaves_that_share_a_gather(n):
    def body(rank: int) -> None:
        grads = {path: torch.arange(4.0) + 10 * i + rank for i, path in enumerate("abc")}
        sync = Gathered()
        want, _ = sync(grads, ())
        got, _ = fnddp.jit(sync)(grads, ())
        assert {path: leaf.tolist() for path, leaf in got.items()} == {p: leaf.tolist() for p, leaf in want.items()}

    run_threads(n, body)


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


def test_a_weight_is_for_a_step():
    """A backward that reaches no parameter on any rank is none, and leaves the weight to the one that does."""

    def body(rank: int) -> list[float]:
        leaves = {"w": LeafSpec.of(torch.ones(1))}
        engine = Engine(allreduce, leaves, state=(), donation=Donation(), learns_order=False, skips_unused=True)
        engine.weigh([1.0, 3.0][rank])
        engine.start()
        assert engine.finish().unused == {"w"}
        engine.start()
        engine.feed("w", torch.tensor([2.0 + 2 * rank]))
        return engine.finish().mean["w"].tolist()

    assert run_threads(2, body) == [[3.5], [3.5]]


def test_engines_that_wait_for_each_other():
    """One that has ended a step and begun another is behind those that have waited, and they are not behind it."""

    def body(rank: int) -> list[float]:
        leaves = {"w": LeafSpec.of(torch.ones(1))}
        first, second = (Engine(allreduce, leaves, state=(), donation=Donation(), learns_order=False) for _ in range(2))
        grad = torch.tensor([float(rank)])
        first.start()
        second.start()
        first.feed("w", grad)
        means = [first.finish().mean["w"]]
        first.start()
        first.feed("w", grad)
        second.feed("w", 10 * grad)
        means += [second.finish().mean["w"], first.finish().mean["w"]]
        return [mean.item() for mean in means]

    assert run_threads(2, body) == [[0.5, 5.0, 0.5]] * 2


def test_a_step_that_cannot_begin_refuses_the_next(monkeypatch):
    """On this rank memory ran out; the others may be in the step."""

    def body(rank: int) -> None:
        leaves = {"w": LeafSpec.of(torch.ones(1))}
        engine = Engine(allreduce, leaves, state=(), donation=Donation(), learns_order=False)
        engine.start()
        engine.feed("w", torch.ones(1))
        engine.finish()
        runner = engine._current.runner  # pyright: ignore

        def out_of_memory(*_: Any) -> Tensor:
            raise MemoryError

        runner.start = out_of_memory
        with pytest.raises(MemoryError):
            engine.start()
        with pytest.raises(RuntimeError, match="an earlier step failed on this rank"):
            engine.start()

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
