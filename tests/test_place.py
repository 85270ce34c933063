"""No result is written over what it is still computed from: operations whose in-place form would be wrong."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import fnddp
from fnddp import Exchange, Replicated, State, Sync, allreduce, laws
from fnddp.plan import graph
from fnddp.simulate.ranks import run_threads
from tests.pipelines import EXAMPLES, TREES
from tests.traces import TracesOfThreads

pytestmark = pytest.mark.thorough

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


class FoldedState(NamedTuple):
    power: Replicated[dict[str, Tensor]]
    inner: State


@pytest.fixture
def folded(own_transforms: None) -> type[Sync]:
    @fnddp.transform
    class folded(Sync):
        """Folds square leaves before the wire and behind it, there with this rank's own gradient, and a state."""

        inner: Sync
        how: str

        def init(self, grads):
            power = {path: torch.eye(len(leaf)) + leaf.new_full(leaf.shape, 0.1) for path, leaf in grads.items()}
            return FoldedState(power, self.inner.init(grads))

        def exchange(self, grads, state):
            fold = FOLDS[self.how]
            payload = {path: fold(leaf * 2, leaf) / 8 for path, leaf in grads.items()}
            inner = self.inner.exchange(payload, state.inner)
            mean = {path: fold(grads[path], leaf * 3) for path, leaf in inner.mean.items()}
            power = {path: fold(state.power[path], leaf) / 8 for path, leaf in inner.mean.items()}
            return Exchange(mean, grads, FoldedState(power, inner.state))

    return folded


def squares(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {path: torch.randn(6, 6, generator=generator) for path in ("a", "b")}


@pytest.mark.parametrize("donation", laws.DONATIONS, ids=lambda d: f"{d.gradients}-{d.state}")
@pytest.mark.parametrize("how", FOLDS)
def test_operations_that_read_their_operand_elsewhere(folded, how, donation):
    run_threads(2, partial(laws.law_6_lowered_is_eager, donation=donation), folded(allreduce, how), squares)


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_returned_does_not_lie_where_the_next_step_writes(monkeypatch, name):
    """Large results of operations lie in memory that steps share; here all of them are large."""
    monkeypatch.setitem(graph.LIGHT, "cpu", 0)
    sync, traces = fnddp.parse(EXAMPLES[name]), TracesOfThreads()
    for donation in laws.DONATIONS[1:]:
        law = partial(laws.law_6_lowered_is_eager, donation=donation, traces=traces)
        run_threads(2, law, sync, TREES["model"])
