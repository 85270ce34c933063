"""A predicted step as a trace: what torch's profiler would have recorded, with the wire beside it."""

import json
from typing import Any

from fnddp.cost.step import Span, Step
from fnddp.ir.schedule import Schedule
from fnddp.show import names

COMPUTE, WIRE = 0, 1  # tracks
PROCESS = "predicted by fnddp"  # not a number, as torch's own tracks without a process: no measured one is called so


def to_trace(plan: Schedule, step: Step) -> str:
    """See `Plan.to_trace`."""
    titles = (("process_name", COMPUTE, f"{PROCESS}: {plan.sync!r}"),)
    titles += (("thread_name", COMPUTE, "compute"), ("thread_name", WIRE, "wire"))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": kind, "pid": PROCESS, "tid": track, "args": {"name": title}}
        for kind, track, title in titles
    ]
    events += [_event(plan, step, span) for span in step.spans if span.seconds or span.does in ("segment", "launch")]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1) + "\n"


def _event(plan: Schedule, step: Step, span: Span) -> dict[str, Any]:
    name, about = _described(plan, step, span)
    return {
        "ph": "X",
        "name": name,
        "cat": "wire" if span.does == "wire" else "compute",
        "pid": PROCESS,
        "tid": WIRE if span.does == "wire" else COMPUTE,
        "ts": _microseconds(span.begin),
        "dur": _microseconds(span.seconds),
        "args": about,
    }


def _described(plan: Schedule, step: Step, span: Span) -> tuple[str, dict[str, Any]]:
    if span.does in ("forward", "backward"):
        return span.does, {}
    if span.does == "segment":
        segment = plan.segments[span.index]
        about = {"needs": list(segment.needs), "waits": [f"c{index}" for index in segment.waits]}
        return f"{names.PREFIX}{names.range_of(segment)}", {**about, "operations": len(segment.operations)}
    collective, cost = plan.collectives[span.index], step.collectives[span.index]
    if span.does == "launch":
        return f"{names.PREFIX}{names.launch_of(collective)}", {}
    if span.does == "wait":
        return f"{names.PREFIX}{names.wait_for(collective)}", {}
    about = {
        "does": f"{names.action(collective)} {names.amount(collective)}",
        "ranks": collective.world_size,
        "round": collective.depth + 1,
        "wire_bytes": cost.wire_bytes,
        "link_bytes": cost.link_bytes,
    }
    return f"{names.PREFIX}{collective.name} {collective.kind.name}", about


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
