"""Training on n virtual ranks that train apart: what an outer step does to a loss, in one process."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnddp import tree
from fnddp.outer.contract import Outer
from fnddp.outer.des_loc import des_loc
from fnddp.outer.simulate import simulate
from fnddp.outer.trees import leaves_of
from fnddp.simulate import Simulation
from fnddp.simulate_training import require_batch_rows
from fnddp.sync import State, Sync
from fnddp.tree import Leaves, Tree
from fnddp.wire.simulated import Division


class TrainedApart(NamedTuple):
    """What a simulated training gives.

    Attributes:
        losses: Each rank's loss before each step, `[steps, n]`.
        params: All ranks' parameters after the last step: `[n, *shape]` leaves, in the tree that was given.
        state: The outer step's state after it: see `OuterSimulation`.
    """

    losses: Tensor
    params: Tree
    state: State


def simulate_training(
    loss_fn: Callable[..., Tensor],
    params: Tree,
    batches: Iterable[tuple[Tensor, ...]],
    outer: Outer,
    *,
    world_size: int,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    elementwise: bool = False,
    sync: Sync | None = None,
    ranks_at_once: int | None = None,
    groups: Mapping[str, Division] | None = None,
) -> TrainedApart:
    """Trains on `world_size` virtual ranks, each with parameters and an optimizer of its own, and `outer` after steps.

    The wrong choice for modules whose buffers change in `forward` (BatchNorm), and to measure time.

    Args:
        loss_fn: `loss_fn(params, *batch) -> loss`, a scalar: one rank's, on its batch. `torch.func.vmap` runs it, for
            all ranks at once.
        params: Any pytree of floating-point tensors, with which all ranks begin. They are not changed.
        batches: For each step a tuple of tensors `[n, batch, ...]`: a row for each rank.
        outer: The outer step. For one with several trees `elementwise` is needed.
        world_size: The number of ranks, n.
        optimizer: Makes one for a list of tensors: `functools.partial(torch.optim.AdamW, lr=1e-3)`.
        elementwise: Whether one optimizer steps for all ranks, on `[n, *shape]` tensors: faster, and the same for those
            that treat each element by itself (SGD, Adam), not for others (Muon, and what clips norms).
        sync: What ranks do with their gradients in each step, such as `post_local_sgd(...).gradients`; None for
            nothing.
        ranks_at_once: Compute the gradients of so many ranks at a time: less memory for activations.
        groups: See `fnddp.simulate`.

    Raises:
        ValueError: A batch has no row for each rank; `outer` has several trees without `elementwise`; or as
            `fnddp.simulate` says.

    >>> from fnddp import allreduce, outer
    >>> def loss_fn(params, x, y):
    ...     return (x @ params["w"] - y).square().mean()
    >>> x = torch.randn(4, 16, 3, generator=torch.Generator().manual_seed(0))  # 4 ranks, 16 samples each
    >>> y = x @ torch.tensor([1.0, -2.0, 3.0])
    >>> done = simulate_training(
    ...     loss_fn,
    ...     {"w": torch.zeros(3)},
    ...     [(x, y)] * 200,
    ...     outer.diloco(allreduce, every=10, momentum=0.5),
    ...     world_size=4,
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=0.02),
    ... )
    >>> done.losses.shape, bool(done.losses[0].mean() > 1), bool(done.losses[-1].mean() < 1e-3)
    (torch.Size([200, 4]), True, True)
    """
    if isinstance(outer, des_loc) and not elementwise:
        raise ValueError(
            "simulate_training: the moments of one optimizer for all ranks are exchanged; give elementwise=True, which "
            "is right for SGD and Adam"
        )
    leaves, spec = tree.flatten(params)
    leaves = {path: leaf.detach().expand(world_size, *leaf.shape).clone() for path, leaf in leaves.items()}
    local = _Optimizers(optimizer, leaves, elementwise)
    simulation = simulate(outer, world_size, groups=groups)
    state = simulation.init(leaves_of(outer, leaves, None))
    gradients = None if sync is None else Simulation(sync, world_size, dict(groups or {}))
    sync_state = None if gradients is None else gradients.init(leaves)

    def loss_of(leaves: Leaves, *batch: Tensor) -> Tensor:
        return loss_fn(tree.unflatten(spec, leaves), *batch)

    of_ranks = torch.func.vmap(torch.func.grad_and_value(loss_of), randomness="different", chunk_size=ranks_at_once)
    losses: list[Tensor] = []
    for batch in batches:
        require_batch_rows(batch, world_size)
        grads, loss = of_ranks(leaves, *batch)
        if gradients is not None:
            mean, sync_state = gradients(grads, sync_state)
            grads = {path: mean[path].expand_as(leaf) for path, leaf in leaves.items()}
        local.step(grads)
        stepping = leaves_of(outer, leaves, local.state if isinstance(outer, des_loc) else None)
        stepped, state = simulation(stepping, state)
        for path, leaf in stepping.items():
            if stepped[path] is not leaf:
                leaf.copy_(stepped[path])
        losses.append(loss)
    stacked = torch.stack(losses) if losses else torch.empty(0, world_size)
    return TrainedApart(stacked, tree.unflatten(spec, leaves), state)


class _Optimizers:
    """One for each rank, on its row of all leaves, or one for all of them."""

    def __init__(
        self, make: Callable[[list[Tensor]], torch.optim.Optimizer], leaves: Leaves, elementwise: bool
    ) -> None:
        self._split = _together if elementwise else _by_rank
        self._rows = self._split(leaves)
        self._optimizers = [make(list(rows.values())) for rows in self._rows]

    def step(self, grads: Leaves) -> None:
        """The local steps of all ranks."""
        for rows, of_rows, optimizer in zip(self._rows, self._split(grads), self._optimizers, strict=True):
            for path, leaf in rows.items():
                leaf.grad = of_rows[path]
            optimizer.step()

    @property
    def state(self) -> dict[str, Any]:
        """The state of the first optimizer, by path."""
        return {path: self._optimizers[0].state[leaf] for path, leaf in self._rows[0].items()}


def _together(leaves: Leaves) -> list[Leaves]:
    return [leaves]


def _by_rank(leaves: Leaves) -> list[Leaves]:
    rows = [leaf.unbind() for leaf in leaves.values()]
    return [dict(zip(leaves, of_rank, strict=True)) for of_rank in zip(*rows, strict=True)]
