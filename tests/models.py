"""Modules, their steps, and what is asked of their gradients: shared by tests of modules and of torch's class."""

import inspect
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp.laws import bits, gather

WITH_RESIDUAL = "error_feedback(fp16(allreduce))"
COMPRESSED = "error_feedback(powersgd(fp16(allreduce), rank=2))"
SMALL = {"bucket_cap_mb": 0.001}


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(output: Any) -> Tensor:
    return (output.abs() if output.is_complex() else output).square().float().mean()


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def dense(tensor: Tensor | None) -> Tensor | None:
    return tensor.to_dense() if tensor is not None and tensor.is_sparse else tensor


def assert_same_grads(ours: nn.Module, theirs: nn.Module) -> None:
    pairs = list(zip(ours.named_parameters(), theirs.parameters(), strict=True))
    for (name, p), q in pairs:
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            assert p.grad.dtype == q.grad.dtype, name
            if p.grad.is_sparse:  # what several rows of a batch add to one is added in another order
                torch.testing.assert_close(dense(p.grad), dense(q.grad), rtol=1e-6, atol=1e-7)
            else:
                assert p.grad.stride() == p.stride(), name
                assert bits([p.grad]) == bits([q.grad]), name


def assert_equal_on_ranks(*values: Any) -> None:
    everyone = gather(bits(values))
    assert all(other == everyone[0] for other in everyone)


def descend(model: nn.Module, lr: float = 0.1) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= lr * dense(p.grad)


def step(model: nn.Module, *inputs: Any, descends: bool = True, **kwargs: Any) -> None:
    model.zero_grad()
    loss_of(model(*inputs, **kwargs)).backward()
    if descends:
        descend(model)


def steps_alike(rank: int, *models: nn.Module, at: Iterable[int] = range(3), use: Iterable[Any] = ()) -> None:
    for i in at:
        for model in models:
            step(model, batch(rank, i), *use)
        for other in models[1:]:
            assert_same_grads(models[0], other)


def average(sync: fnddp.Sync, named: Iterable[tuple[str, nn.Parameter]], state: Any) -> Any:
    """Replaces gradients by the pipeline's means of them; its next state."""
    parameters = dict(named)
    means, state = sync(
        {n: torch.zeros_like(p) if p.grad is None else dense(p.grad) for n, p in parameters.items()}, state
    )
    for name, p in parameters.items():
        p.grad = means[name] if p.requires_grad else None
    return state


def by_hand(sync: fnddp.Sync, module: nn.Module, state: Any, *inputs: Any) -> Any:
    """A step of the bare module and of the pipeline, without the update; the pipeline's next state."""
    module.zero_grad()
    loss_of(module(*inputs)).backward()
    return average(sync, module.named_parameters(), state)


def steps_by_hand(rank: int, model: fnddp.DistributedDataParallel, plain: nn.Module, at: Iterable[int]) -> None:
    """Steps without updates, whose gradients and states are those that the pipeline gives by hand for `plain`."""
    state = model.sync_state
    for i in at:
        state = by_hand(model.sync, plain, state, batch(rank, i))
        step(model, batch(rank, i), descends=False)
        assert_same_grads(model, plain)
        assert bits(model.sync_state) == bits(state)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


class Hooked(nn.Module):
    """Calls `fn` in its backward, when the buckets of its last layers are on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, x: Tensor, fn: Any = None) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if fn is not None and i == 1:
                x.register_hook(fn)
        return x


class Parts(nn.Module):
    """Its parts that are in `use` take part in a forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor, use: str = "abc") -> Tensor:
        return sum(getattr(self, name)(x) for name in use)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(16, 8).double(), nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x.double()).float()).bfloat16())


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


OF_TORCH = inspect.signature(TorchDDP.__init__).parameters


since_213 = pytest.mark.skipif("forward_sync_buffers" not in OF_TORCH, reason="compares with torch's class of 2.13")


class Stacked(torch.optim.Optimizer):
    """Momentum of all matrices of a group in one tensor, in the state of the first, as nanochat's MuonAdamW has it."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = group["params"]
            grads = torch.stack([p.grad for p in params])
            momentum = self.state[params[0]].setdefault("momentum", torch.zeros_like(grads))
            momentum.mul_(0.9).add_(grads)
            torch._foreach_add_(params, [*momentum.unbind()], alpha=-group["lr"])


def stacks(model: nn.Module) -> Stacked:
    """The optimizer, with a group for each shape: of five matrices, and of one that most ranks do not own."""
    shapes = dict.fromkeys(p.shape for p in model.parameters())
    return Stacked([{"params": [p for p in model.parameters() if p.shape == shape]} for shape in shapes])


def alike() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)), nn.Linear(8, 3, bias=False))
