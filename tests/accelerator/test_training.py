"""Each way to train, on the device: parameters and states are those of the CPU, to the bit, in both orders of streams.

Wherever the CPU's kernels run: torch decomposes LayerNorm and fused optimizers otherwise for a device that is not the
CPU, so neither is used here.
"""

import math
import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor, nn

import fnddp
from fnddp.laws import bits
from tests.accelerator import steps as by
from tests.accelerator.conftest import ORDERS
from tests.accelerator.steps import sgd, small, trained
from tests.pipelines import nestings
from tests.ways import LOSSY, WAYS

pytestmark = pytest.mark.thorough

STEPS = 4
POWERSGD = "error_feedback(powersgd(bf16(allreduce), rank=2, min_compression_rate=0))"
QUANTIZED = "error_feedback(quantize(two_shot, bits=4, block=16))"
MIXED = f"partition({{'[!f]*': every(2, {QUANTIZED}), '*': {POWERSGD}}})"  # memories that operators keep, and others


def made(device: str, text: str = POWERSGD) -> Any:
    return WAYS["module"](text, device=device)


# What trains: each is given the rank and the device, and returns bits.


def by_a_way(rank: int, device: str, name: str, text: str) -> Any:
    """Train by a way in of tests/ways.py, clipped, later without some gradients. The host reads nothing meanwhile."""
    training = WAYS[name](text, device=device)
    for step in range(2 * STEPS):
        lacks_some = step >= STEPS and (step + rank) % 2 == 0 and not training.uses_alike
        training.backward(training.batch(rank, step, extra=None if lacks_some else 1.0))
        nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
        training.optimizer.step()
    found = training.all
    training.end()
    return found


def accumulating(rank: int, device: str) -> Any:
    """In `.grad` that is kept, and is there or not before a backward."""
    training = made(device)
    for step in range(STEPS):
        training.optimizer.zero_grad(set_to_none=step % 2 == 0)
        with training.no_sync():
            for micro in (1, 2):
                training.model(training.batch(rank, 10 * micro + step)).backward()
        training.model(training.batch(rank, step)).backward()
        training.optimizer.step()
    return training.all


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
    training = made(device, "weighted(fp16(allreduce))")
    training.model.module.first.register_forward_hook(lambda _module, _inputs, x: _SumOfGradients.apply(x))
    for step in range(STEPS):
        with training.model.weight(3 + 2 * rank + step):
            training.backward(training.batch(rank, step))
        training.optimizer.step()
    return training.all


def stream_of(device: str) -> Any:
    return nullcontext() if device == "cpu" else torch.Stream(device)


def with_the_optimizer_on_another_stream(rank: int, device: str) -> Any:
    training, side = made(device), stream_of(device)
    for step in range(STEPS):
        training.backward(training.batch(rank, step))
        if device != "cpu":
            side.wait_stream(torch.accelerator.current_stream())
        with side:
            training.optimizer.step()
        if device != "cpu":
            for p in training.model.parameters():
                p.grad.record_stream(side)
            torch.accelerator.current_stream().wait_stream(side)
    return training.all


def on_another_stream(rank: int, device: str) -> Any:
    with stream_of(device):
        return by_a_way(rank, device, "module", POWERSGD)


def reading_means_late(rank: int, device: str) -> Any:
    """Of earlier steps, while later ones run."""
    training, kept = made(device), list[Any]()
    for step in range(STEPS):
        training.backward(training.batch(rank, step))
        kept.append([p.grad for p in training.model.parameters()])
    return bits([kept, training.state])


def with_autocast_and_a_loss_scaler(rank: int, device: str, text: str) -> Any:
    """One rank overflows in one step, which changes nothing."""
    training, kind = made(device, text), device.split(":")[0]
    scaler = torch.amp.GradScaler(kind)
    for step in range(STEPS):
        training.model.zero_grad()
        with torch.autocast(kind, dtype=torch.bfloat16):
            loss = training.model(training.batch(rank, step))
        scaler.scale(loss * (math.inf if step == 1 and rank == 1 else 1.0)).backward()
        scaler.step(training.optimizer)
        scaler.update()
    assert scaler.get_scale() < 2**16
    assert all(p.isfinite().all() for p in training.model.parameters())
    return training.all, scaler.get_scale()


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


def with_two_levels(rank: int, device: str, text: str) -> Any:
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    names = {"inside": inside[rank // 2].group_name, "across": across[rank % 2].group_name}
    return by_a_way(rank, device, "module", text.format(**names))


PIPELINES = ["allreduce", POWERSGD, QUANTIZED, LOSSY]
STREAMING = "streaming_diloco(quantize(two_shot, bits=4), every=4, fragments=2, delay=3, alpha=0.5)"
WAYS_IN = [
    *product(("module",), PIPELINES),
    *product(("register", "value_and_grad", "jit"), (POWERSGD, QUANTIZED)),  # which have the same engine
    ("own", "two_shot"),
    ("own_weights", "error_feedback(quantize(two_shot, bits=4))"),
    ("compress_shards", "bf16(two_shot)"),
    *(("own_matrices", text) for text in ("allgather", "ef21(quantize(allgather, bits=4))")),
    ("diloco", "diloco(allreduce, every=3)"),
    ("streaming_diloco", STREAMING),
]
OF_WEIGHTS = "ef21(quantize(allgather, bits=4))"
LEVELS = [
    "hierarchical(error_feedback(powersgd(all_reduce('{across}'), min_compression_rate=0)), intra='{inside}')",
    "hierarchical(quantize(all_gather('{across}')), intra='{inside}')",
]
TWO: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    *((by_a_way, given) for given in WAYS_IN),
    *((each, ()) for each in (accumulating, beside_collectives_of_the_model, reading_means_late)),
    *((each, ()) for each in (with_the_optimizer_on_another_stream, on_another_stream)),
    *((with_residuals, given) for given in product((True, False), ("float32", "int8"))),
    *((with_autocast_and_a_loss_scaler, (text,)) for text in (POWERSGD, QUANTIZED, MIXED)),
    (trained, (by.the_class, (f"weighted({POWERSGD})",))),
    (trained, (by.two_models, (True, POWERSGD, QUANTIZED))),
    (trained, (by.shards, ("weighted(two_shot)",))),
    (trained, (by.shards, (QUANTIZED, OF_WEIGHTS))),
]
FOUR: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    *((trained, (by.replicas, (text, 2))) for text in (POWERSGD, QUANTIZED)),
    (trained, (by.two_axes, (QUANTIZED, LOSSY, OF_WEIGHTS))),
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


def train_small(rank: int, device: str, texts: list[str]) -> dict[str, Any]:
    return {text: trained(rank, device, by.the_class, (text,), 3) for text in texts}


def train_small_by_calls(rank: int, device: str, texts: list[str]) -> dict[str, Any]:
    """The same without a plan: the pipeline is called on gradients.

    Without those whose training ends in NaN: a step keeps its memory from them, and a call does not.
    """
    ends = {}
    for text in texts:
        net, batches = small(rank, device)
        sync, optimizer = fnddp.parse(text), sgd(net)
        state = sync.init(dict(net.named_parameters()))
        for batch in batches[:3]:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            means, state = sync({name: p.grad for name, p in net.named_parameters()}, state)
            for name, p in net.named_parameters():
                p.grad = means.get(name)
            optimizer.step()
        if all(p.isfinite().all() for p in net.parameters()):
            ends[text] = bits([dict(net.named_parameters()), state])
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
