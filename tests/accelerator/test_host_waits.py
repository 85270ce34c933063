"""Where the host waits for the device between forward and the end of `optimizer.step()`: where docs/gpu.md says, only.

Counted as what a run of six steps has in addition to a run of four, whose plans are made by then.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import outer
from fnddp.integrations.fsdp import compress, compress_replicas, compress_shards
from tests.accelerator.test_training import mesh_of
from tests.sharded import sharded
from tests.streams import site

pytestmark = pytest.mark.thorough

Loss = Callable[[int], Tensor]
FEEDBACK = "error_feedback(fp16(allreduce))"
SUMS = "all_reduce(op='sum')"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, extra: bool = True) -> Tensor:
        x = self.first(x).tanh()
        return self.last(x + self.extra(x) if extra else x)


def made(device: str) -> Net:
    torch.manual_seed(0)
    return Net().to(device)


def module(device: str, text: str = FEEDBACK, **options: Any) -> fnddp.DistributedDataParallel:
    return fnddp.DistributedDataParallel(made(device), sync=fnddp.parse(text), bucket_cap_mb=0.0002, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def steps_of(
    model: nn.Module, loss: Loss, around: Any = lambda _: nullcontext(), **options: Any
) -> Callable[..., None]:
    optimizer = sgd(model)

    def step(i: int) -> None:
        optimizer.zero_grad(**options)
        with around(i):
            loss(i).backward()
        optimizer.step()

    return step


# Ways in: each is given the rank, the device and the batch, and returns a function that takes the step of that number.


def by_torch(rank: int, device: str, x: Tensor) -> Callable[[int], None]:
    model = TorchDDP(made(device))
    return steps_of(model, lambda _: model(x).square().mean())


def by_the_module(rank: int, device: str, x: Tensor, text: str) -> Callable[[int], None]:
    model = module(device, text)
    return steps_of(model, lambda _: model(x).square().mean())


def by_register(rank: int, device: str, x: Tensor, text: str) -> Callable[[int], None]:
    model = TorchDDP(made(device), bucket_cap_mb=0.0002)
    handle = fnddp.register(model, fnddp.parse(text))
    return steps_of(model, lambda _: (handle, model(x))[1].square().mean())


def by_value_and_grad(rank: int, device: str, x: Tensor, text: str) -> Callable[[int], None]:
    model, sync = made(device), fnddp.parse(text)
    params = {name: p.detach() for name, p in model.named_parameters()}
    run = fnddp.value_and_grad(lambda p: torch.func.functional_call(model, p, (x,)).square().mean(), sync)
    state = sync.init(params)

    def step(_: int) -> None:
        nonlocal params, state
        _, mean, state = run(params, state)
        params = {name: p - 0.01 * mean[name] for name, p in params.items()}

    return step


def by_jit(rank: int, device: str, x: Tensor, text: str) -> Callable[[int], None]:
    sync = fnddp.parse(text)
    params = {name: p.detach() for name, p in made(device).named_parameters()}
    run, state = fnddp.jit(sync), sync.init(params)

    def step(_: int) -> None:
        nonlocal state
        _, state = run({name: p.square() for name, p in params.items()}, state)

    return step


def with_weights(rank: int, device: str, x: Tensor) -> Callable[[int], None]:
    model = module(device, f"weighted({FEEDBACK})")
    return steps_of(model, lambda _: model(x).square().mean(), lambda i: model.weight(3 + rank + i))


def without_a_gradient(rank: int, device: str, x: Tensor) -> Callable[[int], None]:
    """On the first rank."""
    model = module(device, find_unused_parameters=True)
    return steps_of(model, lambda _: model(x, extra=rank > 0).square().mean())


def with_grads_kept(rank: int, device: str, x: Tensor, text: str) -> Callable[[int], None]:
    model = module(device, text)
    return steps_of(model, lambda _: model(x).square().mean(), set_to_none=False)


def with_a_loss_scaler(rank: int, device: str, x: Tensor, wraps: bool) -> Callable[[int], None]:
    model = module(device) if wraps else TorchDDP(made(device))
    optimizer, scaler = sgd(model), torch.amp.GradScaler(device.split(":")[0])

    def step(_: int) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def by_shards(rank: int, device: str, x: Tensor, gradients: str | None, weights: str | None) -> Callable[[int], None]:
    model = sharded(mesh_of(device, 1, 2)["shard"])
    if gradients or weights:
        compress_shards(model, gradients, weights=weights)
    return steps_of(model, lambda _: model(x)["out"].square().mean())


def by_weighted_shards(rank: int, device: str, x: Tensor) -> Callable[[int], None]:
    model = sharded(mesh_of(device, 1, 2)["shard"])
    shards = compress_shards(model, "weighted(bf16(two_shot))")
    return steps_of(model, lambda _: model(x)["out"].square().mean(), lambda i: shards.weight(2 + rank + i))


def by_replicas(rank: int, device: str, x: Tensor) -> Callable[[int], None]:
    mesh = mesh_of(device, 2, 1)
    model = sharded(mesh["shard"])
    compress_replicas(model, FEEDBACK, mesh["replicate"])
    return steps_of(model, lambda _: model(x)["out"].square().mean())


def by_both_axes(rank: int, device: str, x: Tensor) -> Callable[[int], None]:
    mesh = mesh_of(device, 2, 2)
    model = sharded(mesh["shard"])
    compress(model, mesh, gradients="error_feedback(bf16(two_shot))", weights="bf16(allgather)", replicas=FEEDBACK)
    return steps_of(model, lambda _: model(x)["out"].square().mean())


def by_outer_steps(rank: int, device: str, x: Tensor, text: str) -> Callable[[int], None]:
    model = made(device)
    optimizer = sgd(model)
    attached = outer.attach(model, optimizer, outer.parse(text))

    def local_step() -> None:
        optimizer.zero_grad()
        (attached, model(x))[1].square().mean().backward()
        optimizer.step()

    def step(_: int) -> None:
        for _ in range(4):  # of which each fragment exchanges once
            local_step()

    local_step()  # so that no exchange is under way behind four: ranks would abandon it at different points
    return step


def by_owners(rank: int, device: str, x: Tensor, weights: str, n: int) -> Callable[[int], None]:
    net = made(device)
    parameters = list(net.parameters())
    optimizers = [torch.optim.SGD(parameters[i::n], lr=0.1) for i in range(n)]
    model = fnddp.own(net, optimizers, weights=weights)

    def step(_: int) -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        for each in optimizers:
            each.step()

    return step


@contextmanager
def counting() -> Iterator[Counter[str]]:
    from tests.accelerator import device

    found: Counter[str] = Counter()

    def note(why: str) -> None:
        found.update([f"{site().split(':')[0]} {why}".strip()])

    def assign(tensor: Tensor, index: Any, value: Any) -> None:
        if not isinstance(value, Tensor) and tensor.device.type != "cpu":
            note("assignment of a number")  # which CUDA copies from the host's memory; this device does not
        torch._C.TensorBase.__setitem__(tensor, index, value)

    device.on_wait(note)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "__setitem__", assign)
            yield found
    finally:
        device.on_wait(None)


def run(rank: int, device: str, way: Callable[..., Any], given: tuple[Any, ...]) -> dict[str, float]:
    """Return how often, and where, the host waits in a step."""
    x = torch.full((4, 6), rank + 1.0).to(device)
    counts = []
    for steps in (1, 4, 6):  # functions share a lane: the first step of the second one notices the last of the first
        with counting() as found:
            step = way(rank, device, x, *given)
            for i in range(steps):
                step(i)
        counts.append(found)
    return {where: n / 2 for where, n in (counts[2] - counts[1]).items()}


NOTICE, SUM = "run/vote.py event", "run/vote.py copy to the host"  # of the vote of the step before; of this one's flags
ITEM = "item"  # of torch's own
BEFORE = {NOTICE: 1}
COMPARED = {f"wire/control.py copy {way} the host": 2 for way in ("from", "to")}  # which of several optimizers steps
TEXTS = [FEEDBACK, "error_feedback(powersgd(allreduce, rank=1, min_compression_rate=0))", "quantize(two_shot)"]
CLIPPED = "clip_by_global_norm(fp16(allreduce), max_norm=1.0)"
# Ranks, a way and its arguments, and what the host waits for in a step: on all ranks, or on each.
ROWS: list[tuple[int, Callable[..., Any], tuple[Any, ...], Any]] = [
    (2, by_torch, (), {}),
    *((2, way, (FEEDBACK,), BEFORE) for way in (by_register, by_value_and_grad, by_jit)),
    *((2, by_the_module, (text,), BEFORE) for text in [*TEXTS, CLIPPED]),
    (2, by_the_module, ("fp16(allreduce, check=True)",), {NOTICE: 1, "transforms/cast.py item": 1}),
    (2, with_weights, (), BEFORE),
    (2, without_a_gradient, (), [{SUM: 1}, {NOTICE: 1}]),
    (2, with_grads_kept, (FEEDBACK,), BEFORE),
    (2, with_grads_kept, (SUMS,), {NOTICE: 1, "adapters/module/steps.py item": 1}),
    (2, with_a_loss_scaler, (False,), {ITEM: 1}),
    (2, with_a_loss_scaler, (True,), {ITEM: 1, NOTICE: 1}),
    (2, by_shards, (None, None), {}),
    (2, by_shards, ("bf16(two_shot)", None), BEFORE),
    (2, by_shards, ("error_feedback(quantize(two_shot, bits=4))", None), BEFORE),
    (2, by_shards, (None, "ef21(fp16(allgather))"), {"integrations/fsdp/unit.py item": 4}),
    (2, by_weighted_shards, (), BEFORE),
    (2, by_replicas, (), BEFORE),
    (4, by_both_axes, (), BEFORE),
    (2, by_outer_steps, ("diloco(allreduce, every=4)",), BEFORE),
    (2, by_outer_steps, ("streaming_diloco(allreduce, every=4, fragments=2, delay=1)",), {NOTICE: 2}),  # two exchanges
    (2, by_owners, ("allgather", 1), {NOTICE: 2}),
    (2, by_owners, ("ef21(fp16(allgather))", 1), {NOTICE: 2, "core/tree.py copy to the host": 1}),
    (
        2,
        by_owners,
        ("allgather", 2),
        {NOTICE: 3, **{f"wire/control.py copy {way} the host": 2 for way in ("from", "to")}},
    ),
]


@pytest.mark.parametrize(("n", "way", "given", "want"), ROWS)
def test_the_host_waits_where_the_docs_say(ranks, n, way, given, want):
    assert ranks(n, "side", run, way, given) == (want if isinstance(want, list) else [want] * n)
