"""Training on n virtual ranks in one process, to see the effect of a pipeline on a loss."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.sync import State, Sync
from fnddp.core.tree import Leaves, Tree
from fnddp.reducers.carriers import allgather
from fnddp.reducers.halves import with_halves
from fnddp.run.hops import codecs_of, first_hop, second_hop, several
from fnddp.simulation.simulate import require_rows, simulate
from fnddp.transforms.memory import ef21
from fnddp.wire.simulated import Division

Means: TypeAlias = Mapping[str, Tensor | None]
"""Means by path; None for a leaf that has no update in a step."""

MakeOptimizer: TypeAlias = Callable[[list[Tensor]], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
"""Returns an optimizer for a list of tensors, `functools.partial(torch.optim.AdamW, lr=1e-3)`, or several for parts."""


class Trained(NamedTuple):
    """The result of a simulated training.

    Attributes:
        losses: Each rank's loss before each step, `[steps, n]`.
        params: The parameters after the last step, in the tree of the given ones. With outer steps ranks have their own
            parameters, and leaves are `[n, *shape]`.
        state: The simulation's state after the last step: see `fnddp.simulate`.
        owned: With `weights`, the owners' own parameters, updated by the optimizer; else `params`.
    """

    losses: Tensor
    params: Tree
    state: State
    owned: Tree


def simulate_training(
    loss_fn: Callable[..., Tensor],
    params: Tree,
    batches: Iterable[tuple[Tensor, ...]],
    sync: Sync | str,
    *,
    weights: Sync | str | None = None,
    world_size: int,
    optimizer: MakeOptimizer | None = None,
    update: Callable[[Tree, Tree, Any], tuple[Tree, Any]] | None = None,
    ranks_at_once: int | None = None,
    groups: Mapping[str, Division] | None = None,
) -> Trained:
    """Train one set of parameters on `world_size` virtual ranks: one vmap for all gradients, then `sync`, simulated.

    All ranks have the same parameters, so one set and one optimizer represent all. Each batch is a step. The numbers
    depend only on the arguments, and on torch's global seed if `loss_fn` draws random numbers. The wrong choice for
    modules that change buffers in `forward` (BatchNorm), and to measure time. See also `fnddp.outer.simulate_training`,
    where ranks have their own parameters.

    Args:
        loss_fn: `loss_fn(params, *batch) -> loss`, a scalar: the loss of one rank on its batch. `torch.func.vmap` runs
            it, for all ranks at once.
        params: Any pytree of floating-point tensors. They are not changed.
        batches: For each step a tuple of tensors `[n, batch, ...]`: a row for each rank.
        sync: The pipeline, or its text.
        weights: The pipeline of weights, as in `fnddp.own`: `sync` then sends gradients to owners, and ranks compute
            with the weights that owners send back. Owners have whole leaves here.
        world_size: The number of ranks, n.
        optimizer: A function that returns an optimizer for a list of tensors, `functools.partial(torch.optim.AdamW,
            lr=1e-3)`, or several, each for a part of them. Pass exactly one of `optimizer` and `update`.
        update: `update(params, mean, memory) -> (params, memory)`, pure; `memory` is None in the first step, and
            the mean is None for a leaf without an update.
        ranks_at_once: Number of ranks in one computation of gradients: fewer need less memory for activations. The
            pipeline always runs for all ranks at once, because its collectives connect them.
        groups: See `fnddp.simulate`.

    Raises:
        ValueError: Both or neither of `optimizer` and `update` are given; a batch lacks a row for each rank; the mean
            of a leaf differs between ranks (`none`); `weights` is combined with `update`; a leaf is in none of several
            optimizers, or in two; or as in `fnddp.simulate`.
        TypeError: `fnddp.own` does not accept `sync` or `weights`.

    >>> from fnddp import allgather, error_feedback, sign
    >>> def loss_fn(params, x, y):
    ...     return (x @ params["w"] - y).square().mean()
    >>> x = torch.randn(4, 16, 3, generator=torch.Generator().manual_seed(0))  # 4 ranks, 16 samples each
    >>> y = x @ torch.tensor([1.0, -2.0, 3.0])
    >>> done = simulate_training(
    ...     loss_fn,
    ...     {"w": torch.zeros(3)},
    ...     [(x, y)] * 200,
    ...     error_feedback(sign(allgather)),
    ...     world_size=4,
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
    ... )
    >>> done.losses.shape, bool(done.losses[0].mean() > 1), bool(done.losses[-1].mean() < 1e-3)
    (torch.Size([200, 4]), True, True)
    """
    if (optimizer is None) == (update is None):
        raise ValueError("simulate_training: give either optimizer, which makes one of torch.optim, or update")
    leaves, spec = tree.flatten(params)
    leaves = {path: leaves[path].detach().clone() for path in spec.paths}  # optimizers get them in this order
    owners = None
    if weights is not None:
        if optimizer is None:
            raise ValueError("simulate_training: owners that send weights run an optimizer; give optimizer, not update")
        # Owners of whole leaves have, bit for bit, the results that allgather returns on all ranks.
        sync = with_halves(first_hop("simulate_training", sync), allgather)
        owners = _Owners(second_hop("simulate_training", weights), leaves)
    simulation = simulate(sync, world_size, groups=groups)
    state = simulation.init({path: leaf.expand(world_size, *leaf.shape) for path, leaf in leaves.items()})
    local = None if optimizer is None else LocalOptimizers(optimizer, leaves if owners is None else owners.leaves)
    memory: Any = None

    def step(leaves: Leaves, grads: Leaves) -> Leaves:
        nonlocal state, memory
        each, state = simulation(grads, state)
        mean = _one_mean(leaves, each)
        if local is not None:
            local.step(mean)
            return leaves if owners is None else owners.sent(leaves)
        assert update is not None
        stepped, memory = update(tree.unflatten(spec, leaves), tree.unflatten(spec, mean), memory)
        return tree.flatten(stepped)[0]

    losses, leaves = train_ranks(loss_fn, spec, leaves, None, batches, step, world_size, ranks_at_once)
    params = tree.unflatten(spec, leaves)
    return Trained(losses, params, state, params if owners is None else tree.unflatten(spec, owners.leaves))


class _Owners:
    """The owners' weights, and the hop by which all ranks get them."""

    def __init__(self, weights: Sync, leaves: Leaves) -> None:
        self.leaves = {path: leaf.clone() for path, leaf in leaves.items()}
        self._sends_differences = isinstance(weights, ef21)
        self._hop = simulate(codecs_of(weights), 1)  # each leaf comes from one rank
        self._state = self._hop.init(_row_of(self.leaves))

    def sent(self, seen: Leaves) -> Leaves:
        """Return the next weights of all ranks, from the ones that they have."""
        if not self._sends_differences:
            got, self._state = self._hop(_row_of(self.leaves), self._state)
            return {path: leaf.clone() for path, leaf in got.items()}
        changes = {path: leaf - seen[path] for path, leaf in self.leaves.items()}
        got, self._state = self._hop(_row_of(changes), self._state)
        return {path: leaf + got[path] for path, leaf in seen.items()}


