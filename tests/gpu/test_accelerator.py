"""On the accelerator that torch finds: the numbers of the CPU, and over its backend, plans and adapters.

Or on `sim`, which `tests/accelerator/test_gpu.py` makes of the CPU. Plans give the same bits as the pipelines
themselves, from a side stream, without a wait on the host. Nothing here waits for the device before the end of a test,
so that a stream that does not wait for another shows. Collected everywhere, skipped where there is no accelerator. Run
alone: `python -m pytest tests/gpu`.
"""

import copy
import faulthandler
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fnddp
from fnddp import Sync
from fnddp import device as devices
from fnddp.core import tree
from fnddp.integrations.fsdp import compress_shards
from fnddp.laws import bits, called, engine_step, make_engine
from fnddp.plan.draft import Donation
from tests.forks import forks
from tests.gpu.record import recorded
from tests.pipelines import EXAMPLES, grads

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

KIND = devices.accelerator() or "cpu"
STEPS = 6
LAYERS = 8  # each with a bucket of its own
# Of a matrix whose square takes about a millisecond, in which other streams run ahead; on `sim` they do in any case.
SIDE = 64 if KIND == "sim" else 4096
DEPTH = 3 if KIND == "sim" else 6  # of a model that trains, with a bucket for each layer
# float32 products in another order than the CPU's, three exchanges deep; half-precision leaves round once more
# float64 leaves may be scaled by a norm to which others contribute
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-7, torch.complex64: 1e-3, torch.float16: 5e-3, torch.bfloat16: 4e-2}


SECONDS = 280  # of ranks


def run_ranks(n: int, fn: Callable[..., None], *arguments: Any) -> None:
    """Run `fn(rank, *arguments)` on `n` ranks, over the accelerator's backend. On CUDA they may share one."""
    if KIND not in ("cpu", "cuda") and n > torch.accelerator.device_count():
        pytest.skip(f"{n} ranks need as many accelerators of kind {KIND}")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    method = "forkserver" if KIND == "sim" else "spawn"  # a driver does not survive a fork
    forks()
    context = mp.start_processes(_rank, args=(n, store.port, fn, arguments), nprocs=n, join=False, start_method=method)
    try:
        deadline = time.monotonic() + SECONDS
        while not context.join(timeout=max(0.0, deadline - time.monotonic())):  # one call ends with one process
            if time.monotonic() > deadline:
                raise TimeoutError(f"{n} ranks did not finish in {SECONDS} s")
    finally:
        for process in context.processes:
            process.kill()


def _rank(rank: int, n: int, port: int, fn: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    faulthandler.dump_traceback_later(SECONDS - 10)
    devices.select(KIND, rank, n)
    backend = devices.device_of(devices.current(KIND)).backend
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, rank=rank, world_size=n, store=store)
    try:
        fn(rank, *arguments)
    finally:
        dist.destroy_process_group()


def on(device: str, grads: Any) -> Any:
    return tree.map_leaves(lambda leaf: leaf.to(device), grads)


@pytest.mark.parametrize("text", EXAMPLES.values())
def test_the_accelerator_gives_what_the_cpu_gives(text):
    if text.startswith("topk("):  # whose choices lie in the device's order: rounding would take other random numbers
        text = text.replace(", rounding='stochastic'", "")
    sync = fnddp.parse(text)
    name = "model" if "weight" in text else "mixed"
    states = {device: sync.init(on(device, grads(name, 0, 0))) for device in ("cpu", KIND)}
    for step in range(3):
        means = {}
        for device in states:
            means[device], states[device] = called(sync, on(device, grads(name, 0, step)), states[device])
        for path, want in tree.flatten(means["cpu"])[0].items():
            got = tree.flatten(means[KIND])[0][path]
            assert got.device.type == KIND
            tolerance = CLOSE.get(want.dtype, 0)
            torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)


CAPTURED = 8 if KIND == "sim" else 50
README = [
    "allreduce",
    "quantize(two_shot)",
    "error_feedback(powersgd(bf16(allreduce), rank=2, min_compression_rate=0))",
]


def capture(rank: int, texts: list[str]) -> None:
    for text in texts:
        runs = []
        for captures in (False, True):
            generator = torch.Generator().manual_seed(rank)
            net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
            for p in net.parameters():
                nn.init.constant_(p, 0.1)
            model = fnddp.DistributedDataParallel(net.to(KIND), sync=text, bucket_cap_mb=0.0002)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

            def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            run: Any = fnddp.make_graphed_callable(step) if captures else step
            losses = [run(torch.randn(4, 6, generator=generator).to(KIND)) for _ in range(3 + CAPTURED)]
            runs.append(bits([losses, dict(net.named_parameters()), model.sync_state]))
            if captures:
                assert len(run._graphs) == 1
                run.release()
        assert runs[0] == runs[1], text


