"""Something to train: what it is made of, and the loss that it ends with."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
Forward: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Problem:
    """Something to train.

    Attributes:
        make: A new module for a seed.
        loss: `loss(forward, batch)`: a rank's mean loss, a scalar. It calls `forward` as it would the module.
        batches: `batches(n, seed, steps)`: for each step tensors with a row for each rank, `[n, batch, ...]`.
        optimizer: Makes one for a list of tensors.
        quality: The final loss, of a function that stands for the trained module, in eval mode; None for the mean of
            the training losses of the last tenth of the steps.
    """

    make: Callable[[int], nn.Module]
    loss: Callable[[Forward, Batch], Tensor]
    batches: Callable[[int, int, int], Iterable[Batch]]
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
    quality: Callable[[Forward], float] | None = None

    def parameters(self) -> Leaves:
        """What is trained of a new module, by name."""
        return _trained(self.make(0))


def final_loss(problem: Problem, sync: Sync, n: int, seed: int, steps: int) -> float:
    """The loss that training with `sync` on `n` virtual ranks ends with."""
    model = problem.make(seed)

    def loss_fn(params: Leaves, *batch: Tensor) -> Tensor:
        return problem.loss(_forward(model, params), batch)

    # Fused attention has no rule for vmap, which would run it rank by rank, and warn.
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(seed)
        trained = simulate_training(
            loss_fn,
            _trained(model),
            problem.batches(n, seed, steps),
            sync,
            world_size=n,
            optimizer=problem.optimizer,
        )
    if problem.quality is None:
        return trained.losses[-max(1, steps // 10) :].mean().item()
    with torch.no_grad():
        return problem.quality(_forward(model.eval(), trained.params))


def backward_of(problem: Problem, n: int) -> Compute:
    """Forward and backward of one of `n` ranks, measured here on its first batch."""
    model = problem.make(0)
    batch = next(iter(problem.batches(n, 0, 1)))
    own = tuple(part[0] for part in batch)

    def loss_fn(params: Leaves) -> Tensor:
        return problem.loss(_forward(model, params), own)

    return measure_backward(loss_fn, _trained(model))


def _forward(model: nn.Module, params: Any) -> Forward:
    return lambda *inputs: functional_call(model, params, inputs)


def _trained(model: nn.Module) -> Leaves:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
