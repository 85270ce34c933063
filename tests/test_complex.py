"""Complex parameters, and gradients that autograd conjugates or negates lazily, in every adapter on real ranks.

Rank r scales its gradients by r + 1, so means over two ranks are 1.5 times those of rank 0.
"""

import pytest
import torch
from torch import Tensor, nn

import fnddp
from fnddp import DistributedDataParallel, allreduce, bf16, error_feedback, powersgd, quantize, two_shot
from tests.ranks import on_ranks

SHAPE = (8, 6)
WEIGHTS = (1 - 2j) * torch.outer(torch.linspace(1, 2, 8), torch.linspace(2, 1, 6))  # of rank one, as PowerSGD's is


def initial() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "w": torch.randn(*SHAPE, dtype=torch.complex64, generator=generator),
        "v": torch.randn(4, 1, dtype=torch.complex64, generator=generator),
        "r": torch.randn((), generator=generator),
        "x": torch.randn(5, generator=generator),
    }


def loss_of(p: dict[str, Tensor], scale: float) -> Tensor:
    # Autograd conjugates the gradients of w and v, and negates that of r: the imaginary part of a conjugate.
    lazily = (p["w"].conj() * WEIGHTS).sum() + (p["v"].mH @ WEIGHTS[:4, :1]).sum()
    turned = torch.complex(torch.zeros(()), p["r"]).conj()
    return scale * ((lazily * (1 + 2j)).real + (turned * (3 - 1j)).real + p["x"].square().sum())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.ParameterDict(initial())

    def forward(self, scale: float) -> Tensor:
        return loss_of(dict(self.p.items()), scale)


def gradients(scale: float) -> dict[str, Tensor]:
    model = Model()
    model(scale).backward()
    return {name: parameter.grad for name, parameter in model.p.items()}


def assert_mean(got: dict[str, Tensor], scale: float, **tolerances: float) -> None:
    for name, want in gradients(1.5 * scale).items():
        torch.testing.assert_close(got[name].resolve_conj(), want.resolve_conj(), **tolerances)


def test_autograd_gives_such_gradients():
    found = gradients(1.0)
    assert found["w"].is_conj()
    assert found["r"].is_neg()


def lazy(scale: float) -> dict[str, Tensor]:
    made = {name: grad.resolve_conj().clone() for name, grad in gradients(scale).items()}
    negated = torch.complex(torch.zeros(()), -made["r"]).conj().imag
    assert negated.is_neg()
    return {**made, "w": made["w"].conj().clone().conj(), "r": negated}


def pipelines() -> list[fnddp.Sync]:
    return [allreduce, error_feedback(powersgd(bf16(allreduce), rank=1)), quantize(two_shot, bits=8), bf16(allreduce)]


def tolerance(sync: fnddp.Sync) -> dict[str, float]:
    return {} if sync == allreduce else {"rtol": 0.02, "atol": 0.1}  # 16 and 8 bits


@on_ranks(2)
def test_a_wrapped_module(rank):
    for sync in pipelines():
        model = DistributedDataParallel(Model(), sync=sync)
        for number in (1, 2, 3):
            model.zero_grad(set_to_none=number != 3)
            model((rank + 1.0) * number).backward()
            assert_mean({n: p.grad for n, p in model.module.p.items()}, number, **tolerance(sync))
        named = list(model.module.p.items())
        grads = torch.autograd.grad(model(rank + 1.0), [p for _, p in named])
        assert_mean({n: g for (n, _), g in zip(named, grads, strict=True)}, 1.0, **tolerance(sync))


@on_ranks(2)
def test_value_and_grad_and_jit_and_the_call_itself(rank):
    for sync in pipelines():
        step, planned = fnddp.value_and_grad(loss_of, sync), fnddp.jit(sync)
        states = [sync.init(initial())] * 3
        for number in (1, 2, 3):
            scale = (rank + 1.0) * number
            _, grads, states[0] = step(initial(), states[0], scale)
            assert_mean(grads, number, **tolerance(sync))
            for which, run in ((1, planned), (2, sync)):
                grads, states[which] = run(lazy(scale), states[which])
                assert_mean(grads, number, **tolerance(sync))
        assert planned.plan is not None


@on_ranks(2)
@pytest.mark.parametrize("as_view", [False, True])
def test_a_registered_model(rank, as_view):
    for sync in pipelines():
        model = nn.parallel.DistributedDataParallel(Model(), gradient_as_bucket_view=as_view)
        fnddp.register(model, sync)
        for number in (1, 2, 3):
            model.zero_grad()
            model((rank + 1.0) * number).backward()
            assert_mean({n: p.grad for n, p in model.module.p.items()}, number, **tolerance(sync))


@on_ranks(2)
def test_a_registered_model_whose_complex_bucket_has_several_leaves_of_odd_sizes(rank):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(torch.ones(n, 3, dtype=torch.complex64) for n in (1, 5, 2))

        def forward(self, scale: float) -> Tensor:
            weights = torch.arange(3.0)
            return sum(((i + 1j) * scale * p * weights).sum().real for i, p in enumerate(self.parts))

    model = nn.parallel.DistributedDataParallel(Odd())
    fnddp.register(model, allreduce)
    for _ in (1, 2):
        model.zero_grad()
        model(rank + 1.0).backward()
        for i, parameter in enumerate(model.module.parts):
            want = (1.5 * (i - 1j) * torch.arange(3.0)).expand(parameter.shape)
            torch.testing.assert_close(parameter.grad, want)
