"""Custom autograd functions whose backward runs a backward of its own, of which autograd knows nothing beforehand.

Rank r has the batch `r * [2, 3]`, so means over two ranks are those of half the batch of rank 1.
"""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fnddp
from fnddp import DistributedDataParallel, StepFailedError, allreduce, error_feedback, fp16
from tests.ranks import on_ranks


class Recomputes(torch.autograd.Function):
    """A reentrant checkpoint as fairscale's and DeepSpeed's, which do not ask torch whether they may run."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run, ctx.x = run, x.detach().requires_grad_(x.requires_grad)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            y = ctx.run(ctx.x)
        torch.autograd.backward(y, grad)
        return None, ctx.x.grad


class Remembers(Recomputes):
    """One that keeps the graph that it has made in forward, and goes through it in two parts."""

    @staticmethod
    def forward(ctx, run, x):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_(x.requires_grad)
            ctx.y, ctx.parameters = run(ctx.x), run.parameters
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, grad):
        for part in (0.25, 0.75):
            torch.autograd.backward(ctx.y, grad * part, retain_graph=True)
        return None, ctx.x.grad


class Product:
    def __init__(self, w: Tensor) -> None:
        self.parameters = [w]

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.parameters[0]


# Forward runs from left to right, and backward from right to left. o: outside of the function, i: inside.
ORDERS = ["i", "ii", "oi", "io", "oio", "ioi", "iio"]


def loss_of(p, x, function, order):
    total = p["v"].sum() + (x.detach() * 0).sum()
    for each in order:
        total = total + (function.apply(Product(p["w"]), x).sum() if each == "i" else (5 * p["w"]).sum())
    return total


def expected(x: Tensor, function, order: str) -> list[float]:
    p = {name: torch.ones(2, requires_grad=True) for name in "wv"}
    loss_of(p, x.detach().requires_grad_(), function, order).backward()
    return p["w"].grad.tolist()


def batch(rank: float) -> Tensor:
    return (torch.tensor([2.0, 3.0]) * rank).requires_grad_()


class Writes(Recomputes):
    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.run.parameters
        w.grad = (grad * ctx.x).detach()
        return None, grad * w.detach()


def of_a_parameter(p, x, function):
    return function.apply(Product(p["w"]), x * p["v"]).sum()


def plain(p, x):
    return checkpoint(lambda x: x * p["w"], x, use_reentrant=False).sum() + p["v"].sum()


def through_torch(p, x):
    return checkpoint(lambda x: x * p["w"], x, use_reentrant=True).sum() + p["v"].sum()


def through_a_kept_name(p, x):
    # The class as other libraries have imported it.
    return KEPT.apply(lambda x: x * p["w"], True, x).sum() + p["v"].sum()


KEPT = torch.utils.checkpoint.CheckpointFunction


@on_ranks(2)
@pytest.mark.parametrize("function", [Recomputes, Remembers, Writes, None])
def test_value_and_grad_refuses_gradients_that_a_function_makes_in_its_own_backward(rank, function):
    sync = error_feedback(fp16(allreduce))
    p = {name: torch.ones(2) for name in "wv"}
    orders = ("i", "io") if function is Writes else ("i", "io", "oi")  # what is written first is added to
    losses = [partial(loss_of, order=order, function=function) for order in orders]
    losses, text = [partial(of_a_parameter, function=function), *losses], "leaf 'w' is computed by a custom"
    if function is None:
        losses, text = [through_torch, through_a_kept_name], "use_reentrant=(True|False)"
    for loss in losses:
        step, state, x = fnddp.value_and_grad(lambda p, x, loss: loss(p, x), sync), sync.init(p), batch(rank)
        with pytest.raises(RuntimeError if rank else StepFailedError, match=text if rank else "rank 1 failed"):
            step(p, state, x, loss if rank else plain)
        assert x.grad is None  # which is the caller's
        _, grads, _ = step(p, state, x, plain)
        assert grads["w"].tolist() == [1.0, 1.5]


def test_a_backward_within_the_loss_function_is_an_error():
    def loss(p):
        (p["w"] * 2).sum().backward()
        return p["v"].sum()

    with pytest.raises(RuntimeError, match="loss_fn itself runs a backward that reaches leaf 'w'"):
        fnddp.value_and_grad(loss, allreduce)({name: torch.ones(2) for name in "wv"}, ())


def test_a_synchronization_within_the_loss_function_is_an_error_unless_it_is_a_constant():
    inner = fnddp.value_and_grad(lambda q, v: (q["w"] * v).sum(), allreduce)

    def loss(p, *, constant):
        with torch.set_grad_enabled(not constant):
            value, grads, _ = inner({"w": p["w"]}, (), p["v"])
        return value + (grads["w"] * p["w"]).sum()

    step, p = fnddp.value_and_grad(loss, allreduce), {"w": torch.ones(2), "v": torch.full((2,), 3.0)}
    with pytest.raises(RuntimeError, match="cannot run inside the loss_fn of another one"):
        step(p, (), constant=False)
    _, grads, _ = step(p, (), constant=True)
    assert (grads["w"].tolist(), grads["v"].tolist()) == ([3.0, 3.0], [0.0, 0.0])


class Module(nn.Module):
    def __init__(self, function: type[torch.autograd.Function] | None) -> None:
        super().__init__()
        self.w, self.v, self.function = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), function

    def forward(self, x: Tensor, order: str) -> Tensor:
        return loss_of({"w": self.w, "v": self.v}, x, self.function or Torchs, order)


class Torchs:
    @staticmethod
    def apply(run, x):
        return checkpoint(run, x, use_reentrant=True)


@on_ranks(2)
@pytest.mark.parametrize("function", [Recomputes, Remembers, None])
def test_a_wrapped_module_is_right_or_raises_on_all_ranks(rank, function):
    for order in ORDERS:
        for before in (0.0, 1.0):
            model = DistributedDataParallel(Module(function), sync=error_feedback(fp16(allreduce)))
            for number in (1, 2):
                for parameter in model.parameters():
                    parameter.grad = torch.full((2,), before) if before else None
                loss = model(batch(rank * number), order)
                if order in ("io", "iio"):  # it is sent before the function runs
                    with pytest.raises(RuntimeError, match="'w' is used both inside and outside"):
                        loss.backward()
                    assert before or model.module.w.grad is None  # what is left is not added to
                else:
                    loss.backward()
                    want = torch.tensor(expected(batch(number / 2), function or Torchs, order))
                    assert model.module.w.grad.tolist() == (want + before).tolist(), (order, before)


def test_the_graph_of_the_callers_inputs_is_left_alone():
    """Nothing in its graph runs, so the caller can go through it, and no gradient is written to what it uses."""
    layer, teacher = nn.Linear(2, 2), nn.Linear(2, 2)
    through = [
        Recomputes.apply(layer, torch.ones(2, 2, requires_grad=True)),
        checkpoint(layer, torch.ones(2, 2, requires_grad=True), use_reentrant=True),
    ]
    step = fnddp.value_and_grad(lambda p, x: (Recomputes.apply(torch.sin, teacher(x)) * p["w"]).sum(), allreduce)
    for x in through:
        assert x is not None
        _, grads, _ = step({"w": torch.ones(2)}, (), x)
        torch.testing.assert_close(grads["w"], teacher(x).sin().detach().sum(0))
        assert layer.weight.grad is teacher.weight.grad is None
        x.sum().backward()
        assert layer.weight.grad is not None
        layer.weight.grad = None
