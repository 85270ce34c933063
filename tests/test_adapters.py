"""The contract of all adapters: what the pipeline gives as a function, to the bit.

The gradients of a step are given: the loss is the sum of their products with the parameters. What one adapter does and
the others do not is in its own file.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import Sync
from fnddp.laws import bits, gather
from fnddp.simulation.ranks import run_threads
from tests.ranks import on_ranks

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
SMALL = 0.001  # MiB: several buckets


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


class Wrapped:
    model: Any
    holder: Any  # of the pipeline's state
    keeps_unused = True  # `.grad` of what no rank has used stays None

    @property
    def state(self) -> Any:
        return self.holder.sync_state

    @state.setter
    def state(self, state: Any) -> None:
        self.holder.sync_state = state

    def step(self, *batches: Grads) -> dict[str, Tensor | None]:
        self.model.zero_grad()
        for grads in batches[:-1]:
            with self.model.no_sync():
                self.model(grads).backward()
        self.model(batches[-1]).backward()
        return {name: p.grad for name, p in self.model.module.named_parameters()}


class ByModule(Wrapped):
    def __init__(self, sync: Sync) -> None:
        self.holder = self.model = fnddp.DistributedDataParallel(Given(), sync=sync, bucket_cap_mb=SMALL)


class ByRegister(Wrapped):
    def __init__(self, sync: Sync) -> None:
        self.model = TorchDDP(Given(), bucket_cap_mb=SMALL, find_unused_parameters=True)
        self.holder = fnddp.register(self.model, sync)


class Functional:
    """The steps of `value_and_grad` and `jit`: on each rank leaves are otherwise in memory in every second step."""

    keeps_unused = False

    def __init__(self, sync: Sync) -> None:
        self.state, self.run = sync.init(filled()), self.made(sync)
        self.count = dist.get_rank()

    def laid_out(self, leaves: Grads) -> Grads:
        self.count += 1
        return leaves if self.count % 2 else {name: otherwise(name, leaf) for name, leaf in leaves.items()}


class ByValueAndGrad(Functional):
    def made(self, sync: Sync) -> Any:
        return fnddp.value_and_grad(loss_of, sync)

    def step(self, *batches: Grads) -> dict[str, Tensor | None]:
        _, mean, self.state = self.run(self.laid_out(filled()), self.state, added(*batches))
        return mean


class ByJit(Functional):
    def made(self, sync: Sync) -> Any:
        return fnddp.jit(sync)

    def step(self, *batches: Grads) -> dict[str, Tensor | None]:
        mean, self.state = self.run(self.laid_out(filled(*batches)), self.state)
        return mean


ADAPTERS: dict[str, Callable[[Sync], Any]] = {
    "module": ByModule,
    "register": ByRegister,
    "value_and_grad": ByValueAndGrad,
    "jit": ByJit,
}


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


class Checked:
    """An adapter and its pipeline as a function, whose means and states must be the same."""

    def __init__(self, adapter: str, text: str) -> None:
        self.sync = fnddp.parse(text)
        self.adapter = ADAPTERS[adapter](self.sync)
        self.state = self.sync.init(filled())

    def step(self, *batches: Grads) -> dict[str, Tensor | None]:
        got = self.adapter.step(*batches)  # first: a module whose backward failed reports it in forward
        want, self.state = self.sync(filled(*batches), self.state)
        for name, mean in want.items():
            is_none = mean is None
            if self.adapter.keeps_unused and mean is not None and not mean.any():  # but for what memory has left
                is_none = not any(name in each for each in gather(sorted(batches[0])))
            assert bits([got[name]]) == bits([None if is_none else mean]), name
            assert is_none or got[name].stride() == torch.empty_like(got[name]).stride()  # dense
        assert bits(self.adapter.state) == bits(self.state)
        return got


def run(n: int, adapter: str, gloo: Callable[..., list], check: Callable[..., Any], *given: Any) -> None:
    """Run `check` on threads, which add up in the order of ranks: the bits are the same on more than two, too."""
    (gloo if adapter == "register" else run_threads)(n, check, adapter, *given)  # torch's reducer is not for threads


def every(pipelines: Iterable[str]) -> Any:
    """Each adapter with each pipeline, and in the first ring with every other one."""
    pairs = [
        pytest.param(adapter, PIPELINES[name], id=f"{adapter}-{name}", marks=[pytest.mark.thorough] * ((i + j) % 2))
        for i, adapter in enumerate(ADAPTERS)
        for j, name in enumerate(pipelines)
    ]
    return pytest.mark.parametrize(("adapter", "text"), pairs)


def check_steps(rank: int, adapter: str, text: str) -> None:
    checked, held = Checked(adapter, text), []
    for step in range(6):
        micro = [gradients(rank, step)] if step < 3 else [gradients(rank, step), gradients(rank, step + 3)]
        mean = checked.step(*micro)
        if step in (1, 3):
            held += [(kept, bits(kept)) for kept in (mean, checked.adapter.state)]
        elif mean["vector"] is not None:  # a part of it alone
            part = mean["vector"][3:5]
            held.append((part, bits(part)))
        del mean
    assert all(bits(value) == before for value, before in held)


@pytest.mark.parametrize("n", [1, 3])
@every(PIPELINES)
def test_means_and_states_are_those_of_the_pipeline(gloo, adapter, text, n):
    run(min(n, 2) if adapter == "register" else n, adapter, gloo, check_steps, text)


@pytest.mark.thorough
@pytest.mark.parametrize("adapter", ["module", "register"])
@on_ranks(4)
def test_over_the_group_of_the_model(rank: int, adapter: str) -> None:
    pairs, sync = [dist.new_group([0, 1]), dist.new_group([2, 3])], fnddp.parse(PIPELINES["memory"])
    mine = pairs[rank // 2]
    if adapter == "module":
        model: Any = fnddp.DistributedDataParallel(Given(), process_group=mine, sync=sync)
        over = model.sync
    else:
        model = TorchDDP(Given(), process_group=mine)
        over = fnddp.register(model, sync).sync
    assert over == sync.over(mine) != sync
    assert fnddp.all_reduce(group=dist.group.WORLD) == fnddp.allreduce
    model(filled(gradients(rank, 0))).backward()
    everyone = gather(bits([p.grad for p in model.parameters()]))
    assert everyone[0] == everyone[1] != everyone[2] == everyone[3]
