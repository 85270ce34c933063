"""State dicts and copies keep a module and its pipeline; what changes after wrapping is synchronized, or named."""

import copy
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import DistributedDataParallel as DDP
from fnddp import StepFailedError, allreduce, fp16
from fnddp.adapters.checkpoint import shares
from fnddp.laws import bits, gather
from tests.models import (
    COMPRESSED,
    SMALL,
    WITH_RESIDUAL,
    Parts,
    assert_equal_on_ranks,
    assert_same_grads,
    batch,
    by_hand,
    grads_of,
    loss_of,
    make_model,
    normed,
    step,
    steps_by_hand,
)
from tests.ranks import on_ranks

SYNC = fnddp.parse(f"warmup({COMPRESSED}, steps=1)")


def named() -> nn.Module:
    """Return a module whose own names begin with `module.`."""
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(module=nn.Linear(16, 8), head=nn.Linear(8, 4)))


@pytest.mark.parametrize("make", [normed, named])
@on_ranks(1)
def test_state_dicts_of_torch_and_of_the_bare_module_are_interchangeable(
    rank: int, make: Callable[[], nn.Module]
) -> None:
    ours, theirs = DDP(make(), sync=SYNC), TorchDDP(make())
    holder = nn.ModuleDict({"net": ours})
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert list(ours.state_dict(prefix="x.")) == list(theirs.state_dict(prefix="x."))
    assert list(holder.state_dict()) == [f"net.{key}" for key in theirs.state_dict()]
    step(theirs, batch(rank, 0))
    for saved in (theirs.state_dict(), theirs.module.state_dict(), dict(theirs.state_dict())):
        fresh = DDP(make(), sync=SYNC)
        assert str(fresh.load_state_dict(saved)) == "<All keys matched successfully>"
        assert bits(fresh.state_dict()) == bits(theirs.state_dict())
    holder.load_state_dict({f"net.{key}": value for key, value in theirs.state_dict().items()})
    assert bits(ours.state_dict()) == bits(theirs.state_dict())
    fewer = dict(list(theirs.state_dict().items())[1:])
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict(fewer)
    assert ours.load_state_dict(fewer, strict=False).missing_keys == [next(iter(theirs.state_dict()))]
    theirs.load_state_dict(ours.state_dict())  # and back


@on_ranks(2)
def test_state_dicts_keep_the_state_of_the_pipeline(rank: int) -> None:
    model = DDP(normed(), sync=SYNC, static_graph=True, **SMALL)
    for i in range(3):
        step(model, batch(rank, i))
    saved = copy.deepcopy(model.state_dict(sync_state=True))
    assert set(saved) > set(model.state_dict())
    again = DDP(normed(), sync=SYNC, static_graph=True, **SMALL)
    assert str(again.load_state_dict(saved)) == "<All keys matched successfully>"
    with pytest.raises(ValueError, match="saved by another pipeline"):
        DDP(normed(), sync=fp16(allreduce)).load_state_dict(saved)
    assert bits(again.sync_state) == bits(model.sync_state)
    for i in range(3, 6):
        for each in (model, again):
            step(each, batch(rank, i))
        assert_same_grads(again, model)
        assert bits(again.state_dict(sync_state=True)) == bits(model.state_dict(sync_state=True))
    assert_equal_on_ranks(list(again.parameters()))
    before = bits(model.state_dict(sync_state=True))
    step(again, batch(rank, 9))  # nothing is shared
    assert bits(model.state_dict(sync_state=True)) == before


@on_ranks(2)
def test_ignored_parameters_and_buffers(rank: int) -> None:
    models = []
    for cls in (DDP, TorchDDP):
        module = normed()
        with torch.no_grad():
            module[2].weight += rank
            module[1].running_mean += rank
        cls._set_params_and_buffers_to_ignore_for_model(module, ["2.weight", "1.running_mean"])
        models.append(cls(module))
        for i in range(3):
            step(models[-1], batch(rank, i))
    ours, theirs = models
    assert_same_grads(ours, theirs)
    assert bits(ours.state_dict()) == bits(theirs.state_dict())
    everyone = gather(bits([ours.module[2].weight, ours.module[1].running_mean]))
    assert everyone[0][0] != everyone[1][0]
    assert everyone[0][1] != everyone[1][1]


SIZES = st.integers(1, 64)


