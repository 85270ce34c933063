"""Collectives run behind backward: when each kernel and each collective of a step runs, by the device's own clock."""

from typing import Any

import pytest
import torch
from torch import nn

import fnddp
from tests.accelerator.conftest import ORDERS

pytestmark = pytest.mark.thorough

LAYERS = 8  # each with a bucket of its own


def a_step(rank: int, device: str, text: str) -> tuple[list[Any], list[tuple[str, int]]]:
    """Return what a step launches, in that order, and the kinds and buckets of its plan's collectives."""
    from tests.accelerator import device as sim

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(LAYERS)]).to(device)
    ddp = fnddp.DistributedDataParallel(model, sync=fnddp.parse(text), bucket_cap_mb=64 * 64 * 4 / 2**20)
    x = torch.ones(4, 64).to(device)

    def step() -> None:
        ddp.zero_grad()
        ddp(x).square().mean().backward()

    for _ in range(4):  # until the plan follows the order of gradients
        step()
    sim.synchronize()
    sim.trace(True)
    step()
    ranges = sim.trace(False)
    sim.synchronize()
    return ranges, [(str(each.kind), each.bucket) for each in ddp.plan.collectives]


@pytest.mark.parametrize("last", ORDERS)
@pytest.mark.parametrize("text", ["allreduce", "partition({'[0-3]*': two_shot, '*': fp16(allreduce)})"])
def test_collectives_run_behind_backward_in_the_order_of_the_plan(ranks, text, last):
    for ranges, planned in ranks(2, last, a_step, text):
        collectives = [i for i, (name, *_) in enumerate(ranges) if name.startswith("collective")]
        products = [i for i, (name, *_) in enumerate(ranges) if name == "aten::mm"]
        kinds = [ranges[i][0].removeprefix("collective ").strip("_").removesuffix("_BASE").lower() for i in collectives]
        assert kinds == [*(kind.replace("_", "") for kind, _ in planned), "allgather"]  # the last is the vote
        begun = [i for i in collectives if i < products[-1]]
        assert {bucket for _, bucket in planned[: len(begun)]} == set(range(LAYERS - 1))
        _, _, begin, end = ranges[begun[0]]
        assert any(begin <= ranges[i][2] < end for i in products)  # by the clock of streams, too
        assert len({ranges[i][1] for i in collectives} - {0}) == 1  # a stream of the group's own
