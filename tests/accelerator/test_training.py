"""Each way to train, on the device: the parameters and states are those of the CPU, to the bit, in both orders.

Wherever the CPU's kernels run: what torch decomposes otherwise for a device of another kind is not used here.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp.integrations.fsdp import compress_shards
from fnddp.laws import bits
from tests.accelerator.conftest import ORDERS

pytestmark = pytest.mark.thorough

STEPS = 4


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = Norm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


class Model(nn.Module):
    def __init__(self, width: int = 16, words: int = 20) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(device: str) -> Model:
    torch.manual_seed(0)
    return Model().to(device)


def batch(rank: int, step: int, device: str, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    words = torch.randint(20, (size, 9), generator=generator)
    return words[:, :-1].to(device), words[:, 1:].to(device)


def loss_of(model: Callable[[Tensor], Tensor], rank: int, step: int, device: str, size: int = 4) -> Tensor:
    x, y = batch(rank, step, device, size)
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def train(rank: int, device: str, model: Any) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step, device).backward()
        optimizer.step()


def by_module(rank: int, device: str, text: str) -> Any:
    model = fnddp.DistributedDataParallel(made(device), sync=fnddp.parse(text), bucket_cap_mb=0.003)
    train(rank, device, model)
    return bits([dict(model.module.named_parameters()), model.sync_state])


def by_register(rank: int, device: str, text: str) -> Any:
    model = TorchDDP(made(device), bucket_cap_mb=0.003, gradient_as_bucket_view=True)
    handle = fnddp.register(model, fnddp.parse(text))
    train(rank, device, model)
    return bits([dict(model.module.named_parameters()), handle.state])


def functional_loss(model: nn.Module, params: dict[str, Tensor], rank: int, step: int, device: str) -> Tensor:
    return loss_of(lambda x: torch.func.functional_call(model, params, (x,)), rank, step, device)


def by_value_and_grad(rank: int, device: str, text: str) -> Any:
    model, sync = made(device), fnddp.parse(text)
    params = {name: p.detach() for name, p in model.named_parameters()}
    run, state = fnddp.value_and_grad(lambda *given: functional_loss(model, *given), sync), sync.init(params)
    for step in range(STEPS):
        _, mean, state = run(params, state, rank, step, device)
        params = {name: p - 0.1 * mean[name] for name, p in params.items()}
    return bits([params, state])


def by_jit(rank: int, device: str, text: str) -> Any:
    model, sync = made(device), fnddp.parse(text)
    params = {name: p.detach() for name, p in model.named_parameters()}
    run, state = fnddp.jit(sync), sync.init(params)
    for step in range(STEPS):
        grads = torch.func.grad(lambda *given: functional_loss(model, *given))(params, rank, step, device)
        mean, state = run(grads, state)
        params = {name: p - 0.1 * mean[name] for name, p in params.items()}
    return bits([params, state])


WAYS = [by_module, by_register, by_value_and_grad, by_jit]
PIPELINES = [
    "allreduce",
    "error_feedback(powersgd(bf16(allreduce), rank=2, min_compression_rate=0))",
    "error_feedback(quantize(two_shot, bits=4, block=16))",
    "skip_nonfinite(error_feedback(fp16(allreduce)))",
]


def sharded(device: str, ranks: int) -> Any:
    model: Any = made(device)
    mesh = init_device_mesh(device.split(":")[0], (ranks,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model


def by_shards(rank: int, device: str, gradients: str, weights: str | None) -> Any:
    model = sharded(device, 2)
    shards = compress_shards(model, gradients, weights=weights)
    train(rank, device, model)
    return bits([{name: p.full_tensor() for name, p in model.named_parameters()}, shards.state])


SHARDS = [
    ("bf16(two_shot)", None),
    ("error_feedback(quantize(two_shot, bits=4))", "ef21(quantize(allgather, bits=4))"),
]
CASES = [
    *((way, (text,)) for way in WAYS for text in PIPELINES),
    *((by_shards, each) for each in SHARDS),
]


@pytest.mark.parametrize(("train", "given"), CASES, ids=lambda each: getattr(each, "__name__", None))
def test_the_bits_are_the_cpus(ranks, train, given):
    want = ranks(2, "cpu", train, *given)
    for last in ORDERS:
        assert ranks(2, last, train, *given) == want, f"{last} streams last"