@given(size=SIZES, saved_size=SIZES)
def test_shares_of_a_residual_keep_its_mean(size, saved_size):
    each = [shares(rank, size, saved_size) for rank in range(size)]
    for mine in each:
        assert sum(mine.values()) == pytest.approx(1)
        assert all(share > 0 for share in mine.values())
        assert set(mine) <= set(range(saved_size))
    for saved in range(saved_size):
        assert sum(mine.get(saved, 0) for mine in each) == pytest.approx(size / saved_size)
    if size == saved_size:
        assert each == [{rank: 1.0} for rank in range(size)]


@on_ranks(2)
def test_the_pipeline_cannot_change_during_a_backward(rank: int) -> None:
    model = DDP(make_model(), sync=fnddp.parse(WITH_RESIDUAL))
    before = bits(model.sync_state)
    output = model(batch(rank, 0))

    def change(grad: Tensor) -> None:
        model.sync = allreduce

    handle = model.module[2 * rank].weight.register_hook(change if rank else lambda _: None)
    match = "cannot change while a backward is running" if rank else "rank 1 failed"
    with pytest.raises(RuntimeError if rank else StepFailedError, match=match):
        loss_of(output).backward()
    handle.remove()
    assert bits(model.sync_state) == before
    model.zero_grad()
    model.sync = allreduce  # the backward is over
    step(model, batch(rank, 1))
    assert_equal_on_ranks(grads_of(model))


@on_ranks(2)
def test_parameters_frozen_after_wrapping(rank: int) -> None:
    model, plain = DDP(Parts(), sync=fnddp.parse(WITH_RESIDUAL), **SMALL), Parts()
    for i, trains in enumerate([True, True, False, True]):
        for module in (model.module, plain):
            module.b.requires_grad_(trains)
        steps_by_hand(rank, model, plain, [i])


@pytest.mark.parametrize("what", ["parameter", "module"])
@on_ranks(2)
def test_replaced_parameters_are_named(rank: int, what: str) -> None:
    model = DDP(make_model(), sync=fnddp.parse(WITH_RESIDUAL), **SMALL)
    step(model, batch(rank, 0))
    layer = nn.Linear(64, 64)
    if what == "parameter":
        model.module[2].weight, model.module[2].bias = layer.weight, layer.bias
    else:
        model.module[2] = layer
    with pytest.raises(RuntimeError, match="2.weight, 2.bias were replaced after the module was w"):
        model(batch(rank, 0))
    with torch.no_grad():
        model(batch(rank, 0))


@pytest.mark.parametrize("where", [[0, 1], [1]])
@on_ranks(2)
def test_another_memory_format_after_wrapping(rank: int, where: list[int]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3, bias=False))
    model, images = DDP(copy.deepcopy(plain)), torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
    by_hand(allreduce, plain, (), images)
    if rank in where:
        model.to(memory_format=torch.channels_last)
    for _ in range(3):
        step(model, images, descends=False)
        # Convolutions round by memory format.
        torch.testing.assert_close(grads_of(model), grads_of(plain), rtol=1e-5, atol=1e-7)
        assert all(p.grad.stride() == p.stride() for p in model.parameters())


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@on_ranks(2)
def test_parametrizations_after_wrapping(rank: int) -> None:
    model, plain = DDP(make_model()), make_model()
    step(model, batch(rank, 0), descends=False)
    for module in (model.module, plain):
        nn.utils.parametrize.register_parametrization(module[0], "weight", Doubled())
    steps_by_hand(rank, model, plain, [1, 2])
    nn.utils.parametrizations.weight_norm(model.module[2])
    with pytest.raises(RuntimeError, match="2.parametrizations.weight.original0, .* required no gradient"):
        model(batch(rank, 3))


@on_ranks(2)
def test_a_backward_after_a_cast_and_back(rank: int) -> None:
    """Autograd accumulates at another place then."""
    model = DDP(nn.Linear(2, 1, bias=False))
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.5, 1.5]]
        model.double()
        model.float()


def test_parameters_are_not_swapped():
    """As in torch's class: their hooks would be gone."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for wrapped in (DDP(nn.Linear(2, 1)), DDP(nn.Linear(2, 1), sync=fnddp.none)):
            with pytest.raises(RuntimeError, match="Couldn't swap Linear.weight"):
                wrapped.to(torch.float64)
            with pytest.raises(RuntimeError, match="While swapping the parameter"):
                wrapped.load_state_dict({key: value.clone() for key, value in wrapped.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
