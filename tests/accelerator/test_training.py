"""Each way to train, on the device: parameters and states are those of the CPU, to the bit, in both orders of streams.

Wherever the CPU's kernels run: torch decomposes LayerNorm and fused optimizers otherwise for a device that is not the
CPU, so neither is used here.
"""

import math
import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor, nn

import fnddp
from fnddp.integrations.fsdp import compress, compress_replicas, compress_shards
from fnddp.laws import bits
from tests.accelerator.conftest import ORDERS
from tests.pipelines import nestings
from tests.sharded import meshes, sharded
from tests.ways import LOSSY, WAYS, Way

pytestmark = pytest.mark.thorough

STEPS = 4
POWERSGD = "error_feedback(powersgd(bf16(allreduce), rank=2, min_compression_rate=0))"
QUANTIZED = "error_feedback(quantize(two_shot, bits=4, block=16))"
MIXED = f"partition({{'[!w]*': every(2, {QUANTIZED}), '*': {POWERSGD}}})"  # memories that operators keep, and others


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Model(nn.Module):
    """Words, attention, and a layer that some ranks leave out in some steps."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(20, width), Norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.extra, self.head = nn.Linear(width, width), nn.Linear(width, 20)

    def forward(self, words: Tensor, extra: bool = True) -> Tensor:
        x = self.words(words)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
        return self.head(x + self.extra(x).tanh() if extra else x)


def made(device: str) -> Model:
    torch.manual_seed(0)
    return Model().to(device)


def loss_of(model: Callable[..., Tensor], rank: int, step: int, device: str, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    words = torch.randint(20, (4, 7), generator=generator).to(device)
    return nn.functional.cross_entropy(model(words[:, :-1], **options).flatten(0, 1), words[:, 1:].flatten())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def module(device: str, text: str = POWERSGD, **options: Any) -> fnddp.DistributedDataParallel:
    return fnddp.DistributedDataParallel(made(device), sync=fnddp.parse(text), bucket_cap_mb=0.002, **options)


def result(model: nn.Module, *states: Any) -> list[Any]:
    return bits([{name: getattr(p, "_local_tensor", p) for name, p in model.named_parameters()}, *states])


def train(
    rank: int, device: str, model: Any, around: Callable[[int], AbstractContextManager[Any]] = lambda _: nullcontext()
) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with around(step):
            loss_of(model, rank, step, device).backward()
        optimizer.step()


# What trains: each is given the rank and the device, and returns bits.


def by(rank: int, device: str, name: str, text: str) -> Any:
    """Train by a way in of tests/ways.py, later without some gradients. The host reads nothing meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Way, "device", device)
        training = WAYS[name](text)
        for step in range(2 * STEPS):
            lacks_some = step >= STEPS and (step + rank) % 2 == 0 and not training.uses_alike
            training.backward(training.batch(rank, step, extra=None if lacks_some else 1.0))
            training.optimizer.step()
        found = training.all
        training.end()
    return found


def accumulating(rank: int, device: str) -> Any:
    """In `.grad` that is kept, and is there or not before a backward."""
    model = module(device)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with model.no_sync():
            for micro in (1, 2):
                loss_of(model, rank, 10 * micro + step, device).backward()
        loss_of(model, rank, step, device).backward()
        optimizer.step()
    return result(model, model.sync_state)


def weighted(rank: int, device: str) -> Any:
    model = module(device, f"weighted({POWERSGD})")
    train(rank, device, model, lambda step: model.weight(3 + 2 * rank + step))
    return result(model, model.sync_state)


