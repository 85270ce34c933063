"""Every way to train, on a GPU: the bits of a run whose host waits for each kernel, so that no order can be wrong.

The ways are those of `tests/accelerator/test_training.py`, which compares them with the CPU on a device made of it. And
the host waits as often as `tests/accelerator/test_host_waits.py` counts there, and what Inductor makes for the device,
which that one has nothing of, gives the numbers of eager steps.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fnddp
from fnddp import device as devices
from fnddp.core.tree import flatten_any
from tests.accelerator import test_host_waits as waiting
from tests.accelerator import test_training as training
from tests.accelerator.steps import FEEDBACK, register, small
from tests.gpu.record import recorded
from tests.gpu.test_accelerator import KIND, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(KIND != "cuda", reason="needs CUDA, where a variable of the environment has the host wait"),
]

GROUPS = 5  # of ways that share ranks: to start those takes most of the time

Way = tuple[Callable[..., Any], tuple[Any, ...]]


def name_of(*way: Any) -> str:
    return " ".join(getattr(each, "__name__", str(each)) for each in way)


def here() -> str:
    return str(devices.current(KIND))


def train_all(rank: int, ways: list[Way], folder: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # which also fills new memory with NaN
    ends = {}
    for way, given in ways:
        print(f"rank {rank}: {name_of(way, *given)}", flush=True)  # where it stops
        ends[name_of(way, *given)] = way(rank, here(), *given)
    torch.save(ends, folder / f"{rank}.pt")


def trained(n: int, ways: list[Way], folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    run_ranks(n, train_all, ways, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(n)]


@pytest.mark.parametrize(
    ("n", "ways"), [*((2, training.TWO[i::GROUPS]) for i in range(GROUPS)), *((4, [way]) for way in training.FOUR)]
)
def test_the_bits_are_those_of_a_host_that_waits(monkeypatch, tmp_path, n, ways):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = trained(n, ways, tmp_path / "found")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    want = trained(n, ways, tmp_path / "want")
    for rank in range(n):
        assert [name for name in want[rank] if found[rank][name] != want[rank][name]] == [], f"rank {rank}"


# Torch's class times its own first steps, eight events in each, and waits for those.
BY_TORCH = [(register, (text,)) for text in ("", FEEDBACK)]
ROWS = [row for row in waiting.ROWS if (row[1], row[2]) not in BY_TORCH]


def count_waits(rank: int, rows: list[Any], folder: Path) -> None:
    lines = []
    for _, way, given, want in rows:
        step, _ = way(rank, here(), *given)
        batches = small(rank, here())[1]
        for each in batches[:4]:
            step(each)
        _, waits = recorded(lambda step=step, of=batches[4:6]: [step(each) for each in of])
        mine = want[rank] if isinstance(want, list) else want
        if len(waits) != 2 * sum(mine.values()):
            lines.append(f"{name_of(way, *given)} on rank {rank} waits for {waits} in two steps, not {mine} in each")
    (folder / f"{rank}.txt").write_text("\n".join(lines))


@pytest.mark.parametrize("n", [2, 4])
def test_the_host_waits_as_often_as_the_docs_say(tmp_path, n):
    run_ranks(n, count_waits, [row for row in ROWS if row[0] == n], tmp_path)
    assert "\n".join((tmp_path / f"{rank}.txt").read_text() for rank in range(n)).strip() == ""


COMPILED = ["allreduce", "error_feedback(powersgd(fp16(allreduce), rank=2))", "quantize(two_shot)", "bf16(two_shot)"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20)).to(KIND)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 30, generator=torch.Generator().manual_seed(2 * step + rank)).to(KIND)


def assert_close(got: Any, want: Any) -> None:
    """To rounding: Inductor may fuse a product and a sum. A 16-bit wire makes a step of its own of that."""
    for each, expected in zip(flatten_any(got)[0], flatten_any(want)[0], strict=True):
        if isinstance(each, Tensor):
            torch.testing.assert_close(each, expected, rtol=2e-3, atol=1e-4)


def check_inductor(rank: int, text: str) -> None:
    models = [fnddp.DistributedDataParallel(net(), sync=text, backend=backend) for backend in (None, "inductor")]
    for step in range(4):
        for model in models:
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
        assert_close(*({name: p.grad for name, p in model.module.named_parameters()} for model in models))


def check_compiled_step(rank: int, text: str) -> None:
    model, sync = net(), fnddp.parse(text)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def step(params: dict[str, Tensor], state: Any, x: Tensor) -> Any:
        grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().mean())(params)
        return sync(grads, state)

    compiled = torch.compile(step, fullgraph=True)
    ends: list[Any] = []
    for run in (step, compiled):
        state, means = sync.init(params), []
        for i in range(3):
            mean, state = run(params, state, batch(rank, i))
            means.append(mean)
        ends.append((means, state))
    assert_close(*ends)


@pytest.mark.parametrize("text", COMPILED)
@pytest.mark.parametrize("check", [check_inductor, check_compiled_step])
def test_what_inductor_makes_for_the_device_gives_the_numbers_of_eager_steps(check, text):
    run_ranks(2, check, text)
