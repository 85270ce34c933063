"""Simulate outer steps, and training with them, on n virtual ranks, each with its own row of every parameter."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.state import parts
from fnddp.core.sync import State, Sync
from fnddp.core.tree import Leaves, Tree
from fnddp.outer.contract import Exchanges, Outer, outer_of, require_unweighted
from fnddp.simulation.simulate import Simulation, of_rank, require_rows, with_rows
from fnddp.simulation.simulate import simulate as simulate_sync
from fnddp.simulation.training import LocalOptimizers, MakeOptimizer, Trained, train_ranks
from fnddp.torch_private import without_autocast
from fnddp.wire.groups import World, within
from fnddp.wire.simulated import Division, SimulatedRanks


def simulate(outer: Outer | str, world_size: int, *, groups: Mapping[str, Division] | None = None) -> "OuterSimulation":
    """Return a simulation of `outer` on `world_size` virtual ranks, a function of the stacked parameters of all ranks.

    `fnddp.simulate` runs its pipelines; they cannot be `weighted`. See there for bit-exact carriers, errors (raised
    here at the exchange) and `groups`. The rest is computed elementwise, for all ranks at once.

    >>> from fnddp import allgather, outer
    >>> sim = simulate(outer.local_sgd(every=1, sync=allgather), world_size=2)
    >>> state = sim.init({"w": torch.tensor([[1.0], [1.0]])})  # a row for each rank
    >>> params, state = sim({"w": torch.tensor([[2.0], [3.0]])}, state)
    >>> params["w"].tolist()
    [[2.5], [2.5]]
    """
    outer = outer_of("outer.simulate: outer", outer)
    require_unweighted(outer)
    return OuterSimulation(outer, world_size, dict(groups or {}))


@dataclass(frozen=True)
class OuterSimulation(Exchanges):
    """Outer step on n virtual ranks: see `simulate`. State tensors marked `Local` have a row for each rank."""

    outer: Outer
    world_size: int
    groups: Mapping[str, Division]

    def init(self, params: Tree) -> State:
        """Return the initial state for parameters `[n, *shape]` with equal rows."""
        leaves, spec = tree.flatten(params)
        require_rows(leaves, self.world_size)
        for path, leaf in leaves.items():
            if not torch.equal(leaf, leaf[:1].expand_as(leaf)):
                raise ValueError(f"simulate: ranks must start with equal parameters, but rows of leaf {path!r} differ")
        with within(
            World(
                simulated=SimulatedRanks(self.world_size, torch.zeros((), dtype=torch.int64, device="cpu"), self.groups)
            )
        ):
            state = self.outer.init(tree.unflatten(spec, {path: leaf[0].clone() for path, leaf in leaves.items()}))
        return with_rows(state, self.world_size)

    def __call__(self, params: Tree, state: State) -> tuple[Tree, State]:
        """Run the outer step after a local step of all ranks; parameters are `[n, *shape]`."""
        leaves, spec = tree.flatten(params)
        require_rows(leaves, self.world_size)
        with torch.no_grad(), without_autocast():
            stepped, after = self.outer.step(leaves, state, self)
        for part, before in zip(parts(after), parts(state), strict=True):
            if isinstance(part.value, Tensor) and part.value.shape != before.value.shape:
                problem = f"{part.path!r} now differs between ranks, because the pipeline reduces over a subset of them"
                raise ValueError(f"simulate: {problem}; local_sgd and hierarchical_local_sgd keep no such state")
        rows = dict(leaves)
        for path, leaf in stepped.items():  # a leaf that is equal on all ranks comes without rows
            rows[path] = leaf if leaf.shape == rows[path].shape else leaf.expand(rows[path].shape).clone()
        return tree.unflatten(spec, rows), after

    def end(self, name: str, sync: Sync, leaves: Leaves, state: State) -> tuple[Leaves, State]:
        """Return the mean over virtual ranks, and the pipeline's next state."""
        done = Simulation(sync, self.world_size, self.groups).exchange(leaves, state)
        return done.mean, done.state

    def of_rank(self, state: State, rank: int) -> State:
        """Return the state that `rank` would have."""
        return of_rank(state, rank)


