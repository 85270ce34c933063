"""Run segments of a plan in Python or, on request, compiled by Inductor."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from types import FunctionType
from typing import Any, TypeAlias

import torch

from fnddp.ir.plan_data import PlanData
from fnddp.ir.program import Segment

Run: TypeAlias = Callable[..., Sequence[Any]]
"""A function that returns the outputs of a segment for its inputs."""

_count = count()


def segments_of(plan: PlanData) -> tuple[Segment, ...]:
    """Return the segments of `plan` in the form that its backend runs."""
    if plan.backend is None:
        return plan.segments
    return tuple(
        replace(each, run=torch.compile(_own(each.run), fullgraph=True)) if each.operations else each
        for each in plan.segments
    )


def _own(run: Run) -> Run:
    """Return `run` as a new function with its own code object and name.

    torch.compile limits the versions of one function, and makes sizes dynamic if they differ between versions.
    """

    def own(*given: Any) -> Sequence[Any]:
        return run(*given)

    code = own.__code__.replace(co_name=f"segment_{next(_count)}")
    return FunctionType(code, globals(), closure=own.__closure__)
