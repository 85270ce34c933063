"""Functional training loops: value, synchronized gradients and state from one call."""

from collections.abc import Callable
from typing import Any

import torch

from fnddp import tree
from fnddp.sync import State, Sync
from fnddp.tree import Tree


def value_and_grad(
    loss_fn: Callable[..., Any], sync: Sync, has_aux: bool = False
) -> Callable[..., tuple[Any, Tree, State]]:
    """Differentiates `loss_fn` and synchronizes the result.

    Start with `state = sync.init(params)`, and call `fnddp.verify(sync, params, state)` once if you want ranks that
    disagree to be told so. The wrong choice for a module with buffers that change in `forward` (BatchNorm): return
    them as `aux`, or use `register` on a `DistributedDataParallel`.

    Args:
        loss_fn: `loss_fn(params, *batch) -> loss`, a scalar tensor, or `(loss, aux)` with `has_aux`.
        sync: The pipeline.
        has_aux: Whether `loss_fn` returns auxiliary data beside the loss.

    Returns:
        `f(params, state, *batch, **kwargs) -> (value, grads, state)`. `params` is any pytree of floating-point tensors;
        `value` is this rank's own loss, or `(loss, aux)`; `grads` is the mean over ranks, in the tree of `params`.

    >>> from fnddp import allreduce
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> step = value_and_grad(lambda params, x: (params["w"] * x).sum(), allreduce)
    >>> step(params, allreduce.init(params), torch.tensor([3.0, 4.0]))
    (tensor(11.), {'w': tensor([3., 4.])}, ())
    """

    def run(params: Tree, state: State, *batch: Any, **kwargs: Any) -> tuple[Any, Tree, State]:
        # Differentiated as a flat dict: torch.func knows torch's pytrees, fnddp all of optree's.
        leaves, spec = tree.flatten(params)
        # Parameters that require grad would have autograd record a second graph, for nobody.
        leaves = {path: leaf.detach() for path, leaf in leaves.items()}

        def loss_of_leaves(leaves: tree.Leaves, *batch: Any) -> Any:
            return loss_fn(tree.unflatten(spec, leaves), *batch, **kwargs)

        grads, value = torch.func.grad_and_value(loss_of_leaves, has_aux=has_aux)(leaves, *batch)
        grads, state = sync(tree.unflatten(spec, grads), state)
        return value, grads, state

    return run
