"""A model, batches and a loss to train, and the loss that a training ends with."""

from collections.abc import Callable, Iterator
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

ADAMW = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True)
class Problem:
    """A model, batches and a loss: what all commands take, and `tune`.

    Attributes:
        build: Makes a new module. Its initial values are a function of torch's global seed.
        loss: `loss(forward, batch)`: a rank's mean loss, a scalar. It calls `forward` as it would the module.
        batch: `batch(rank, ranks, generator)`: the next batch of one of `ranks` ranks.
        optimizer: Makes one for a list of tensors, with `lr` to choose another learning rate.
        quality: The final loss, of a function that stands for the trained module, in eval mode; None for the mean of
            the training losses of the last tenth of the steps.
        accuracy: The share of held-out data that is recognized, likewise; None where there is none.
    """

    build: Callable[[], nn.Module]
    loss: Loss
    batch: Callable[[int, int, torch.Generator], Batch]
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW
    quality: Callable[[Forward], float] | None = None
    accuracy: Callable[[Forward], float] | None = None

    def make(self, seed: int) -> nn.Module:
        """Make a new module, a function of `seed` alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()

    def batches(self, n: int, seed: int, steps: int) -> Iterator[Batch]:
        """Yield for each step tensors with a row for each rank, `[n, batch, ...]`."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            rows = [self.batch(rank, n, generator) for rank in range(n)]
            yield tuple(torch.stack(parts) for parts in zip(*rows, strict=True))

    def loss_of(self, module: nn.Module) -> Callable[..., Tensor]:
        """Return the loss as a function of the parameters of `module`, and a batch."""
        return lambda params, *batch: self.loss(standing_for(module, params), batch)


def trained(module: nn.Module) -> Leaves:
    """Return the parameters that require gradients, by name."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def standing_for(module: nn.Module, params: Any) -> Forward:
    """Return a function that stands for `module` with other parameters."""
    return lambda *inputs: functional_call(module, params, inputs)


def final_loss(problem: Problem, sync: Sync, n: int, seed: int, steps: int) -> float:
    """Return the loss that training with `sync` on `n` virtual ranks ends with."""
    model = problem.make(seed)
    # Fused attention has no rule for vmap, which would run it rank by rank, and warn.
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(seed)
        done = simulate_training(
            problem.loss_of(model),
            trained(model),
            problem.batches(n, seed, steps),
            sync,
            world_size=n,
            optimizer=problem.optimizer,
        )
    if problem.quality is None:
        return done.losses[-max(1, steps // 10) :].mean().item()
    with torch.no_grad():
        return problem.quality(standing_for(model.eval(), done.params))


def backward_of(problem: Problem, n: int) -> Compute:
    """Measure forward and backward of one of `n` ranks here, on its first batch."""
    model = problem.make(0)
    batch = next(problem.batches(n, 0, 1))
    return measure_backward(problem.loss_of(model), trained(model), *(part[0] for part in batch))
