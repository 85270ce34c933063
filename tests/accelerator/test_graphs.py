"""The law of replay: a captured step is the eager step, to the bit, as often as it is replayed.

The device of this folder captures with the rules of CUDA's graphs: a wait of the host, pinned memory, or a wait for work
outside of the graph is an error, streams must be joined, and a replay reads and writes the memory of the capture.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fnddp
from fnddp.laws import bits

STEPS = 9


def small(rank: int, device: str) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    net, generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), torch.Generator().manual_seed(rank)
    return net.to(device), [torch.randn(4, 6, generator=generator).to(device) for _ in range(STEPS)]


def by_the_class(rank: int, device: str, text: str, captures: bool) -> Any:
    net, batches = small(rank, device)
    model = fnddp.DistributedDataParallel(net, sync=fnddp.parse(text), bucket_cap_mb=0.0002)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    train: Any = fnddp.make_graphed_callable(step) if captures else step
    losses = [train(batch) for batch in batches]
    found = bits([losses, dict(net.named_parameters()), model.sync_state])
    if captures:
        found = found, len(train._graphs)
        train.release()
    return found


def test_quick(ranks):
    for text in ["allreduce", "error_feedback(fp16(allreduce))", "random_block(bf16(two_shot), block=7, unbiased=True)", "every(2, powersgd(fp16(allreduce), rank=2))"]:
        want = ranks(2, "side", by_the_class, text, False)
        for last in ("side", "default"):
            got = ranks(2, last, by_the_class, text, True)
            print(text, [(a[0] == b, a[1]) for a, b in zip(got, want)])
