"""A rank that fails on the device, at each point: it raises its error, and the others theirs one step later.

Nobody waits for a timeout, and nothing that ranks do not share is saved: see docs/gpu.md. Shards' are in `tests/gpu`.
"""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import CollectiveError, outer
from fnddp.wire.c10d import C10d
from tests.accelerator.conftest import ORDERS

pytestmark = pytest.mark.thorough

TEXT = "error_feedback(quantize(two_shot, bits=4))"
REFUSED = "an earlier step failed on this rank|another rank failed in the step before"


class Fails(nn.Module):
    now = False

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        if Fails.now:
            y.register_hook(lambda _: 1 // 0)
        return y


class OnTheWire(C10d):
    now = False

    def start(self, *given: Any, **options: Any) -> Any:
        if OnTheWire.now:
            OnTheWire.now = False
            raise ZeroDivisionError("on the wire")
        return super().start(*given, **options)


def net(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Fails(), nn.Linear(16, 16)).to(device)


def by_module(device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    model = fnddp.DistributedDataParallel(net(device), sync=TEXT, bucket_cap_mb=0.0005, wire=OnTheWire())
    x = torch.ones(2, 16, device=device)
    return lambda: model(x).square().mean().backward(), lambda: model.sync_state


def by_register(device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    model = TorchDDP(net(device), bucket_cap_mb=0.0005)
    handle = fnddp.register(model, TEXT, wire=OnTheWire())
    x = torch.ones(2, 16, device=device)
    return lambda: model(x).square().mean().backward(), lambda: handle.sync_state


def by_value_and_grad(device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    model, sync = net(device), fnddp.parse(TEXT)
    params = {name: p.detach() for name, p in model.named_parameters()}
    x, state = torch.ones(2, 16, device=device), sync.init(params)
    run = fnddp.value_and_grad(
        lambda params: torch.func.functional_call(model, params, (x,)).square().mean(), sync, wire=OnTheWire()
    )
    return lambda: run(params, state), lambda: run(params, state)


def by_outer_steps(device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = outer.attach(model, optimizer, outer.parse(f"diloco({TEXT}, every=1)"), wire=OnTheWire())
    x = torch.ones(2, 16, device=device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()

    return step, lambda: attached.state


def check(rank: int, device: str, way: Callable[..., Any], point: str, after: int) -> None:
    step, read = way(device)
    for _ in range(after):
        step()
    Fails.now, OnTheWire.now = (rank == 1 and point == each for each in ("backward", "wire"))
    with pytest.raises(ZeroDivisionError) if rank == 1 else nullcontext():
        step()
    Fails.now = False
    later = [step] if rank == 1 else [read, step]
    for again in later[:-1] if way is by_register else later:  # a forward of torch's class has collectives of its own
        with pytest.raises((CollectiveError, RuntimeError), match=REFUSED):
            again()
    if rank == 0:  # which has begun collectives that the other never joins: what ends those is not the library's
        with suppress(RuntimeError):
            torch.accelerator.synchronize()


POINTS = [
    *product((by_module, by_register, by_value_and_grad), ("wire",), (1, 2)),
    *product((by_module,), ("backward",), (1, 2)),
    (by_outer_steps, "wire", 1),
]


@pytest.mark.parametrize("last", ORDERS)
@pytest.mark.parametrize(("way", "point", "after"), POINTS)
def test_others_are_told_one_step_later(ranks, last, way, point, after):
    ranks(2, last, check, way, point, after)