def with_two_models_in_a_backward(rank: int, device: str) -> Any:
    one, two = module(device), module(device, QUANTIZED)
    optimizers = [sgd(one), sgd(two)]
    for step in range(STEPS):
        (loss_of(one, rank, step, device) + loss_of(two, rank, step + 10, device)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [result(one, one.sync_state), result(two, two.sync_state)]


class _SumOfGradients(torch.autograd.Function):
    """The identity, whose gradient is summed over ranks within backward, as in SyncBatchNorm."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def beside_collectives_of_the_model(rank: int, device: str) -> Any:
    model = module(device, "weighted(fp16(allreduce))")
    model.module.norm.register_forward_hook(lambda _module, _inputs, x: _SumOfGradients.apply(x))
    train(rank, device, model, lambda step: model.weight(3 + 2 * rank + step))
    return result(model)


def stream_of(device: str) -> Any:
    return nullcontext() if device == "cpu" else torch.Stream(device)


def with_the_optimizer_on_another_stream(rank: int, device: str) -> Any:
    model, side = module(device), stream_of(device)
    optimizer = sgd(model)
    for step in range(STEPS):
        loss_of(model, rank, step, device).backward()
        if device != "cpu":
            side.wait_stream(torch.accelerator.current_stream())
        with side:
            optimizer.step()
        if device != "cpu":
            for p in model.parameters():
                p.grad.record_stream(side)
            torch.accelerator.current_stream().wait_stream(side)
        optimizer.zero_grad()
    return result(model, model.sync_state)


def on_another_stream(rank: int, device: str) -> Any:
    with stream_of(device):
        return by(rank, device, "module", POWERSGD)


def reading_means_late(rank: int, device: str) -> Any:
    """Of earlier steps, while later ones run."""
    model, kept = module(device), list[Any]()
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, rank, step, device).backward()
        kept.append({name: p.grad for name, p in model.named_parameters()})
    return bits([kept, model.sync_state])


def with_autocast_and_a_loss_scaler(rank: int, device: str, text: str) -> Any:
    """One rank overflows in one step, which changes nothing."""
    model = module(device, text)
    optimizer, scaler = sgd(model), torch.amp.GradScaler(device.split(":")[0])
    for step in range(STEPS):
        with torch.autocast(device.split(":")[0], dtype=torch.bfloat16):
            loss = loss_of(lambda x: model(x).float(), rank, step, device)
        scaler.scale(loss * (math.inf if step == 1 and rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found = result(model, model.sync_state, scaler.get_scale())
    assert scaler.get_scale() < 2**16
    assert all(p.isfinite().all() for p in model.parameters())
    return found


def with_residuals(rank: int, device: str, by_class: bool, residual: str = "float32") -> Any:
    """Of several dtypes and layouts, while a caller holds gradients and states; one rank overflows in one step."""
    sync = fnddp.parse(f"error_feedback(quantize(two_shot, bits=4, block=16), decay=0.9, residual={residual!r})")
    found = list[Any]()
    for dtype, shapes in product(
        (torch.float32, torch.bfloat16, torch.float64), ([(5, 7), (), (33,), (300,)], [(3, 2, 4, 4), (17,)])
    ):
        generator, run = torch.Generator().manual_seed(rank), fnddp.jit(sync)
        x = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        if len(shapes) == 2:
            x[0] = x[0].contiguous(memory_format=torch.channels_last)
        net = nn.Module()
        net.x = nn.ParameterList(map(nn.Parameter, x))
        net.forward = lambda *scales, x=net.x: sum((p * s).sum() for p, s in zip(x, scales, strict=True))
        model = fnddp.DistributedDataParallel(net, sync=sync, bucket_cap_mb=0.0005) if by_class else None
        state = sync.init(dict(net.x.named_parameters()))
        for step in range(STEPS + 2):
            scales = [torch.randn(p.shape, generator=generator).to(p) for p in net.x]
            if step == 3 and rank == 1:
                scales[-1][5] = math.nan
            if model is None:
                given = zip(net.x.named_parameters(), scales, strict=True)
                grads = {name: torch.empty_like(p).copy_(scale) for (name, p), scale in given}
                mean, state = run(grads, state)
                found += [grads, mean, state]
            else:
                model.zero_grad()
                model(*scales).backward()
                found += [[p.grad for p in net.x]]
                if step != 1:  # else the engine alone holds the state
                    found += [model.sync_state]
    return bits(found)


def train_shards(device: str, model: Any, around: Any = lambda _: nullcontext()) -> None:
    optimizer, generator = sgd(model), torch.Generator().manual_seed(5 + dist.get_rank())
    for step in range(STEPS):
        with around(step):
            x = torch.randn(4, 6, generator=generator).to(device)
            model(x)["out"].square().mean().backward()
        optimizer.step()
        model.zero_grad()


def mesh_of(device: str, *shape: int) -> Any:
    return meshes(*shape, kind=device.split(":")[0])


def with_shards(rank: int, device: str, gradients: str, weights: str | None) -> Any:
    model = sharded(mesh_of(device, 1, 2)["shard"])
    shards = compress_shards(model, gradients, weights=weights)
    train_shards(device, model)
    return result(model, shards.sync_state)


def with_weighted_shards(rank: int, device: str) -> Any:
    model = sharded(mesh_of(device, 1, 2)["shard"])
    shards = compress_shards(model, "weighted(two_shot)")
    train_shards(device, model, lambda step: shards.weight(2 + rank + step))
    return result(model, shards.sync_state)


def with_replicas(rank: int, device: str, text: str) -> Any:
    mesh = mesh_of(device, 2, 2)
    model = sharded(mesh["shard"])
    replicas = compress_replicas(model, text, mesh["replicate"])
    train_shards(device, model)
    return result(model, replicas.sync_state)


def with_two_axes(rank: int, device: str) -> Any:
    mesh = mesh_of(device, 2, 2)
    model = sharded(mesh["shard"])
    handle = compress(
        model,
        mesh,
        gradients=QUANTIZED,
        weights="ef21(quantize(allgather, bits=4))",
        replicas="error_feedback(fp16(allreduce))",
    )
    train_shards(device, model)
    return result(model, handle.sync_state)


def with_owners(rank: int, device: str, gradients: str, weights: str) -> Any:
    """Clipped through the model's parameters, whose gradients stand for those that the owners have."""
    net = made(device)
    optimizer = sgd(net)
    model = fnddp.own(net, optimizer, gradients=gradients, weights=weights)
    for step in range(STEPS):
        loss_of(model, rank, step, device).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return result(net)


def with_two_levels(rank: int, device: str, text: str) -> Any:
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    names = {"inside": inside[rank // 2].group_name, "across": across[rank % 2].group_name}
    return by(rank, device, "module", text.format(**names))


PIPELINES = ["allreduce", POWERSGD, QUANTIZED, LOSSY]
STREAMING = "streaming_diloco(quantize(two_shot, bits=4), every=4, fragments=2, delay=3, alpha=0.5)"
WAYS_IN = [
    *product(("module",), PIPELINES),
    *product(("register", "value_and_grad", "jit"), (POWERSGD, QUANTIZED)),  # which have the same engine
    ("own", "two_shot"),
    ("compress_shards", "bf16(two_shot)"),
    *(("own_matrices", text) for text in ("allgather", "ef21(quantize(allgather, bits=4))")),
    ("diloco", "diloco(allreduce, every=3)"),
    ("streaming_diloco", STREAMING),
]
LEVELS = [
    "hierarchical(error_feedback(powersgd(all_reduce('{across}'), min_compression_rate=0)), intra='{inside}')",
    "hierarchical(quantize(all_gather('{across}')), intra='{inside}')",
]
TWO: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    *((by, given) for given in WAYS_IN),
    *((each, ()) for each in (accumulating, weighted, with_two_models_in_a_backward, beside_collectives_of_the_model)),
    *((each, ()) for each in (with_the_optimizer_on_another_stream, on_another_stream, reading_means_late)),
    (with_weighted_shards, ()),
    *((with_residuals, given) for given in product((True, False), ("float32", "int8"))),
    *((with_autocast_and_a_loss_scaler, (text,)) for text in (POWERSGD, QUANTIZED, MIXED)),
    (with_shards, (QUANTIZED, "ef21(quantize(allgather, bits=4))")),
    (with_owners, ("error_feedback(quantize(two_shot, bits=4))", "ef21(quantize(allgather, bits=4))")),
]
FOUR: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (with_replicas, (POWERSGD,)),
    (with_replicas, (QUANTIZED,)),
    (with_two_axes, ()),
    *((with_two_levels, (text,)) for text in LEVELS),
]


def named(value: Any) -> str | None:
    return getattr(value, "__name__", None)


@pytest.mark.parametrize(
    ("n", "trained", "given"), [*((2, *each) for each in TWO), *((4, *each) for each in FOUR)], ids=named
)
def test_the_bits_are_the_cpus(ranks, n, trained, given):
    want = ranks(n, "cpu", trained, *given)
    for last in ORDERS:
        assert ranks(n, last, trained, *given) == want, f"{last} streams last"


# Any nesting


def sample(number: int, size: int) -> list[str]:
    drawing = settings(
        database=None, derandomize=False, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    found: dict[str, None] = {}

    @seed(number)
    @settings(drawing, max_examples=4 * size)
    @given(nestings())
    def draw(sync: fnddp.Sync) -> None:
        found.setdefault(repr(sync))

    draw()
    return random.Random(number).sample(list(found), size)


def small(rank: int, device: str) -> tuple[nn.Module, list[Tensor]]:
    """A network, and this rank's batch of each step."""
    torch.manual_seed(0)
    net, generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), torch.Generator().manual_seed(rank)
    return net.to(device), [torch.randn(4, 6, generator=generator).to(device) for _ in range(3)]


def train_small(rank: int, device: str, texts: list[str]) -> dict[str, Any]:
    ends = {}
    for text in texts:
        net, batches = small(rank, device)
        model = fnddp.DistributedDataParallel(net, sync=fnddp.parse(text), bucket_cap_mb=0.0002)
        optimizer = sgd(net)
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        ends[text] = result(net, model.sync_state)
    return ends


def train_small_by_calls(rank: int, device: str, texts: list[str]) -> dict[str, Any]:
    """The same without a plan: the pipeline is called on gradients.

    Without those whose training ends in NaN: a step keeps its memory from them, and a call does not.
    """
    ends = {}
    for text in texts:
        net, batches = small(rank, device)
        sync, optimizer = fnddp.parse(text), sgd(net)
        state = sync.init(dict(net.named_parameters()))
        for batch in batches:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            means, state = sync({name: p.grad for name, p in net.named_parameters()}, state)
            for name, p in net.named_parameters():
                p.grad = means.get(name)
            optimizer.step()
        if all(p.isfinite().all() for p in net.parameters()):
            ends[text] = result(net, state)
    return ends


def test_any_nesting_has_the_bits_of_the_cpu(ranks):
    """Of a sample of 30, as FNDDP_TEST_SEED says: another number draws another sample."""
    number = int(os.environ.get("FNDDP_TEST_SEED", "0"))
    print(f"FNDDP_TEST_SEED={number}")
    texts = sample(number, 30)
    want = ranks(2, "cpu", train_small_by_calls, texts)
    texts = list(want[0])
    assert len(texts) > 24
    for last, mine in zip(ORDERS, (texts[::2], texts[1::2]), strict=True):
        for rank, ends in enumerate(ranks(2, last, train_small, mine, seed=number)):
            different = [text for text in mine if ends[text] != want[rank][text]]
            assert different == [], f"{last} streams last, FNDDP_TEST_SEED={number}"
