"""The contract of all adapters: what the pipeline gives as a function, to the bit.

The gradients of a step are given: the loss is the sum of their products with the parameters. What one adapter does and
the others do not is in its own file.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp.laws import bits, gather
from fnddp.simulation.ranks import run_threads
from tests.ranks import on_ranks
from tests.ways import WAYS, Way

Grads = dict[str, Tensor]

SHAPES = {"matrix": (24, 16), "vector": (24,), "sometimes": (16, 3, 2, 2), "never": (3, 5)}
SHAPES |= {"complex": (5, 3), "also complex": (1, 3), "negated": ()}  # two of odd sizes, in one bucket of torch's
ORDERS = {"matrix": (1, 0), "sometimes": (0, 2, 3, 1), "complex": (1, 0)}  # of dimensions in memory, if not row-major
PIPELINES = {
    "plain": "allreduce",
    "memory": "shared_momentum(error_feedback(powersgd(fp16(allreduce), rank=2)))",
    "phases": "partition({'m*': error_feedback(every(2, powersgd(allreduce))), '*': warmup(bf16(allreduce), steps=2)})",
    "skips": "partition({'m*': every(2, fp16(allreduce)), '*': fp16(allreduce)})",
    "codec": "error_feedback(quantize(two_shot, bits=4, block=16))",
    "no plan": "fp16(allreduce, check=True)",
}


def zeros(name: str) -> Tensor:
    leaf = torch.zeros(SHAPES[name], dtype=torch.complex64 if "complex" in name else torch.float32)
    order = ORDERS.get(name, range(leaf.ndim))
    return leaf.permute([*order]).contiguous().permute([order.index(i) for i in range(leaf.ndim)])


def loss_of(params: Grads, grads: Grads) -> Tensor:
    """Autograd conjugates and negates some of the gradients lazily."""
    total = torch.zeros(())
    for name, grad in grads.items():
        product = params[name].conj() * grad
        if name == "negated":
            product = torch.complex(torch.zeros(grad.shape), params[name]).conj() * torch.complex(0 * grad, grad)
        total = total + product.sum().real
    return total


def otherwise(name: str, leaf: Tensor) -> Tensor:
    """The same numbers in memory as autograd may give them: conjugated and negated lazily, or not dense."""
    if name == "negated":
        return torch.complex(torch.zeros(leaf.shape), -leaf).conj().imag
    if leaf.is_complex():
        return leaf.conj().resolve_conj().conj()
    return torch.stack([leaf, leaf], -1)[..., 0] if name == "matrix" else leaf


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in SHAPES:
            self.register_parameter(name, nn.Parameter(zeros(name)))

    def forward(self, grads: Grads) -> Tensor:
        return loss_of(dict(self.named_parameters()), grads)


class OfGiven(Way):
    def net(self) -> Any:
        return Given()

    def step(self, *batches: Grads) -> dict[str, Tensor | None]:
        self.backward(*batches)
        return {name.removeprefix("module."): p.grad for name, p in self.model.named_parameters()}


class ByModule(OfGiven, WAYS["module"]): ...


class ByRegister(OfGiven, WAYS["register"]): ...


class Functional(OfGiven):
    """On each rank leaves are otherwise in memory in every second step."""

    count = 0

    def laid_out(self, leaves: Grads) -> Grads:
        self.count += 1
        is_usual = (self.count + dist.get_rank()) % 2
        return leaves if is_usual else {name: otherwise(name, leaf) for name, leaf in leaves.items()}

    def backward(self, *batches: Grads) -> None:
        super().backward(added(*batches))


class ByValueAndGrad(Functional, WAYS["value_and_grad"]):
    @property
    def params(self) -> Grads:
        return self.laid_out(super().params)


class ByJit(Functional, WAYS["jit"]):
    def means(self, each: Grads) -> Any:
        return self.run(self.laid_out(filled(each)), self.kept)


ADAPTERS = {"module": ByModule, "register": ByRegister, "value_and_grad": ByValueAndGrad, "jit": ByJit}


def gradients(rank: int, step: int) -> Grads:
    """In each third step `sometimes` is used on no rank, and in the others on the first; `never` is used nowhere."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    grads = {name: torch.randn_like(zeros(name), generator=generator) for name in SHAPES if name != "never"}
    if rank or step % 3 == 2:
        del grads["sometimes"]
    return grads


def added(*batches: Grads) -> Grads:
    return {name: sum((grads[name] for grads in batches[1:]), batches[0][name]) for name in batches[0]}


def filled(*batches: Grads) -> Grads:
    have = added(*batches) if batches else {}
    return {name: have.get(name, zeros(name)) for name in SHAPES}


def check_steps(rank: int, adapter: str, text: str) -> None:
    training, sync, held = ADAPTERS[adapter](text), fnddp.parse(text), list[Any]()
    state = sync.init(filled())
    for step in range(6):
        micro = [gradients(rank, step)] if step < 3 else [gradients(rank, step), gradients(rank, step + 3)]
        got = training.step(*micro)
        want, state = sync(filled(*micro), state)
        for name, mean in want.items():
            is_none = mean is None
            if not isinstance(training, Functional) and mean is not None and not mean.any():
                # `.grad` of what no rank has used stays None, but for what memory has left
                is_none = not any(name in each for each in gather(sorted(micro[0])))
            assert bits([got[name]]) == bits([None if is_none else mean]), name
            assert is_none or got[name].stride() == torch.empty_like(got[name]).stride()  # dense
        assert bits(training.state) == bits(state)
        if step in (1, 3):
            held += [(kept, bits(kept)) for kept in (got, training.state)]
        elif got["vector"] is not None:  # a part of it alone
            part = got["vector"][3:5]
            held.append((part, bits(part)))
        del got
    assert all(bits(value) == before for value, before in held)


# In the first ring each adapter has every other pipeline.
CASES = [
    pytest.param(adapter, text, id=f"{adapter}-{name}", marks=[pytest.mark.thorough] * ((i + j) % 2))
    for i, adapter in enumerate(ADAPTERS)
    for j, (name, text) in enumerate(PIPELINES.items())
]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("adapter", "text"), CASES)
def test_means_and_states_are_those_of_the_pipeline(gloo, adapter, text, n):
    if adapter == "register":  # torch's reducer is not for threads
        gloo(min(n, 2), check_steps, adapter, text)
    else:  # threads add up in the order of ranks: the bits are the same on more than two, too
        run_threads(n, check_steps, adapter, text)


@pytest.mark.thorough
@on_ranks(4)
def test_over_the_group_of_the_model(rank: int) -> None:
    pairs, sync = [dist.new_group([0, 1]), dist.new_group([2, 3])], fnddp.parse(PIPELINES["memory"])
    mine = pairs[rank // 2]
    ours = fnddp.DistributedDataParallel(Given(), process_group=mine, sync=sync)
    theirs = TorchDDP(Given(), process_group=mine)
    assert ours.sync == fnddp.register(theirs, sync).sync == sync.over(mine) != sync
    assert fnddp.all_reduce(group=dist.group.WORLD) == fnddp.allreduce
    for model in (ours, theirs):
        model(filled(gradients(rank, 0))).backward()
        everyone = gather(bits([p.grad for p in model.parameters()]))
        assert everyone[0] == everyone[1] != everyone[2] == everyone[3]
