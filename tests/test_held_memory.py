"""Gradients in memory that something outside of the step holds are not written over."""

import numpy as np
import pytest
import torch
from torch import nn

import fnddp
from fnddp import DistributedDataParallel, allreduce, bf16, error_feedback, powersgd
from fnddp.core import tree
from tests.ranks import on_ranks

SHAPE = (16, 16)
SYNC = error_feedback(powersgd(bf16(allreduce), rank=1))


class Held:
    def __init__(self) -> None:
        self.kept = []

    def keep(self, memory):
        self.kept.append((memory, np.array(np.from_dlpack(memory))))
        return memory

    def is_unchanged(self) -> bool:
        return all(np.array_equal(np.from_dlpack(memory), before) for memory, before in self.kept)


# What becomes of a gradient in a hook, or in the backward of a function of the user's.
GIVEN = {
    "numpy's": lambda grad, held: torch.from_numpy(held.keep(grad.numpy().copy())),
    "a buffer of Python's": lambda grad, held: torch.frombuffer(
        held.keep(np.frombuffer(bytearray(grad.numpy().tobytes()), np.float32)), dtype=torch.float32
    ).view(grad.shape),
    "given away by DLPack": lambda grad, held: torch.from_dlpack(held.keep(np.from_dlpack(grad.clone()))),
    "a tensor": lambda grad, held: held.keep(grad.clone()),
}


class Gives(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, give, held):
        ctx.give, ctx.held = give, held
        return w.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.give(grad, ctx.held), None, None


class Model(nn.Module):
    def __init__(self, give=None, held=None) -> None:
        super().__init__()
        self.w, self.given = nn.Parameter(torch.ones(SHAPE)), (give, held)

    def forward(self, x):
        return ((Gives.apply(self.w, *self.given) if self.given[0] else self.w) * x).sum()


@on_ranks(2)
@pytest.mark.parametrize("name", GIVEN)
def test_a_function_of_the_users_holds_the_gradient_that_it_gives(rank, name):
    held = Held()
    model = DistributedDataParallel(Model(GIVEN[name], held), sync=SYNC)
    step = fnddp.value_and_grad(lambda p, x: (Gives.apply(p["w"], GIVEN[name], held) * x).sum(), SYNC)
    p = {"w": torch.ones(SHAPE)}
    state = SYNC.init(p)
    for number in range(3):
        model.zero_grad()
        model(torch.randn(SHAPE)).backward()
        assert held.is_unchanged(), number
        _, _, state = step(p, state, torch.randn(SHAPE))
        assert held.is_unchanged(), number
    assert len(held.kept) == 6


@on_ranks(2)
@pytest.mark.parametrize("give", [torch.Tensor.numpy, np.from_dlpack, torch.Tensor.contiguous])
def test_a_hook_of_the_users_holds_the_accumulated_gradient(rank, give):
    held, model = Held(), Model()

    def hook(w):
        held.keep(give(w.grad))

    model.w.register_post_accumulate_grad_hook(hook)
    model = DistributedDataParallel(model, sync=SYNC)
    for number in range(3):
        model.zero_grad()
        model(torch.randn(SHAPE)).backward()
        assert held.is_unchanged(), number
    assert len(held.kept) == 3


@on_ranks(2)
def test_a_state_in_memory_of_numpys_is_copied(rank):
    model = DistributedDataParallel(Model(), sync=SYNC)
    held = Held()
    model.sync_state = tree.map_tensors(lambda part: torch.from_numpy(held.keep(part.numpy().copy())), model.sync_state)
    for number in range(3):
        model(torch.randn(SHAPE)).backward()
        assert held.is_unchanged(), number
