"""The host's time in a step, by purpose, as torch's profiler sees it."""

import os
from collections.abc import Iterator
from statistics import median
from typing import Any

from torch.profiler import ProfilerActivity, profile

from fnddp.cli.bench_arms import Arm

PARTS: tuple[str, ...] = ("start", "hooks", "encode", "launch", "wait", "decode", "end")
"""In the order in which they come."""

OPERATIONS = "operations"
"""Operations of aten in a step, nested ones counted, too."""

STEPS = 5
_HOOKED = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"


def profiled(arm: Arm) -> dict[str, float]:
    """Return milliseconds that a step of `arm` spends in each of PARTS, and the number of its operations: medians.

    Each is without the parts within it. "hooks" is what autograd does with the gradient of a parameter that is there,
    with all hooks on it: all of torch's own reducer, too. What a wrapper does around a step is in none of them.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13 prints that a profile starts, and ends
    steps = [_step(arm) for _ in range(STEPS)]
    return {key: median([step[key] for step in steps]) for key in (*PARTS, OPERATIONS)}


def _step(arm: Arm) -> dict[str, float]:
    arm.clear()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        arm.step()
    spent = dict.fromkeys((*PARTS, OPERATIONS), 0.0)
    for event in profiler.events() or ():
        if (part := _part(event)) is not None:
            milliseconds = event.time_range.elapsed_us() / 1e3
            spent[part] += milliseconds
            around = next(filter(None, map(_part, _parents(event))), None)
            if around is not None:
                spent[around] -= milliseconds
        spent[OPERATIONS] += event.name.startswith("aten::")
    return spent


def _part(event: Any) -> str | None:
    if event.name == _HOOKED:
        return "hooks"
    last = event.name.rpartition(" ")[2]
    return last if event.name.startswith("fnddp ") and last in PARTS else None


def _parents(event: Any) -> Iterator[Any]:
    while (event := event.cpu_parent) is not None:
        yield event
