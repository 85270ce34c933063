"""A model, batches and a loss to train, and the loss that a training ends with."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fnddp.core.sync import Sync
from fnddp.core.tree import Leaves
from fnddp.cost.step import Compute
from fnddp.run.measure import measure_backward
from fnddp.simulate.training import simulate_training

Batch: TypeAlias = tuple[Tensor, ...]
Forward: TypeAlias = Callable[..., Any]  # a module, or a function that stands for one with other parameters
Loss: TypeAlias = Callable[[Forward, Batch], Tensor]


@dataclass(frozen=True)
class Problem:
    """Something to train.

    Attributes:
        make: Makes a new module for a seed.
        loss: `loss(forward, batch)`: a rank's mean loss, a scalar. It calls `forward` as it would the module.
        batches: `batches(n, seed, steps)`: for each step tensors with a row for each rank, `[n, batch, ...]`.
        optimizer: Makes one for a list of tensors.
        quality: The final loss, of a function that stands for the trained module, in eval mode; None for the mean of
            the training losses of the last tenth of the steps.
    """

    make: Callable[[int], nn.Module]
    loss: Loss
    batches: Callable[[int, int, int], Iterable[Batch]]
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
    quality: Callable[[Forward], float] | None = None


def trained(module: nn.Module) -> Leaves:
    """Return the parameters that require gradients, by name."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def functional(module: nn.Module, loss: Loss) -> Callable[..., Tensor]:
    """Return `loss` as a function of the parameters of `module`, and a batch."""

    def of_parameters(params: Leaves, *batch: Tensor) -> Tensor:
        return loss(partial(_forward, module, params), batch)

    return of_parameters


def final_loss(problem: Problem, sync: Sync, n: int, seed: int, steps: int) -> float:
    """Return the loss that training with `sync` on `n` virtual ranks ends with."""
    model = problem.make(seed)
    # Fused attention has no rule for vmap, which would run it rank by rank, and warn.
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(seed)
        done = simulate_training(
            functional(model, problem.loss),
            trained(model),
            problem.batches(n, seed, steps),
            sync,
            world_size=n,
            optimizer=problem.optimizer,
        )
    if problem.quality is None:
        return done.losses[-max(1, steps // 10) :].mean().item()
    with torch.no_grad():
        return problem.quality(partial(_forward, model.eval(), done.params))


def backward_of(problem: Problem, n: int) -> Compute:
    """Measure forward and backward of one of `n` ranks here, on its first batch."""
    model = problem.make(0)
    batch = next(iter(problem.batches(n, 0, 1)))
    return measure_backward(functional(model, problem.loss), trained(model), *(part[0] for part in batch))


def _forward(module: nn.Module, params: Any, *inputs: Any) -> Any:
    return functional_call(module, params, inputs)
