"""Real handwritten digits and a small network for them, as pure functions: for the demo and the examples.

scikit-learn ships the data (1,797 images of 8 x 8 pixels, from the UCI repository), so nothing is downloaded.
"""

from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.func import functional_call

TEST_FRACTION = 0.3
SPLIT_SEED = 0  # the test set is the same in every run, whatever the run's seed
WIDTH = 256


class Digits(NamedTuple):
    """Images `x` `[n, 64]`, float32 in [0, 1], and labels `y` `[n]`, int64."""

    x: Tensor
    y: Tensor

    def shard(self, rank: int, world_size: int) -> "Digits":
        """This rank's share: every `world_size`-th image, so that shards are disjoint and nearly equal in size."""
        return Digits(self.x[rank::world_size], self.y[rank::world_size])

    def batch(self, size: int, generator: torch.Generator) -> "Digits":
        """`size` random images, drawn with replacement."""
        chosen = torch.randint(len(self.y), (size,), generator=generator)
        return Digits(self.x[chosen], self.y[chosen])


def load() -> tuple[Digits, Digits]:
    """The training set (70 %) and the test set, with the same share of each digit; the same in every process."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=TEST_FRACTION, random_state=SPLIT_SEED, stratify=labels)
    x_train, x_test, y_train, y_test = (torch.from_numpy(part) for part in split)
    return Digits(x_train.float(), y_train), Digits(x_test.float(), y_test)


def make_model(seed: int) -> nn.Module:
    """An MLP 64-256-256-10 (85,002 parameters) with torch's default initialization, a function of `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(64, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 10),
        )


def loss(model: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy of `model` with the parameters `params`."""
    return nn.functional.cross_entropy(functional_call(model, params, (x,)), y)


def accuracy(model: nn.Module, params: dict[str, Tensor], data: Digits) -> float:
    """The share of images in `data` that `model` with the parameters `params` recognizes."""
    with torch.no_grad():
        predicted = functional_call(model, params, (data.x,)).argmax(dim=1)
    return (predicted == data.y).float().mean().item()