@pytest.mark.skipif(KIND not in ("cuda", "sim"), reason="torch captures no graphs there")
@pytest.mark.parametrize("n", [1, 2])
def test_captured_steps_have_the_bits_of_eager_ones(n):
    run_ranks(n, capture, README)


def copied(value: Any) -> Any:
    """Return a copy that is made late, of memory that may be given back to its owner before."""
    matrix = torch.ones(SIDE, SIDE, device=KIND)
    torch.mm(matrix, matrix)
    return tree.map_tensors(Tensor.clone, value)


# Backends reduce every dtype of both trees: integers and bools travel as int64, complex numbers as pairs of real ones.
def check_law_6(rank: int, texts: list[str]) -> None:
    order = random.Random(rank)
    for text in texts:
        sync = fnddp.parse(text)
        for name in ["model"] if "weight" in text else ["model", "mixed"]:
            example = on(KIND, grads(name, rank))
            engine = make_engine(sync, example, Donation("yes", True), learns_order=True)
            expected = sync.init(example)
            state = tree.map_tensors(Tensor.clone, expected)
            want, got = [], []
            for step in range(STEPS):
                mine = on(KIND, grads(name, rank, step))
                mean, expected = called(sync, mine, expected)
                want.append((tree.flatten(mean)[0], expected))
                mean = engine_step(engine, state, mine, order).mean
                state = engine.state
                got.append(copied((mean, state)))
            assert engine.plan is not None
            for step in range(STEPS):
                assert bits(got[step][0]) == bits(want[step][0]), f"{text} on {name}, mean of step {step}"
                assert bits(got[step][1]) == bits(want[step][1]), f"{text} on {name}, state after step {step}"


@pytest.mark.parametrize("n", [1, 2])
def test_law_6_over_its_backend(n):
    texts = list(EXAMPLES.values())  # of which `sim` takes others in each run: all take minutes there
    run_ranks(n, check_law_6, random.sample(texts, 2) if KIND == "sim" else texts)


def module_of(model: nn.Module, sync: Sync) -> tuple[nn.Module, Callable[[], Any]]:
    ddp = fnddp.DistributedDataParallel(model, bucket_cap_mb=0.1, sync=sync)
    return ddp, lambda: ddp.sync_state


def registered(model: nn.Module, sync: Sync) -> tuple[nn.Module, Callable[[], Any]]:
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.1, gradient_as_bucket_view=True)
    handle = fnddp.register(ddp, sync)
    return ddp, lambda: handle.sync_state


def check_training(rank: int, wrap: Callable[[nn.Module, Sync], Any], texts: list[str]) -> None:
    for text in texts:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(DEPTH)]).to(KIND)
        plain = copy.deepcopy(model)
        sync = fnddp.parse(text)
        wrapped, state_of = wrap(model, sync)
        params = {name: p.detach().clone() for name, p in plain.named_parameters()}
        state = sync.init(params)

        def loss(params: dict[str, Tensor], x: Tensor, plain: nn.Module = plain) -> Tensor:
            return torch.func.functional_call(plain, params, (x,)).square().mean()

        generator = torch.Generator().manual_seed(rank)
        want, got = [], []
        for _ in range(STEPS):
            x = torch.randn(64, 256, generator=generator).to(KIND)
            mean, state = sync(torch.func.grad(loss)(params, x), state)
            params = {name: p - 0.1 * mean[name] for name, p in params.items()}
            want.append(mean)
            wrapped.zero_grad()
            wrapped(x).square().mean().backward()
            got.append(copied({name: p.grad for name, p in model.named_parameters()}))
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p - 0.1 * p.grad)
        for step in range(STEPS):
            assert bits(got[step]) == bits(want[step]), f"{text}, step {step}"
        assert bits(state_of()) == bits(state), text
        assert bits(dict(model.named_parameters())) == bits(params), text


TRAINED = [
    "allreduce",
    "bf16(allreduce)",
    "error_feedback(powersgd(fp16(allreduce), rank=4))",
    "error_feedback(powersgd(allreduce, rank=2, orthogonalization='gram_schmidt'))",
]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("wrap", [module_of, registered])
def test_training_over_its_backend(wrap, n):
    run_ranks(n, check_training, wrap, TRAINED)


