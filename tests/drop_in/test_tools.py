"""What tools do with torch's class works with this one."""

import warnings

import pytest
import torch
from torch import nn

import fnddp
from fnddp import DistributedDataParallel as DDP
from fnddp.laws import bits
from tests.drop_in.models import total
from tests.ranks import on_ranks
from tests.test_register import COMPRESSED, batch, make_model


@pytest.mark.parametrize("text", ["allreduce", COMPRESSED])
@on_ranks(2)
def test_optimizers_that_step_in_backward(rank: int, text: str) -> None:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of what it imports
        from torch.distributed.optim import _apply_optimizer_in_backward
    model, plain = (DDP(make_model(), sync=fnddp.parse(text)) for _ in range(2))
    for _ in range(2):  # two for each parameter
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(3):
        total(model(batch(rank, step))).backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.zero_grad()
        total(plain(batch(rank, step))).backward()
        optimizer.step()
        optimizer.step()
        assert bits(list(model.parameters())) == bits(list(plain.parameters()))


@on_ranks(2)
def test_manual_optimization_as_in_lightning(rank: int) -> None:
    """As lightning's DDPStrategy does it: forward must not prepare for backward, the strategy does."""
    model, plain = (DDP(make_model()) for _ in range(2))
    model.module.register_forward_hook(lambda *_: setattr(model, "require_backward_grad_sync", False))
    for step in range(2):
        loss = total(model(batch(rank, step)))
        model.require_backward_grad_sync = True
        model.require_forward_param_sync = True
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([])
        loss.backward()
        total(plain(batch(rank, step))).backward()
        assert bits([p.grad for p in model.parameters()]) == bits([p.grad for p in plain.parameters()])


@on_ranks(2)
def test_parameters_that_come_later_are_named(rank: int) -> None:
    model = DDP(make_model())
    model.module.append(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"5.weight, 5.bias came into the module after it was wrapped"):
        model(batch(rank, 0))
    model = DDP(make_model())
    model.module = nn.Sequential(make_model())
    with pytest.raises(RuntimeError, match=r"0.0.weight, 0.0.bias, .* came into the module"):
        model(batch(rank, 0))
