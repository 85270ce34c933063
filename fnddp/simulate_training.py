"""Training on n virtual ranks: what a pipeline does to a loss, in one process."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fnddp import tree
from fnddp.simulate import simulate
from fnddp.sync import State, Sync
from fnddp.tree import Leaves, Tree
from fnddp.wire.simulated import Division

Means: TypeAlias = Mapping[str, Tensor | None]
"""Means by path; None for a leaf that has no update in a step."""


class Trained(NamedTuple):
    """What a simulated training gives.

    Attributes:
        losses: Each rank's loss before each step, `[steps, n]`.
        params: The parameters after the last step, in the tree that was given.
        state: The simulation's state after it: see `fnddp.simulate`.
    """

    losses: Tensor
    params: Tree
    state: State


def simulate_training(
    loss_fn: Callable[..., Tensor],
    params: Tree,
    batches: Iterable[tuple[Tensor, ...]],
    sync: Sync,
    *,
    world_size: int,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
    update: Callable[[Tree, Tree, Any], tuple[Tree, Any]] | None = None,
    ranks_at_once: int | None = None,
    groups: Mapping[str, Division] | None = None,
) -> Trained:
    """Trains on `world_size` virtual ranks: their gradients by one vmap, `sync` simulated, one set of parameters.

    Real ranks hold the same parameters, so one set stands for all, and one optimizer. As many batches as are given are
    steps. The numbers depend on the arguments alone, and on torch's global seed where `loss_fn` draws random numbers.
    The wrong choice for modules whose buffers change in `forward` (BatchNorm), and to measure time.

    Args:
        loss_fn: `loss_fn(params, *batch) -> loss`, a scalar: one rank's, on its batch. `torch.func.vmap` runs it, for
            all ranks at once.
        params: Any pytree of floating-point tensors. They are not changed.
        batches: For each step a tuple of tensors `[n, batch, ...]`: a row for each rank.
        sync: The pipeline.
        world_size: The number of ranks, n.
        optimizer: Makes one for a list of tensors: `functools.partial(torch.optim.AdamW, lr=1e-3)`; or
        update: `update(params, mean, memory) -> (params, memory)`, pure; `memory` is None in the first step, and
            the mean of a leaf that has no update is, too. Exactly one of both.
        ranks_at_once: Compute the gradients of so many ranks at a time: less memory for activations. The pipeline runs
            for all at once, since they meet in its collectives.
        groups: See `fnddp.simulate`.

    Raises:
        ValueError: Both or none of `optimizer` and `update`; a batch has no row for each rank; the mean of a leaf is
            not the same on all ranks (`none`); or as `fnddp.simulate` says.

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
        raise ValueError("simulate_training: give optimizer, which makes a torch.optim one, or update, and not both")
    simulation = simulate(sync, world_size, groups=groups)
    leaves, spec = tree.flatten(params)
    leaves = {path: leaf.detach().clone() for path, leaf in leaves.items()}
    state = simulation.init({path: leaf.expand(world_size, *leaf.shape) for path, leaf in leaves.items()})
    step = _by_optimizer(optimizer, leaves) if update is None else _by_function(update, spec)

    def loss_of(leaves: Leaves, *batch: Tensor) -> Tensor:
        return loss_fn(tree.unflatten(spec, leaves), *batch)

    losses: list[Tensor] = []
    for batch in batches:
        require_batch_rows(batch, world_size)
        in_dims = (None, *[0] * len(batch))
        of_ranks = torch.func.vmap(
            torch.func.grad_and_value(loss_of), in_dims, randomness="different", chunk_size=ranks_at_once
        )
        grads, loss = of_ranks(leaves, *batch)
        mean, state = simulation(grads, state)
        _require_one_mean(leaves, mean)
        leaves = step(leaves, mean)
        losses.append(loss)
    stacked = torch.stack(losses) if losses else torch.empty(0, world_size)
    return Trained(stacked, tree.unflatten(spec, leaves), state)


def _by_optimizer(make: Any, leaves: Leaves) -> Callable[[Leaves, Means], Leaves]:
    optimizer = make(list(leaves.values()))

    def step(leaves: Leaves, mean: Means) -> Leaves:
        for path, leaf in leaves.items():
            leaf.grad = mean[path]
        optimizer.step()
        return leaves

    return step


def _by_function(update: Callable[..., tuple[Tree, Any]], spec: tree.Spec) -> Callable[[Leaves, Means], Leaves]:
    memory: Any = None

    def step(leaves: Leaves, mean: Means) -> Leaves:
        nonlocal memory
        params, memory = update(tree.unflatten(spec, leaves), tree.unflatten(spec, mean), memory)
        return tree.flatten(params)[0]

    return step


def require_batch_rows(batch: tuple[Tensor, ...], n: int) -> None:
    for i, part in enumerate(batch):
        if part.ndim == 0 or part.shape[0] != n:
            raise ValueError(
                f"simulate_training: part {i} of a batch has shape {tuple(part.shape)}, which has no row for each of "
                f"{n} ranks; stack their batches: torch.stack(batches_by_rank)"
            )


def _require_one_mean(leaves: Leaves, mean: Means) -> None:
    for path, leaf in leaves.items():
        of_leaf = mean[path]
        if of_leaf is not None and of_leaf.shape != leaf.shape:
            raise ValueError(
                f"simulate_training: the mean of leaf {path!r} is not the same on all ranks, so that their parameters "
                "would differ; simulate the pipeline itself, fnddp.simulate, and keep a row of parameters for each"
            )
