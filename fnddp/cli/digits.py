"""Handwritten digits and a small network: a training problem for the commands, pure functions for the examples.

scikit-learn ships the data (1,797 images of 8 x 8 pixels, from the UCI repository), so nothing is downloaded.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.func import functional_call

from fnddp.cli.failures import WrongArgument
from fnddp.cli.models import BATCH_SIZE, class_loss
from fnddp.simulation.tune import Batch, Forward, Problem, standing_for

TEST_FRACTION = 0.3
SPLIT_SEED = 0  # the test set is the same in every run, whatever the run's seed
WIDTH = 256


class Digits(NamedTuple):
    """Images `x` `[n, 64]`, float32 in [0, 1], and labels `y` `[n]`, int64."""

    x: Tensor
    y: Tensor

    def shard(self, rank: int, world_size: int) -> "Digits":
        """Return the shard of `rank`: every `world_size`-th image, so shards are disjoint and nearly equal in size."""
        return Digits(self.x[rank::world_size], self.y[rank::world_size])

    def batch(self, size: int, generator: torch.Generator) -> "Digits":
        """Return `size` random images, drawn with replacement."""
        chosen = torch.randint(len(self.y), (size,), generator=generator)
        return Digits(self.x[chosen], self.y[chosen])


def load() -> tuple[Digits, Digits]:
    """Return the training set (70 %) and the test set, stratified by digit; they are the same in every process."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=TEST_FRACTION, random_state=SPLIT_SEED, stratify=labels)
    x_train, x_test, y_train, y_test = (torch.from_numpy(part) for part in split)
    return Digits(x_train.float(), y_train), Digits(x_test.float(), y_test)


def _network() -> nn.Module:
    hidden = (nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10))


def problem(size: int = BATCH_SIZE, build: Callable[[], nn.Module] = _network) -> Problem:
    """Return the digits as a problem: batches of `size` random images of a rank's shard, the loss, test scores."""
    train, test = load()

    def batch(rank: int, ranks: int, generator: torch.Generator) -> Batch:
        if ranks > len(train.y):
            raise WrongArgument(f"--ranks {ranks}: each rank needs an image; there are {len(train.y):,} to train on")
        return train.shard(rank, ranks).batch(size, generator)

    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return Problem(
        build, class_loss, batch, sgd, lambda forward: class_loss(forward, test).item(), partial(_accuracy, test)
    )


def make_model(seed: int) -> nn.Module:
    """Make an MLP 64-256-256-10 (85,002 parameters) with torch's default initialization, determined by `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _network()


def loss(model: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy on `x` and `y` of `model` with the parameters `params`."""
    return nn.functional.cross_entropy(functional_call(model, params, (x,)), y)


def accuracy(model: nn.Module, params: dict[str, Tensor], data: Digits) -> float:
    """Return the fraction of images in `data` that `model` classifies correctly with the parameters `params`."""
    return _accuracy(data, standing_for(model, params))


def _accuracy(data: Digits, forward: Forward) -> float:
    with torch.no_grad():
        return (forward(data.x).argmax(dim=1) == data.y).float().mean().item()