def _row_of(leaves: Leaves) -> Leaves:
    return {path: leaf[None] for path, leaf in leaves.items()}


def train_ranks(
    loss_fn: Callable[..., Tensor],
    spec: tree.Spec,
    leaves: Leaves,
    in_dim: int | None,
    batches: Iterable[tuple[Tensor, ...]],
    step: Callable[[Leaves, Leaves], Leaves],
    world_size: int,
    ranks_at_once: int | None,
) -> tuple[Tensor, Leaves]:
    """Return losses `[steps, n]` and parameters after a `step(leaves, grads) -> leaves` for each batch.

    `leaves` have a row for each rank where `in_dim` is 0; with None, ranks share them.
    """

    def loss_of(leaves: Leaves, *batch: Tensor) -> Tensor:
        return loss_fn(tree.unflatten(spec, leaves), *batch)

    losses: list[Tensor] = []
    for batch in batches:
        require_rows(dict(enumerate(batch)), world_size, "simulate_training: part {} of a batch")
        in_dims = (in_dim, *[0] * len(batch))
        of_ranks = torch.func.vmap(
            torch.func.grad_and_value(loss_of), in_dims, randomness="different", chunk_size=ranks_at_once
        )
        grads, loss = of_ranks(leaves, *batch)
        leaves = step(leaves, grads)
        losses.append(loss)
    return torch.stack(losses) if losses else torch.empty(0, world_size), leaves


class LocalOptimizers:
    """One optimizer for `leaves`; or, with `by_rank`, one for each rank on its row of all leaves."""

    def __init__(self, make: MakeOptimizer, leaves: Leaves, *, by_rank: bool = False) -> None:
        self._by_rank, self._leaves = by_rank, [leaves]
        if by_rank:
            self._leaves = [dict(zip(leaves, rows, strict=True)) for rows in zip(*leaves.values(), strict=True)]
        self._optimizers = [several(make(list(leaves.values()))) for leaves in self._leaves]
        for leaves, optimizers in zip(self._leaves, self._optimizers, strict=True):
            _require_each_once(leaves, optimizers)

    def step(self, grads: Means) -> None:
        """Step with `grads`, laid out as the leaves are; None for no update."""
        for rank, (leaves, optimizers) in enumerate(zip(self._leaves, self._optimizers, strict=True)):
            for path, leaf in leaves.items():
                grad = grads[path]
                leaf.grad = grad[rank] if grad is not None and self._by_rank else grad
            for optimizer in optimizers:
                optimizer.step()

    @property
    def state(self) -> dict[str, Any]:
        """The state of the first rank's leaves, by path."""
        of = {leaf: state for optimizer in self._optimizers[0] for leaf, state in optimizer.state.items()}
        return {path: of.get(leaf, {}) for path, leaf in self._leaves[0].items()}


def _require_each_once(leaves: Leaves, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if len(optimizers) == 1:  # it may be any object with a `step`
        return
    given = Counter(id(p) for each in optimizers for group in each.param_groups for p in group["params"])
    for path, leaf in leaves.items():
        if given[id(leaf)] != 1:
            raise ValueError(
                f"simulate_training: leaf {path!r} is in {given[id(leaf)]} of the {len(optimizers)} optimizers; each "
                "leaf must be in exactly one"
            )


def _one_mean(leaves: Leaves, mean: Means) -> Means:
    """Return the mean of all ranks; over named groups each rank has a row, and rows must be equal."""
    rows = {path: x for path, x in mean.items() if x is not None and x.shape != leaves[path].shape}
    if differ := tree.changed(rows, {path: x[:1].expand_as(x) for path, x in rows.items()}):
        raise ValueError(
            f"simulate_training: the mean of leaf {differ[0]!r} differs between ranks, so their parameters would "
            "differ; simulate the pipeline itself with fnddp.simulate, and keep a row of parameters for each rank"
        )
    return {**mean, **{path: x[0] for path, x in rows.items()}}
