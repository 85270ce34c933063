"""Plans on a CUDA device: the same bits as the pipelines themselves, from a side stream, without a wait on the host.

Nothing here waits for the device before the end of a test, so that a stream that does not wait for another shows.
"""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import fnddp
from fnddp import Sync
from fnddp.core import tree
from fnddp.laws import bits, engine_step, make_engine
from fnddp.plan.draft import Donation
from tests.gpu.nccl import on, run_nccl
from tests.pipelines import EXAMPLES, grads

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

STEPS = 6
CYCLES = 2_000_000  # about a millisecond, in which the host and the side stream run ahead of the main stream


def copied(value: Any) -> Any:
    """A copy that is made late, of memory that may be given back to its owner before."""
    torch.cuda._sleep(CYCLES)
    return tree.map_tensors(Tensor.clone, value)


# NCCL reduces every dtype of both trees: integers and bools travel as int64, complex numbers as pairs of real ones.
def check_law_6(rank: int, texts: list[str]) -> None:
    order = random.Random(rank)
    for text in texts:
        sync = fnddp.parse(text)
        for name in ["model"] if "*weight" in text else ["model", "mixed"]:
            example = on("cuda", grads(name, rank))
            engine = make_engine(sync, example, Donation("yes", True), learns_order=True)
            expected = sync.init(example)
            state = copy.deepcopy(expected)
            want, got = [], []
            for step in range(STEPS):
                mine = on("cuda", grads(name, rank, step))
                mean, expected = sync(mine, expected)
                want.append((tree.flatten(mean)[0], expected))
                mean, _ = engine_step(engine, state, mine, order)
                state = engine.state
                got.append(copied((mean, state)))
            assert engine.plan is not None
            for step in range(STEPS):
                assert bits(got[step][0]) == bits(want[step][0]), f"{text} on {name}, mean of step {step}"
                assert bits(got[step][1]) == bits(want[step][1]), f"{text} on {name}, state after step {step}"


@pytest.mark.parametrize("n", [1, 2])
def test_law_6_over_nccl(n):
    run_nccl(n, check_law_6, list(EXAMPLES.values()))


def module_of(model: nn.Module, sync: Sync) -> tuple[nn.Module, Callable[[], Any]]:
    ddp = fnddp.DistributedDataParallel(model, bucket_cap_mb=0.1, sync=sync)
    return ddp, lambda: ddp.sync_state


def registered(model: nn.Module, sync: Sync) -> tuple[nn.Module, Callable[[], Any]]:
    ddp = DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=0.1)
    handle = fnddp.register(ddp, sync)
    return ddp, lambda: handle.state


def check_training(rank: int, wrap: Callable[[nn.Module, Sync], Any], texts: list[str]) -> None:
    for text in texts:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)]).cuda()
        twin = copy.deepcopy(model)
        sync = fnddp.parse(text)
        wrapped, state_of = wrap(model, sync)
        params = {name: p.detach().clone() for name, p in twin.named_parameters()}
        state = sync.init(params)

        def loss(params: dict[str, Tensor], x: Tensor, twin: nn.Module = twin) -> Tensor:
            return torch.func.functional_call(twin, params, (x,)).square().mean()

        generator = torch.Generator().manual_seed(rank)
        want, got = [], []
        for _ in range(STEPS):
            x = torch.randn(64, 256, generator=generator).cuda()
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
def test_training_over_nccl(wrap, n):
    run_nccl(n, check_training, wrap, TRAINED)


def check_shared_gradients() -> None:
    """Gradients that are views of what the rest of backward still reads are not written over."""
    sync = fnddp.parse("error_feedback(fp16(allreduce))")
    params = {name: torch.randn(512, 512, device="cuda") for name in ("first", "position")}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return ((x @ params["first"])[None] + params["position"][None]).square().sum()

    step = fnddp.value_and_grad(loss, sync)
    state = expected = sync.init(params)
    for _ in range(STEPS):
        x = torch.randn(512, 512, device="cuda")
        mean, expected = sync(torch.func.grad(loss)(params, x), expected)
        _, got, state = step(params, state, x)
        assert bits(got) == bits(mean)


def test_shared_gradients_over_nccl():
    run_nccl(1, _without_rank, check_shared_gradients)


def _without_rank(rank: int, fn: Callable[[], None]) -> None:
    fn()


def check_failure(rank: int) -> None:
    """Who fails cannot tell the others in time, so it refuses to go on without them."""
    sync = fnddp.error_feedback(fnddp.fp16(fnddp.allreduce))
    example = on("cuda", grads("model", rank))
    engine = make_engine(sync, example, Donation("yes", True))
    engine_step(engine, sync.init(example), example, random.Random(rank))
    state = engine.state
    if rank == 1:
        engine.begin(state)
        engine.fail(RuntimeError("out of luck"))
        with pytest.raises(RuntimeError, match="out of luck"):
            engine.begin(state)
    else:
        engine_step(engine, state, example, random.Random(rank))
    torch.cuda.synchronize()


def test_a_rank_that_failed_refuses_further_steps():
    run_nccl(2, check_failure)


SYNCHRONIZATIONS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}


def check_overlap(rank: int, text: str, folder: str) -> None:
    model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(8)]).cuda()
    ddp = fnddp.DistributedDataParallel(model, sync=fnddp.parse(text))
    engine: Any = ddp._steps.engine
    for method in ("start", "feed", "finish"):
        setattr(engine, method, named(f"engine.{method}", getattr(engine, method)))
    x = torch.randn(512, 4096, device="cuda")

    def step() -> None:
        ddp.zero_grad()
        ddp(x).square().mean().backward()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(4):
            step()
        torch.cuda.synchronize()
    path = Path(folder) / f"{rank}.json"
    profiler.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    if dist.get_world_size() > 1:  # alone NCCL has nothing to do
        assert overlapping(events), "no NCCL kernel ran while another stream computed"
    assert synchronizations(events) == []


def named(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        with record_function(name):
            return method(*arguments, **options)

    return call


def within(event: dict[str, Any], outer: dict[str, Any]) -> bool:
    return event["tid"] == outer["tid"] and outer["ts"] <= event["ts"] <= outer["ts"] + outer["dur"]


def overlapping(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of an NCCL kernel and another one, on another stream at the same time."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    nccl = [kernel for kernel in kernels if "nccl" in kernel["name"].lower()]
    return [
        (one["name"], other["name"])
        for one in nccl
        for other in kernels
        if "nccl" not in other["name"].lower()
        and one["args"]["stream"] != other["args"]["stream"]
        and max(one["ts"], other["ts"]) < min(one["ts"] + one["dur"], other["ts"] + other["dur"])
    ]


def synchronizations(events: list[dict[str, Any]]) -> list[str]:
    """What the host waited for within the engine. What NCCL calls by itself is not ours."""
    ours = [event for event in events if event["name"].startswith("engine.") and event.get("cat") == "user_annotation"]
    nccl = [event for event in events if event["name"].startswith(("c10d::", "record_param_comms"))]
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    inside = [call for call in calls if any(within(call, outer) for outer in ours)]
    assert inside, "the engine has launched nothing: the trace is not what this test takes it for"
    return [
        call["name"] for call in inside if call["name"] in SYNCHRONIZATIONS and not any(within(call, n) for n in nccl)
    ]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("text", ["allreduce", "fp16(allreduce)", "error_feedback(powersgd(allreduce, rank=4))"])
def test_collectives_run_behind_backward(tmp_path, text, n):
    run_nccl(n, check_overlap, text, str(tmp_path))
