"""Statistics of an engine's last step, as numbers to log."""

import math
from typing import Any, TypedDict

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.sync import State
from fnddp.cost.estimate import estimate
from fnddp.cost.link import Link
from fnddp.run.engine import Engine
from fnddp.transforms.memory import widened


class SyncStats(TypedDict):
    """The result of `DistributedDataParallel.sync_stats` and `Handle.sync_stats`. Unknown values are None.

    Attributes:
        steps: Number of steps that have succeeded so far.
        failed_steps: Number of steps that have failed on all ranks so far.
        wire_bytes: Bytes that this rank passed to the plan's collectives in the last step. The 8 bytes of a weight and
            the vote (a byte for each leaf) are not included.
        link_bytes: Bytes that this rank sent over its link for these collectives, in rings.
        collectives: Number of these collectives.
        encode_seconds: Time of computation before the last collective of the step was issued.
        decode_seconds: Time of computation after that.
        exposed_seconds: Time of waiting for collectives without computing.
        residual_norm: Norm of this rank's residuals in `error_feedback`, over all leaves; None without residuals.
    """

    steps: int
    failed_steps: int
    wire_bytes: int | None
    link_bytes: int | None
    collectives: int | None
    encode_seconds: float | None
    decode_seconds: float | None
    exposed_seconds: float | None
    residual_norm: float | None


def stats(engine: Engine, state: State) -> SyncStats:
    """Return the statistics of `engine` in `state`. The first call starts to measure steps, and returns no times."""
    taken, plan = engine.taken(), engine.plan
    residuals = _fields(widened(state), "residual")
    return {
        "steps": engine.steps,
        "failed_steps": engine.failed_steps,
        "wire_bytes": None if plan is None else plan.wire_bytes,
        "link_bytes": None if plan is None else estimate(plan.collectives, Link(math.inf)).link_bytes,
        "collectives": None if plan is None else len(plan.collectives),
        "encode_seconds": None if taken is None else taken.encode_seconds,
        "decode_seconds": None if taken is None else taken.decode_seconds,
        "exposed_seconds": None if taken is None else taken.exposed_seconds,
        "residual_norm": _norm(residuals) if residuals else None,
    }


def _fields(state: State, name: str) -> list[Any]:
    """Return the values of the field `name` in all named tuples in `state`."""
    if isinstance(state, tuple):
        own = [getattr(state, name)] if name in getattr(state, "_fields", ()) else []
        return own + [found for part in state for found in _fields(part, name)]
    parts = list(state.values()) if isinstance(state, dict) else state if isinstance(state, list) else []
    return [found for part in parts for found in _fields(part, name)]


def _norm(residuals: list[Any]) -> float:
    leaves: list[Tensor] = [leaf for residual in residuals for leaf in tree.flatten(residual)[0].values()]
    norms = [leaf.norm().double() for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
    return float(torch.stack(norms).norm()) if norms else 0.0
