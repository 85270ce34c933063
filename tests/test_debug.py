"""FNDDP_DEBUG: what it prints and names, and that it changes nothing. No time is asserted."""

import re

import pytest
import torch

import fnddp
from fnddp import error_feedback, fp16, powersgd
from fnddp.laws import bits
from fnddp.show import trace as debug
from fnddp.simulate.ranks import run_threads

SYNC = error_feedback(powersgd(fp16(fnddp.allreduce), rank=2, min_compression_rate=1))
STEPS = 3


def train(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(24, 32, generator=generator), "b": torch.zeros(32)}
    step = fnddp.value_and_grad(lambda p, x: (x @ p["w"] + p["b"]).tanh().square().mean(), SYNC)
    state = SYNC.init(params)
    x = torch.randn(16, 24, generator=generator.manual_seed(rank))
    for _ in range(STEPS):
        _, grads, state = step(params, state, x)
        params = {name: param - 0.1 * grads[name] for name, param in params.items()}
    return list(params.values())


def exchanges(rank: int, steps: int) -> None:
    step, grads = fnddp.jit(SYNC), {"w": torch.ones(24, 32), "b": torch.ones(32)}
    state = step.init(grads)
    for _ in range(steps):
        _, state = step(grads, state)


@pytest.fixture
def level(monkeypatch: pytest.MonkeyPatch):
    return lambda value: monkeypatch.setenv("FNDDP_DEBUG", value)


def test_each_plan_is_printed_once_on_the_first_rank(level, capfd):
    level("1")
    run_threads(2, train)
    out, err = capfd.readouterr()
    assert out == ""
    plans = err.count(f"{SYNC!r}\n")
    assert err.count("on the wire: ") == plans
    # A second one where the gradients came in another order than expected.
    assert plans in (1, 2)
    assert "fnddp: step" not in err


def test_steps_are_timed_on_the_first_rank(level, capfd, monkeypatch):
    level("2")
    monkeypatch.setattr(debug, "FIRST", 1)
    monkeypatch.setattr(debug, "EVERY", 2)
    run_threads(2, exchanges, 4)
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


def test_numbers_are_the_same(level, capfd):
    level("0")
    want = run_threads(2, train)
    assert capfd.readouterr() == ("", "")
    for value in ("1", "2"):
        level(value)
        assert bits(run_threads(2, train)) == bits(want)


def test_it_is_read_when_an_engine_is_made(level, capfd):
    level("0")
    step, grads = fnddp.jit(SYNC), {"w": torch.ones(8, 8)}
    state = step.init(grads)
    step(grads, state)
    level("2")
    step(grads, state)
    assert capfd.readouterr().err == ""
    step({"w": torch.ones(4, 4)}, step.init({"w": torch.ones(4, 4)}))
    assert "slot 0" in capfd.readouterr().err


def test_an_unknown_level_is_an_error(level):
    level("verbose")
    step, grads = fnddp.jit(SYNC), {"w": torch.ones(8, 8)}
    with pytest.raises(ValueError, match="FNDDP_DEBUG must be 0, 1 .* got 'verbose'"):
        step(grads, step.init(grads))