class Fails(nn.Module):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        if self.fails:
            y.register_hook(lambda _: 1 // 0)
        return y


def check_failure(rank: int) -> None:
    """The rank that fails cannot notify the others in time, so it refuses to go on without them."""
    sync = fnddp.error_feedback(fnddp.fp16(fnddp.allreduce))
    fails = Fails()
    layers = nn.Sequential(nn.Linear(64, 64), fails, nn.Linear(64, 64)).to(KIND)
    model = fnddp.DistributedDataParallel(layers, sync=sync)
    x = torch.ones(2, 64, device=KIND)
    model(x).sum().backward()
    fails.fails = rank == 1
    with pytest.raises(ZeroDivisionError) if rank == 1 else nullcontext():
        model(x).sum().backward()
    if rank == 1:
        with pytest.raises(RuntimeError, match="an earlier step failed on this rank"):
            model(x)
    devices.device_of(devices.current(KIND)).synchronize()


def test_a_rank_that_failed_refuses_further_steps():
    run_ranks(2, check_failure)


def check_failure_of_shards(rank: int, what: str) -> None:
    """A codec that fails, or a weight that one rank does not give, is told one step later: nobody waits for long."""
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(KIND)
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh(KIND, (dist.get_world_size(),)))
    shards = compress_shards(model, "weighted(quantize(two_shot))")
    x = torch.ones(2, 64, device=KIND)
    encode = fnddp.quantize.encode
    with shards.weight(3):
        model(x).sum().backward()
    if rank == 1 and what == "codec":
        answers = iter([lambda *_: 1 // 0])  # the first fails
        fnddp.quantize.encode = lambda *given: next(answers, encode)(*given)
    weight = nullcontext() if rank == 1 and what == "weight" else shards.weight(3)
    with pytest.raises((ZeroDivisionError, ValueError)) if rank == 1 else nullcontext(), weight:
        model(x).sum().backward()
    error, failed = fnddp.CollectiveError, "another rank failed in the previous step"
    if rank == 1:
        error, failed = RuntimeError, "an earlier step failed on this rank"
    with pytest.raises(error, match=failed):
        _ = shards.sync_state
    with pytest.raises(error, match=failed), shards.weight(3):
        model(x).sum().backward()
    devices.device_of(devices.current(KIND)).synchronize()


@pytest.mark.parametrize("what", ["codec", "weight"])
def test_shards_are_told_of_a_failure_one_step_later(what):
    run_ranks(2, check_failure_of_shards, what)


def check_overlap(rank: int, text: str) -> None:
    sizes = [SIDE + 8 * i for i in range(LAYERS + 1)]  # of one shape they would be multiplied together
    model = nn.Sequential(*[nn.Linear(*pair, bias=False) for pair in pairwise(sizes)]).to(KIND)
    ddp = fnddp.DistributedDataParallel(model, sync=fnddp.parse(text), bucket_cap_mb=SIDE * SIDE * 4 / 2**20)
    x = torch.randn(SIDE // 8, SIDE, device=KIND)

    def step() -> None:
        ddp.zero_grad()
        ddp(x).square().mean().backward()

    for _ in range(4):  # until the plan follows the order of gradients
        step()
    kernels, waits = recorded(step)
    if dist.get_world_size() == 1:  # alone a backend has nothing to do
        assert waits == []
        return
    assert len(waits) == 1, waits
    assert "event" in waits[0].lower()  # of the vote of the step before
    planned = ddp.plan.collectives
    collectives = [kernel for kernel in kernels if kernel.collective]
    kinds = [str(each.kind).replace("_", "") for each in planned]
    assert [each.collective for each in collectives] == [*kinds, "allgather"]  # the last is the vote
    computed = [kernel for kernel in kernels if kernel.stream == kernels[0].stream]
    begun = [each for each in kernels[: kernels.index(computed[-1])] if each.collective]
    assert {each.bucket for each in planned[: len(begun)]} == set(range(LAYERS - 1)), "not all that was there"
    assert any(one.meets(other) for one in collectives for other in computed), "none ran while backward computed"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "text",
    [
        "allreduce",
        "partition({'[0-3]*': two_shot, '*': fp16(allreduce)})",
        "error_feedback(powersgd(allreduce, rank=4))",
    ],
)
def test_collectives_run_behind_backward_in_the_order_of_the_plan(text, n):
    run_ranks(n, check_overlap, text)
