"""What `fnddp demo` trains: the digits, or a model of one's own on its batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fnddp.cli.models import Batch, Task, load

Params = dict[str, Tensor]
DIGITS = "digits"
BATCH_SIZE = 32  # digits, per rank


@dataclass(frozen=True)
class Lesson:
    """Something that one rank trains.

    Attributes:
        initial: The parameters at the start, equal on all ranks.
        loss: `loss(params, *batch)`.
        batch: The next batch of this rank.
        accuracy: On a test set; None where there is none.
    """

    initial: Params
    loss: Callable[..., Tensor]
    batch: Callable[[torch.Generator], Batch]
    accuracy: Callable[[Params], float] | None


def parameters(name: str) -> Params:
    """The parameters of the model `name`, perhaps without values.

    Raises:
        ModelError: There is no such model, or there is nothing to train it on.
    """
    if name == DIGITS:
        return _digits(seed=0, rank=0, world_size=1).initial
    workload = load(name)
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
    workload = load(name)
    task = workload.task()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = workload.make()
    batch = task.batch(rank)
    return Lesson(_trained(model), partial(_loss, model, task), lambda _: batch, None)


def _digits(seed: int, rank: int, world_size: int) -> Lesson:
    from fnddp.cli import digits  # needs scikit-learn, which other models do not

    train_set, test_set = digits.load()
    shard = train_set.shard(rank, world_size)
    model = digits.make_model(seed)
    return Lesson(
        _trained(model),
        partial(digits.loss, model),
        lambda generator: shard.batch(BATCH_SIZE, generator),
        lambda params: digits.accuracy(model, params, test_set),
    )


def _trained(model: nn.Module) -> Params:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def _loss(model: nn.Module, task: Task, params: Params, *batch: Tensor) -> Tensor:
    def forward(*inputs: Any) -> Any:
        return functional_call(model, params, inputs)

    return task.loss(forward, batch)
