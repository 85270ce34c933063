"""What `fnddp demo` trains: the digits, or a model of one's own on its batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fnddp.cli.models import Batch, Forward, Loss, load

Params = dict[str, Tensor]
DIGITS = "digits"
BATCH_SIZE = 32  # digits, per rank


@dataclass(frozen=True)
class Lesson:
    """Something that one rank trains.

    Attributes:
        model: Equal on all ranks at the start.
        objective: The mean loss of a module, or a function that stands for it, on a batch.
        batch: The next batch of this rank.
        accuracy: On a test set; None where there is none.
    """

    model: nn.Module
    objective: Loss
    batch: Callable[[torch.Generator], Batch]
    accuracy: Callable[[Params], float] | None

    @property
    def initial(self) -> Params:
        """What is trained, by name."""
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def loss(self, params: Params, *batch: Tensor) -> Tensor:
        """The loss with the parameters `params`."""

        def forward(*inputs: Any) -> Any:
            return functional_call(self.model, params, inputs)

        return self.objective(forward, batch)


def parameters(name: str) -> Params:
    """The parameters of the model `name`, perhaps without values.

    Raises:
        ModelError: There is no such model, or there is nothing to train it on.
    """
    if name == DIGITS:
        return _digits(seed=0, rank=0, world_size=1).initial
    workload = load(name, [DIGITS])
    workload.task()
    return workload.parameters()


def title(name: str) -> str:
    """What is trained, in words."""
    return "Handwritten digits" if name == DIGITS else f"{name} on its own batch"


def lesson(name: str, *, seed: int, rank: int, world_size: int) -> Lesson:
    """The lesson `name`, "digits" or as `fnddp.cli.models.load` takes it, for one of `world_size` ranks.

    Raises:
        ModelError: See `parameters`.
    """
    if name == DIGITS:
        return _digits(seed, rank, world_size)
    workload = load(name, [DIGITS])
    task = workload.task()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = workload.make()
    batch = task.batch(rank)
    return Lesson(model, task.loss, lambda _: batch, None)


def _digits(seed: int, rank: int, world_size: int) -> Lesson:
    from fnddp.cli import digits  # needs scikit-learn, which other models do not

    train_set, test_set = digits.load()
    shard = train_set.shard(rank, world_size)
    model = digits.make_model(seed)
    return Lesson(
        model,
        _class_loss,
        lambda generator: shard.batch(BATCH_SIZE, generator),
        lambda params: digits.accuracy(model, params, test_set),
    )


def _class_loss(forward: Forward, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(forward(x), y)
