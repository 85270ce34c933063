"""Numbers of steps: what they count, that they are of the last step, and that writers get them. No time is asserted."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fnddp
from fnddp import allreduce, error_feedback, fp16, powersgd, skip_nonfinite
from fnddp.show.beside import STEP, beside
from fnddp.simulate.ranks import run_threads
from tests.ranks import on_ranks

SYNC = error_feedback(powersgd(fp16(allreduce), rank=2, min_compression_rate=1))
TIMES = ("encode_seconds", "decode_seconds", "exposed_seconds")


def wrapped(rank: int, sync: fnddp.Sync) -> fnddp.DistributedDataParallel:
    model, generator = nn.Linear(24, 16), torch.Generator().manual_seed(rank)  # threads share the global one
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.2, 0.2, generator=generator)
    return fnddp.DistributedDataParallel(model, sync=sync)


def backward(model: nn.Module, scale: float = 1.0) -> None:
    (scale * model(torch.ones(4, 24))).square().mean().backward()


@pytest.mark.parametrize("kind", ["module", "register"])
@on_ranks(2)
def test_steps_are_counted_and_measured(rank: int, kind: str) -> None:
    if kind == "module":
        model: Any = wrapped(rank, SYNC)
        has: Any = model
    else:
        model = nn.parallel.DistributedDataParallel(nn.Linear(24, 16))
        has = fnddp.register(model, SYNC)
    first = has.sync_stats()
    assert first["steps"] == first["failed_steps"] == 0
    assert [first[key] for key in ("wire_bytes", *TIMES)] == [None] * 4
    for _ in range(3):
        backward(model)
    stats = has.sync_stats()
    assert (stats["steps"], stats["failed_steps"], stats["skipped_steps"]) == (3, 0, None)
    assert stats["wire_bytes"] == 2 * (2 * (24 + 16) + 16)
    assert stats["link_bytes"] == stats["wire_bytes"]  # a ring of two
    assert stats["collectives"] == 2
    assert all(stats[key] > 0 for key in TIMES)
    norm = math.sqrt(sum(leaf.double().square().sum().item() for leaf in has.sync_state.residual.values()))
    assert stats["residual_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > 0


@on_ranks(2)
def test_steps_that_fail_and_steps_that_are_withheld(rank: int) -> None:
    model = wrapped(rank, skip_nonfinite(fp16(allreduce)))
    backward(model)
    backward(model, math.inf if rank == 1 else 1.0)
    model.zero_grad()
    assert model.sync_stats()["skipped_steps"] == 1

    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("of this rank")

    hook = model.module.weight.register_hook(fail) if rank == 0 else None
    with pytest.raises(ZeroDivisionError if rank == 0 else fnddp.StepFailedError):
        backward(model)
    if hook is not None:
        hook.remove()
    backward(model)
    stats = model.sync_stats()
    assert (stats["steps"], stats["failed_steps"], stats["skipped_steps"]) == (3, 1, 1)


def test_measuring_changes_no_number() -> None:
    def train(rank: int, measured: bool) -> list[torch.Tensor]:
        model = wrapped(rank, SYNC)
        if measured:
            model.sync_stats()
        for _ in range(3):
            backward(model)
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    for mine, theirs in zip(run_threads(2, train, False), run_threads(2, train, True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


class Scalars(dict[str, tuple[float, int]]):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert global_step is not None
        self[tag] = scalar_value, global_step


def test_a_writer_gets_what_is_known() -> None:
    model = wrapped(0, SYNC)
    backward(model)
    writer = Scalars()
    stats = fnddp.log_sync_stats(writer, model, step=7, prefix="sync/")
    assert writer == {f"sync/{name}": (value, 7) for name, value in stats.items() if value is not None}
    assert "sync/residual_norm" in writer
    assert "sync/encode_seconds" not in writer


def test_tensorboard(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard")
    model = wrapped(0, SYNC)
    backward(model)
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        fnddp.log_sync_stats(writer, model)
    (file,) = tmp_path.iterdir()
    assert b"fnddp/residual_norm" in file.read_bytes()


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match=f"has no range '{STEP}'"):
        beside('{"traceEvents": []}', '{"traceEvents": []}')
    assert not dist.is_initialized()
