"""What tests of integrations share: a launcher's variables for ranks of the pool, and a way to compare ranks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fnddp.laws import gather

everyones = gather


@contextmanager
def launched(rank: int, **more: str) -> Iterator[None]:
    size = dist.get_world_size()
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    before = dict(os.environ)
    os.environ.update({**{name: str(value) for name, value in ranks.items()}, "TORCHELASTIC_RUN_ID": "test", **more})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def parameters_of(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def residual(state: Any) -> Tensor:
    return torch.cat([r.flatten() for r in state.residual.values()])
