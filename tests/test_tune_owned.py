"""Training with owners on virtual ranks, and `fnddp tune --own`, which chooses both hops by it."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fnddp
from fnddp.laws import bits
from tests.ranks import on_ranks

HOPS = [
    ("two_shot", "allgather"),
    ("error_feedback(quantize(two_shot, bits=4))", "ef21(quantize(allgather, bits=4))"),
    ("bf16(two_shot)", "bf16(allgather)"),
    ("error_feedback(lloyd_max(two_shot, bits=2))", "ef21(topk(allgather, ratio=0.1))"),
]


class Squares(nn.Module):
    """Parameters whose gradients are computed element by element, so that `vmap` gives the bits of autograd."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"first": (24, 16), "second": (16, 40), "third": (8, 8), "bias": (37,)}
        random = torch.Generator().manual_seed(1)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=random)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([((p - x) * (p - x)).sum() for p in self.parameters()]).sum()


def muon_and_adamw(leaves: Iterable[Tensor]) -> list[torch.optim.Optimizer]:
    leaves = [*leaves]
    matrices, rest = ([leaf for leaf in leaves if (leaf.ndim == 2) is which] for which in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


@pytest.mark.parametrize("hops", HOPS)
@on_ranks(3, threads=True)
def test_a_simulated_training_has_the_bits_of_one_on_real_ranks(rank: int, hops: tuple[str, str]) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(2))  # a number for each step and rank
    model = Squares()
    of_ranks = muon_and_adamw(model.parameters())
    owned = fnddp.own(model, of_ranks, *hops)
    for row in x:
        owned(row[rank]).backward()
        for each in of_ranks:
            each.step()
            each.zero_grad()
    alone = Squares()
    done = fnddp.simulate_training(
        lambda params, x: functional_call(alone, params, x),
        {name: p.detach() for name, p in alone.named_parameters()},
        [(row,) for row in x],
        fnddp.parse(hops[0]),
        weights=fnddp.parse(hops[1]),
        world_size=3,
        optimizer=muon_and_adamw,
    )
    assert bits(done.params) == bits({name: p.detach() for name, p in model.named_parameters()})
