"""What is told of steps: `sync_stats`, and FNDDP_DEBUG, which change nothing. No time is asserted."""

import math
import re
from typing import Any
from unittest.mock import call, create_autospec

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fnddp
from fnddp import allreduce, error_feedback, fp16, powersgd
from fnddp.laws import bits
from fnddp.show import trace
from fnddp.show.beside import STEP, beside
from fnddp.simulation.ranks import run_threads
from tests.ranks import on_ranks

SYNC = error_feedback(powersgd(fp16(allreduce), rank=2, min_compression_rate=1))
TIMES = ("encode_seconds", "decode_seconds", "exposed_seconds")


def wrapped(sync: fnddp.Sync) -> fnddp.DistributedDataParallel:
    return fnddp.DistributedDataParallel(nn.Linear(24, 16), sync=sync)


def backward(model: nn.Module, scale: float = 1.0) -> None:
    (scale * model(torch.ones(4, 24))).square().mean().backward()


def test_the_norm_of_residuals_in_int8_is_near_that_in_float32() -> None:
    def norm(residual: str) -> float | None:
        torch.manual_seed(0)
        model = wrapped(error_feedback(powersgd(allreduce, rank=1, min_compression_rate=1), residual=residual))
        backward(model)
        return model.sync_stats()["residual_norm"]

    assert norm("float32") != norm("int8") == pytest.approx(norm("float32"), rel=1e-2)


@pytest.mark.parametrize("kind", ["module", "register"])
@on_ranks(2)
def test_steps_are_counted_and_measured(rank: int, kind: str) -> None:
    model: Any = wrapped(SYNC) if kind == "module" else nn.parallel.DistributedDataParallel(nn.Linear(24, 16))
    has: Any = model if kind == "module" else fnddp.register(model, SYNC)
    first = has.sync_stats()
    assert first["steps"] == first["failed_steps"] == 0
    assert [first[key] for key in ("wire_bytes", *TIMES)] == [None] * 4
    for _ in range(3):
        backward(model)
    stats = has.sync_stats()
    assert (stats["steps"], stats["failed_steps"]) == (3, 0)
    assert stats["wire_bytes"] == 2 * (2 * (24 + 16) + 16)
    assert stats["link_bytes"] == stats["wire_bytes"]  # a ring of two
    assert stats["collectives"] == 2
    assert all(stats[key] > 0 for key in TIMES)
    norm = math.sqrt(sum(leaf.double().square().sum().item() for leaf in has.sync_state.residual.values()))
    assert stats["residual_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > 0


@on_ranks(2)
def test_the_rank_that_raised_counts_the_failed_step_too(rank: int) -> None:
    model = wrapped(SYNC)
    if rank == 1:
        model.module.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError if rank == 1 else fnddp.StepFailedError):
        backward(model)
    assert model.sync_stats()["failed_steps"] == 1


def test_tensorboard_gets_what_is_known() -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard")
    model, writer = wrapped(SYNC), create_autospec(tensorboard.SummaryWriter, instance=True)
    backward(model)
    stats = fnddp.log_sync_stats(writer, model, step=7, prefix="sync/")
    known = {name: value for name, value in stats.items() if value is not None}
    assert writer.add_scalar.mock_calls == [call(f"sync/{name}", value, 7) for name, value in known.items()]
    assert "residual_norm" in known
    assert "encode_seconds" not in known


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match=f"has no range '{STEP}'"):
        beside('{"traceEvents": []}', '{"traceEvents": []}')
    assert not dist.is_initialized()


# FNDDP_DEBUG


def exchanges(rank: int, steps: int) -> list[Any]:
    step, generator = fnddp.jit(SYNC), torch.Generator().manual_seed(rank)
    grads = {"w": torch.randn(24, 32, generator=generator), "b": torch.randn(32, generator=generator)}
    state, means = step.init(grads), []
    for _ in range(steps):
        mean, state = step(grads, state)
        means.append(mean)
    return bits([means, state])


@pytest.fixture
def level(monkeypatch: pytest.MonkeyPatch):
    return lambda value: monkeypatch.setenv("FNDDP_DEBUG", value)


def test_plans_are_printed_once_and_steps_timed_on_the_first_rank_and_no_number_changes(level, capfd, monkeypatch):
    monkeypatch.setattr(trace, "FIRST", 1)
    monkeypatch.setattr(trace, "EVERY", 2)
    level("0")
    want = run_threads(2, exchanges, 4)
    assert capfd.readouterr() == ("", "")
    level("1")
    assert run_threads(2, exchanges, 4) == want
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count(f"{SYNC!r}\n") == err.count("on the wire: ") == 1
    assert "fnddp: step" not in err
    level("2")
    assert run_threads(2, exchanges, 4) == want
    err = capfd.readouterr().err
    assert re.findall(r"fnddp: step (\d+) of this plan", err) == ["1", "2", "4"]
    assert err.count("exposed tail") == 3
    table = [line for line in err.splitlines() if line.startswith(("c0 ", "c1 ")) or "compute before" in line]
    assert len(table) == 3 * 3
    assert all(len(set(map(len, table[i : i + 3]))) == 1 for i in (0, 3, 6))


def test_profiler_ranges(level, capfd):
    level("2")

    def body(rank: int) -> set[str]:
        if rank > 0:
            exchanges(rank, 1)
            return set()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            exchanges(rank, 1)
        return {event.name for event in profile.events() if event.name.startswith("fnddp ")}

    found = run_threads(2, body)[0]
    assert {"fnddp c0 launch", "fnddp c0 wait", "fnddp c1 launch", "fnddp c1 wait"} <= found
    assert {"fnddp slot 0 encode", "fnddp slot 1 encode", "fnddp slot 2 decode"} <= found


def test_debug_levels_are_read_when_an_engine_is_made(level, capfd):
    step = fnddp.jit(SYNC)
    for value, leaves, is_printed in (("0", 8, False), ("2", 8, False), ("2", 4, True)):
        level(value)
        grads = {"w": torch.ones(leaves, leaves)}
        step(grads, step.init(grads))
        assert ("slot 0" in capfd.readouterr().err) == is_printed


def test_an_unknown_level_is_an_error(level):
    level("verbose")
    step, grads = fnddp.jit(SYNC), {"w": torch.ones(8, 8)}
    with pytest.raises(ValueError, match="FNDDP_DEBUG must be 0, 1 .* got 'verbose'"):
        step(grads, step.init(grads))
