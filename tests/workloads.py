"""Models that commands take with `--model`: SMALL and its neighbours, as a user's file has them."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from fnddp.simulation.tune import Problem

SMALL = f"{__file__}:small"
"""A layer of 64 x 32, with a batch and a loss."""

WIDE = f"{__file__}:wide"

module = nn.Linear(8, 4)


class Network(nn.Linear):
    def __init__(self, width=4):
        super().__init__(8, width)


def small():
    return nn.Linear(64, 32), torch.ones(2, 64), lambda output: output.square().mean()


def own_problem():
    return Problem(
        partial(nn.Linear, 20, 1),
        lambda forward, batch: forward(*batch).square().mean(),
        lambda rank, ranks, generator: (torch.randn(4, 20, generator=generator),),
    )


class Positions(nn.Module):
    """Its own parameter comes first among the parameters, and its gradient before that of the embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(5000, 64), nn.Parameter(torch.zeros(8, 64))
        self.head = nn.Linear(64, 16)

    def forward(self, tokens):
        return self.head(self.embed(tokens) + self.position)


def of_closures():
    return replace(own_problem(), optimizer=torch.optim.LBFGS)


def positions():
    return Positions(), torch.arange(16).reshape(2, 8), lambda out: out.square().mean()


def wide():
    return nn.Linear(640, 480), torch.ones(2, 640), lambda output: output.square().mean()


def large():
    return nn.Linear(4000, 1000), torch.ones(2, 4000), lambda output: output.square().mean()


def alone():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def normalized():
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    return model, torch.randn(8, 64), lambda out: out.square().mean()


def branches():
    return nn.Linear(8, 4), torch.ones(2, 8), lambda out: out.mean() if out.sum() > 0 else out.square().mean()


def values():
    made = nn.Linear(8, 4)
    made.weight.data *= made.weight.abs().max().item()
    return made


def huge():
    return nn.Linear(200_000, 200_000)


def trainable_in_part():
    return nn.Sequential(nn.Linear(64, 32).requires_grad_(False), nn.Linear(32, 10))


def frozen():
    return nn.Linear(3, 2).requires_grad_(False)


def broken():
    raise KeyError("no such layer")


def number():
    return 3


def lazy():
    return nn.LazyLinear(3)


def detached():
    return nn.Linear(3, 2), torch.ones(2, 3), lambda output: output.detach().mean()


def raises():
    def odd(_):
        raise RuntimeError("odd gradient")

    def loss(output):
        output.register_hook(odd)
        return output.mean()

    return nn.Linear(3, 2), torch.ones(2, 3), loss


def sparse():
    return nn.Embedding(10, 4, sparse=True), torch.ones(2, dtype=torch.int64), lambda output: output.square().mean()


def text_in():
    return nn.Linear(3, 2), "text", torch.sum


def no_loss():
    return nn.Linear(3, 2), torch.ones(2, 3), 1.0


def many():
    return nn.Linear(8, 4), torch.ones(2, 8), lambda output: output
