"""What changes after wrapping is synchronized, or named."""

import copy

import pytest
import torch
from torch import Tensor, nn

import fnddp
from fnddp import DistributedDataParallel as DDP
from fnddp import StepFailedError, allreduce
from fnddp.laws import bits, gather
from tests.drop_in.models import (
    SMALL,
    WITH_RESIDUAL,
    Parts,
    assert_equal_on_ranks,
    grads_of,
    step,
    steps_by_hand,
    total,
)
from tests.ranks import on_ranks
from tests.test_register import COMPRESSED, batch, make_model


@on_ranks(2)
def test_the_pipeline_can_change_between_steps(rank: int) -> None:
    model, plain = DDP(make_model(), **SMALL), make_model()
    for i, text in enumerate(["allreduce", WITH_RESIDUAL, COMPRESSED, "allreduce"]):
        model.sync = fnddp.parse(text)
        assert bits(model.sync_state) == bits(model.sync.init(dict(plain.named_parameters())))
        steps_by_hand(rank, model, plain, [2 * i, 2 * i + 1])


@on_ranks(2)
def test_the_pipeline_cannot_change_during_a_backward(rank: int) -> None:
    model = DDP(make_model(), sync=fnddp.parse(WITH_RESIDUAL))
    before = bits(model.sync_state)
    output = model(batch(rank, 0))

    def change(grad: Tensor) -> None:
        model.sync = allreduce

    if rank == 1:
        model.module[2].weight.register_hook(change)
        with pytest.raises(RuntimeError, match="cannot change while a backward is running"):
            total(output).backward()
        model.module[2].weight._backward_hooks.clear()
    else:
        with pytest.raises(StepFailedError, match="rank 1 failed"):
            total(output).backward()
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


def test_new_and_unfrozen_parameters_are_named():
    module = Parts()
    module.b.requires_grad_(False)
    model = DDP(module)
    step(model, batch(0, 0))
    module.b.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"b\.weight, b\.bias did not require a gradient .* wrap the module again"):
        model(batch(0, 0))
    model = DDP(make_model())
    model.module.append(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"5.weight, 5.bias came into the module after it was wrapped"):
        model(batch(0, 0))
    model = DDP(make_model())
    model.module = nn.Sequential(make_model())
    with pytest.raises(RuntimeError, match=r"0.0.weight, 0.0.bias, .* came into the module"):
        model(batch(0, 0))


def replace(model: DDP, position: int, layer: nn.Linear, what: str) -> None:
    if what == "parameter":
        model.module[position].weight, model.module[position].bias = layer.weight, layer.bias
    else:
        model.module[position] = layer


@pytest.mark.parametrize("what", ["parameter", "module"])
@on_ranks(2)
def test_replaced_parameters_are_synchronized_or_named(rank: int, what: str) -> None:
    model = DDP(make_model(), sync=fnddp.parse(WITH_RESIDUAL), **SMALL)
    step(model, batch(rank, 0))
    torch.manual_seed(5)
    replace(model, 2, nn.Linear(64, 64), what)
    steps_by_hand(rank, model, copy.deepcopy(model.module), range(1, 4))
    replace(model, 4, nn.Linear(64, 7), what)  # of another shape
    with pytest.raises(ValueError, match=r"'4\.weight' is now float32\[7, 64\], but was float32\[4, 64\]"):
        step(model, batch(rank, 0))


def make_convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3, bias=False))


def images(rank: int) -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(rank))


def mean_grads(module: nn.Module, rank: int, backwards: int = 1) -> list[Tensor]:
    loss = total(module(images(rank)))
    for _ in range(backwards):
        loss.backward(retain_graph=True)
    return [torch.stack(gather(p.grad.contiguous())).mean(0) for p in module.parameters()]


def assert_close_grads(model: DDP, expected: list[Tensor]) -> None:
    for p, mean in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, mean, rtol=1e-5, atol=1e-7)  # convolutions round by memory format
        assert p.grad.stride() == p.stride()


@pytest.mark.parametrize("where", [[0, 1], [1]])
@on_ranks(2)
def test_another_memory_format_after_wrapping(rank: int, where: list[int]) -> None:
    model, expected = DDP(make_convolutions()), mean_grads(make_convolutions(), rank)
    if rank in where:
        model.to(memory_format=torch.channels_last)
    for _ in range(3):
        model.zero_grad()
        total(model(images(rank))).backward()
        assert_close_grads(model, expected)


@on_ranks(2)
def test_the_same_graph_twice(rank: int) -> None:
    model = DDP(make_convolutions())
    loss = total(model(images(rank)))
    loss.backward(retain_graph=True)
    assert_close_grads(model, mean_grads(make_convolutions(), rank))
    loss.backward(retain_graph=True)
    assert_close_grads(model, mean_grads(make_convolutions(), rank, backwards=2))
    model.zero_grad()
    loss.backward()
    assert_close_grads(model, mean_grads(make_convolutions(), rank))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@on_ranks(2)
def test_parametrizations_after_wrapping(rank: int) -> None:
    model, bare = DDP(make_convolutions()), make_convolutions()
    total(model(images(rank))).backward()
    for module in (model.module, bare):
        nn.utils.parametrize.register_parametrization(module[0], "weight", Doubled())
    expected = mean_grads(bare, rank)
    for _ in range(2):
        model.zero_grad()
        total(model(images(rank))).backward()
        assert_close_grads(model, expected)
    nn.utils.parametrizations.weight_norm(model.module[2])
    with pytest.raises(RuntimeError, match="2.parametrizations.weight.original0, .* came into the module"):
        model(images(rank))


@on_ranks(2)
def test_grads_that_are_asked_for_after_another_dtype_and_back(rank: int) -> None:
    """Autograd accumulates them at another place then."""
    model = DDP(nn.Linear(2, 1, bias=False))
    for _ in range(2):
        (grad,) = torch.autograd.grad(model(torch.full((1, 2), rank + 1.0)).sum(), [model.module.weight])
        assert grad.tolist() == [[1.5, 1.5]]
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
