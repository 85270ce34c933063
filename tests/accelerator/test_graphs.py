"""The law of replay: a captured step is the eager step, to the bit, as often as it is replayed.

The device of this folder captures with the rules of CUDA's graphs: a wait of the host, pinned memory, or a wait for work
outside of the graph is an error, streams must be joined, and a replay reads and writes the memory of the capture.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp.core import tree
from fnddp.integrations.fsdp import compress_shards
from fnddp.laws import bits
from tests.accelerator.conftest import ORDERS
from tests.accelerator.test_training import mesh_of
from tests.pipelines import EXAMPLES
from tests.sharded import sharded

STEPS = 9


def small(rank: int, device: str) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    net, generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), torch.Generator().manual_seed(rank)
    return net.to(device), [torch.randn(4, 6, generator=generator).to(device) for _ in range(STEPS)]


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)


def by_the_class(rank: int, device: str, text: str) -> Any:
    net, batches = small(rank, device)
    model = fnddp.DistributedDataParallel(net, sync=fnddp.parse(text), bucket_cap_mb=0.0002)
    optimizer = sgd(net)
    weight = torch.full((), 2.0 + rank, dtype=torch.float64, device=device)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        with model.weight(weight) if model.sync.takes_weight else nullcontext():
            loss.backward()
        optimizer.step()
        return loss.detach()

    def after(i: int) -> None:
        weight.add_(i)

    return step, batches, after, lambda: [dict(net.named_parameters()), model.sync_state]


def by_register(rank: int, device: str, text: str) -> Any:
    net, batches = small(rank, device)
    model = TorchDDP(net, bucket_cap_mb=0.0002)
    handle = fnddp.register(model, fnddp.parse(text))
    optimizer = sgd(net)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, batches, None, lambda: [dict(net.named_parameters()), handle.sync_state]


def functional(rank: int, device: str, text: str, run: Callable[..., Any]) -> Any:
    net, batches = small(rank, device)
    params = {name: p.detach() for name, p in net.named_parameters()}
    sync = fnddp.parse(text)
    state = sync.init(params)

    def step(x: Tensor) -> Tensor:
        nonlocal state
        loss, mean, new = run(net, sync)(params, state, x)
        for name, p in params.items():
            p.sub_(0.1 * mean[name])
        for old, part in zip(*(tree.flatten_any(s)[0] for s in (state, new)), strict=True):
            if isinstance(part, Tensor):
                old.copy_(part)
        return loss

    return step, batches, None, lambda: [params, state]


def by_value_and_grad(rank: int, device: str, text: str) -> Any:
    made = []

    def run(net: nn.Module, sync: fnddp.Sync) -> Any:
        def loss(p: Any, x: Tensor) -> Tensor:
            return torch.func.functional_call(net, p, (x,)).square().mean()

        made[:] = made or [fnddp.value_and_grad(loss, sync)]
        return made[0]

    return functional(rank, device, text, run)


def by_jit(rank: int, device: str, text: str) -> Any:
    made = []

    def run(net: nn.Module, sync: fnddp.Sync) -> Any:
        made[:] = made or [fnddp.jit(sync)]

        def step(p: Any, state: Any, x: Tensor) -> Any:
            return x.sum(), *made[0]({name: each * x.mean() for name, each in p.items()}, state)

        return step

    return functional(rank, device, text, run)


def by_owners(rank: int, device: str, text: str) -> Any:
    net, batches = small(rank, device)
    optimizer = sgd(net)
    model = fnddp.own(net, optimizer, gradients=text)

    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, batches, None, lambda: dict(net.named_parameters())


def by_shards(rank: int, device: str, text: str) -> Any:
    model = sharded(mesh_of(device, 1, 2)["shard"])
    shards = compress_shards(model, text) if text else None
    optimizer = sgd(model)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x)["out"].square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    _, batches = small(rank, device)
    found = {name: p._local_tensor for name, p in model.named_parameters()}
    return step, batches, None, lambda: [found, shards.sync_state if shards else None]


def by_torch(rank: int, device: str, text: str) -> Any:
    net, batches = small(rank, device)
    model = TorchDDP(net, bucket_cap_mb=0.0002)
    optimizer = sgd(net)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, batches, None, lambda: dict(net.named_parameters())


def train(rank: int, device: str, way: Callable[..., Any], texts: list[str], captures: bool, warmup: int = 3) -> Any:
    """The losses, parameters and states of trainings, and with `captures` the number of graphs."""
    found = {}
    for text in texts:
        with nullcontext():
            step, batches, after, read = way(rank, device, text)
        torch.accelerator.synchronize()
        run: Any = fnddp.make_graphed_callable(step, warmup) if captures else step
        losses = []
        try:
            for i, batch in enumerate(batches * (1 if warmup < 9 else 2)):
                losses.append(run(batch))
                if after is not None:
                    after(i)
            found[text] = bits([losses, read()])
        except Exception as e:
            import traceback; traceback.print_exc()
            found[text] = str(e)
        if captures:
            found[text] = found[text], len(run._graphs)
            run.release()
    return found


def go(ranks, way, texts, warmup=3):
    want = ranks(2, "side", train, way, texts, False, warmup)
    for last in ORDERS:
        got = ranks(2, last, train, way, texts, True, warmup)
        for text in texts:
            g=[x[text] for x in got]
            print(way.__name__, text, last, [(a[0] == b[text], a[1], a[0] if isinstance(a[0],str) else '') for a, b in zip(g, want)])

import os
def test_it(ranks):
    w=os.environ["W"]
    texts={"class":list(EXAMPLES.values()), "shards":["","error_feedback(quantize(two_shot, bits=4))","quantize(two_shot, bits=4, rounding='stochastic')"], "owners":["two_shot","error_feedback(quantize(two_shot, bits=4, rounding='stochastic'))"],"torch":["x"]}.get(w, ["allreduce","error_feedback(fp16(allreduce))","random_block(bf16(two_shot), block=7, unbiased=True)"])
    go(ranks, {"class":by_the_class,"register":by_register,"vg":by_value_and_grad,"jit":by_jit,"owners":by_owners,"shards":by_shards,"torch":by_torch}[w], texts, int(os.environ.get("N","3")))
