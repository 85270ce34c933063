"""A predicted step as a trace, as torch's profiler would have recorded it, with a track for the wire."""

import json
from typing import Any

from fnddp.cost.step import Span, Step
from fnddp.ir.schedule import Schedule
from fnddp.show.names import PREFIX, range_of
from fnddp.show.text import collective

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
    is_wire = span.does == "wire"
    name, about = _described(plan, step, span)
    return {
        "ph": "X",
        "name": name,
        "cat": "wire" if is_wire else "compute",
        "pid": PROCESS,
        "tid": WIRE if is_wire else COMPUTE,
        "ts": round(span.begin * 1e6, 3),
        "dur": round(span.seconds * 1e6, 3),
        "args": about,
    }


def _described(plan: Schedule, step: Step, span: Span) -> tuple[str, dict[str, Any]]:
    if span.does in ("forward", "backward"):
        return span.does, {}
    if span.does == "segment":
        segment = plan.segments[span.index]
        about = {"needs": segment.needs, "waits": [f"c{index}" for index in segment.waits]}
        return PREFIX + range_of(segment), {**about, "operations": len(segment.operations)}
    c, cost = plan.collectives[span.index], step.collectives[span.index]
    if span.does != "wire":
        return f"{PREFIX}{c.name} {span.does}", {}
    about = {"does": collective(c, plan), "wire_bytes": cost.wire_bytes, "link_bytes": cost.link_bytes}
    return f"{PREFIX}{c.name} {c.kind.name}", about
