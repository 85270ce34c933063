"""Training on n virtual ranks that train apart, in one process, to see what an outer step does to a loss."""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from fnddp.core import tree
from fnddp.core.sync import State, Sync
from fnddp.core.tree import Leaves, Tree
from fnddp.outer.contract import Outer
from fnddp.outer.simulate import simulate
from fnddp.simulate.simulate import Simulation
from fnddp.simulate.training import LocalOptimizers, MakeOptimizer, Trained, train_ranks
from fnddp.wire.simulated import Division


def simulate_training(
    loss_fn: Callable[..., Tensor],
    params: Tree,
    batches: Iterable[tuple[Tensor, ...]],
    outer: Outer,
    *,
    world_size: int,
    optimizer: MakeOptimizer,
    elementwise: bool = False,
    sync: Sync | None = None,
    ranks_at_once: int | None = None,
    groups: Mapping[str, Division] | None = None,
) -> Trained:
    """Train on `world_size` virtual ranks, each with its own parameters and optimizer, with `outer` after each step.

    The wrong choice for modules whose buffers change in `forward` (BatchNorm), and to measure time.

    Args:
        loss_fn, params, batches, world_size, optimizer, ranks_at_once, groups: See `fnddp.simulate_training`.
        outer: The outer step. `des_loc` needs `elementwise`.
        elementwise: Use one optimizer for all ranks, on `[n, *shape]` tensors: faster, and the same for those that
            treat each element by itself (SGD, Adam), not for others (Muon, and what clips norms).
        sync: Pipeline for the gradients of each step, such as `post_local_sgd(...).gradients`; None for no exchange.

    Raises:
        ValueError: A batch has no row for each rank; `outer` needs `elementwise`; or see `fnddp.simulate`.

    >>> from functools import partial
    >>> import torch
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
    if outer.wants_moments and not elementwise:
        raise ValueError(
            "simulate_training: the outer step exchanges moments, so one optimizer must serve all ranks; give "
            "elementwise=True, which is right for SGD and Adam"
        )
    leaves, spec = tree.flatten(params)
    leaves = {path: leaf.detach().expand(world_size, *leaf.shape).clone() for path, leaf in leaves.items()}
    local = LocalOptimizers(optimizer, leaves, by_rank=not elementwise)
    simulation = simulate(outer, world_size, groups=groups)
    state: State = simulation.init(outer.leaves_of(leaves, None))
    gradients = None if sync is None else Simulation(sync, world_size, dict(groups or {}))
    sync_state: State = None if gradients is None else gradients.init(leaves)

    def step(leaves: Leaves, grads: Leaves) -> Leaves:
        nonlocal state, sync_state
        if gradients is not None:
            mean, sync_state = gradients(grads, sync_state)
            grads = {path: mean[path].expand_as(leaf) for path, leaf in leaves.items()}
        local.step(grads)
        before = outer.leaves_of(leaves, local.state if outer.wants_moments else None)
        stepped, state = simulation(before, state)
        for path, leaf in before.items():
            if stepped[path] is not leaf:
                leaf.copy_(stepped[path])
        return leaves

    losses, leaves = train_ranks(loss_fn, spec, leaves, 0, batches, step, world_size, ranks_at_once)
    return Trained(losses, tree.unflatten(spec, leaves), state)