def simulate_training(
    loss_fn: Callable[..., Tensor],
    params: Tree,
    batches: Iterable[tuple[Tensor, ...]],
    outer: Outer | str,
    *,
    world_size: int,
    optimizer: MakeOptimizer,
    elementwise: bool = False,
    sync: Sync | str | None = None,
    ranks_at_once: int | None = None,
    groups: Mapping[str, Division] | None = None,
) -> Trained:
    """Train on `world_size` virtual ranks with their own parameters and optimizer states; run `outer` after each step.

    Args:
        loss_fn, params, batches, world_size, optimizer, ranks_at_once, groups: See `fnddp.simulate_training`.
        outer: The outer step. One that exchanges optimizer moments, such as `des_loc`, needs `elementwise`.
        elementwise: Use one optimizer for all ranks, on `[n, *shape]` tensors: faster, and correct for optimizers that
            compute each element independently (SGD, Adam; not Muon).
        sync: Pipeline for the gradients of each step, such as `post_local_sgd(...).gradients`; None for no exchange.

    Raises:
        ValueError: A batch lacks a row for each rank, or `outer` needs `elementwise`; `fnddp.simulate` lists more.

    >>> from functools import partial
    >>> from fnddp import allreduce, outer
    >>> def loss_fn(params, x, y):
    ...     return (x @ params["w"] - y).square().mean()
    >>> x = torch.randn(4, 16, 3, generator=torch.Generator().manual_seed(0))  # 4 ranks, 16 samples each
    >>> batches = [(x, x @ torch.tensor([1.0, -2.0, 3.0]))] * 200
    >>> params, step = {"w": torch.zeros(3)}, outer.diloco(allreduce, every=10, momentum=0.5)
    >>> sgd = partial(torch.optim.SGD, lr=0.02)
    >>> done = simulate_training(loss_fn, params, batches, step, world_size=4, optimizer=sgd)
    >>> done.losses.shape, bool(done.losses[0].mean() > 1), bool(done.losses[-1].mean() < 1e-3)
    (torch.Size([200, 4]), True, True)
    """
    outer = outer_of("outer.simulate_training: outer", outer)
    if outer.wants_moments and not elementwise:
        raise ValueError(
            "simulate_training: the outer step exchanges moments, so one optimizer must serve all ranks; pass "
            "elementwise=True if the optimizer works element by element, as SGD and Adam do"
        )
    leaves, spec = tree.flatten(params)
    leaves = {path: leaves[path].detach().expand(world_size, *leaves[path].shape).clone() for path in spec.paths}
    local = LocalOptimizers(optimizer, leaves, by_rank=not elementwise)
    simulation = simulate(outer, world_size, groups=groups)
    state: State = simulation.init(outer.leaves_of(leaves, None))
    gradients = None if sync is None else simulate_sync(sync, world_size, groups=groups)
    sync_state: State = None if gradients is None else gradients.init(leaves)

    def step(leaves: Leaves, grads: Any) -> Leaves:
        nonlocal state, sync_state
        if gradients is not None:
            mean, sync_state = gradients(grads, sync_state)
            grads = {path: None if (x := mean[path]) is None else x.expand_as(leaf) for path, leaf in leaves.items()}
        local.step(grads)
        before = outer.leaves_of(leaves, local.state if outer.wants_moments else None)
        stepped, state = simulation(before, state)
        for path, leaf in before.items():
            if stepped[path] is not leaf:
                leaf.copy_(stepped[path])
        return leaves

    losses, leaves = train_ranks(loss_fn, spec, leaves, 0, batches, step, world_size, ranks_at_once)
    params = tree.unflatten(spec, leaves)
    return Trained(losses, params, state, params)
