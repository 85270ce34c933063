"""Run segments of a plan in Python or, on request, compiled by Inductor."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from time import perf_counter
from types import FunctionType
from typing import Any, TypeAlias

import torch

from fnddp.ir.plan_data import PlanData
from fnddp.ir.program import Segment
from fnddp.wire.groups import rank

Run: TypeAlias = Callable[..., Sequence[Any]]
"""A function that returns the outputs of a segment for its inputs."""

_count = count()
_log = logging.getLogger("fnddp")


def warn(message: str, *arguments: object) -> None:
    """Log a warning on the first rank."""
    if rank(None) == 0:
        _log.warning(message, *arguments)


def segments_of(plan: PlanData) -> tuple[Segment, ...]:
    """Return the segments of `plan` in the form that its backend runs."""
    if plan.backend is None:
        return plan.segments
    compiled = sum(bool(segment.operations) for segment in plan.segments)
    seconds: dict[Run, float] = {}  # time of the first call of each segment

    def timed(run: Run) -> Run:
        by_inductor = torch.compile(_own(run), fullgraph=True)

        def run_it(*inputs: Any) -> Sequence[Any]:
            begun = perf_counter()
            outputs = by_inductor(*inputs)  # compiles the segment at the first call
            if run not in seconds:
                seconds[run] = perf_counter() - begun
                if len(seconds) == compiled:
                    warn("compiled %d segments of %r in %.1f s", compiled, plan.sync, sum(seconds.values()))
            return outputs

        return run_it

    return tuple(replace(each, run=timed(each.run)) if each.operations else each for each in plan.segments)


def _own(run: Run) -> Run:
    """Return `run` as a new function with its own code object and name.

    torch.compile limits the versions of one function, and makes sizes dynamic if they differ between versions.
    """

    def own(*given: Any) -> Sequence[Any]:
        return run(*given)

    code = own.__code__.replace(co_name=f"segment_{next(_count)}")
    return FunctionType(code, globals(), closure=own.__closure__)
