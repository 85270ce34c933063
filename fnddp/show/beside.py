"""A predicted step as torch's profiler would have recorded it, alone or in one file with a measured one."""

import json
from typing import Any

from fnddp.cost.estimate import Span, StepCost
from fnddp.ir.plan_data import PlanData
from fnddp.show.text import PREFIX, collective, range_of

STEP = "fnddp step"  # the name of a measured step on a profiler's clock
COMPUTE, WIRE = 0, 1  # tracks
PROCESS = "predicted by fnddp"  # not a number, so that no process of a measured trace has this name


def beside(measured: str, predicted: str) -> str:
    """Return two traces as one, for https://ui.perfetto.dev: the predicted step begins with the measured one.

    Args:
        measured: The export of torch's profiler of a step within `record_function(STEP)`.
        predicted: The result of `Plan.to_trace`.

    Raises:
        ValueError: The measured trace has no such range.

    >>> measured = '{"traceEvents": [{"ph": "X", "name": "fnddp step", "ts": 5.0, "dur": 2.0}]}'
    >>> predicted = '{"traceEvents": [{"ph": "X", "name": "forward", "ts": 1.0, "dur": 1.0}]}'
    >>> [(event["name"], event["ts"]) for event in json.loads(beside(measured, predicted))["traceEvents"]]
    [('fnddp step', 5.0), ('forward', 6.0)]
    """
    whole: dict[str, Any] = json.loads(measured)
    begins = [event["ts"] for event in whole["traceEvents"] if event.get("name") == STEP and event.get("ph") == "X"]
    if not begins:
        raise ValueError(f"beside: the measured trace has no range {STEP!r}; run the step in record_function({STEP!r})")
    for event in json.loads(predicted)["traceEvents"]:
        moved = {"ts": round(event["ts"] + begins[0], 3)} if "ts" in event else {}
        whole["traceEvents"].append(event | moved)
    return json.dumps(whole)


def to_trace(plan: PlanData, step: StepCost) -> str:
    """See `Plan.to_trace`."""
    titles = (("process_name", COMPUTE, f"{PROCESS}: {plan.sync!r}"),)
    titles += (("thread_name", COMPUTE, "compute"), ("thread_name", WIRE, "wire"))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": kind, "pid": PROCESS, "tid": track, "args": {"name": title}}
        for kind, track, title in titles
    ]
    events += [_event(plan, step, span) for span in step.spans if span.seconds or span.does in ("segment", "launch")]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1) + "\n"


def _event(plan: PlanData, step: StepCost, span: Span) -> dict[str, Any]:
    about: dict[str, Any] = {}
    if span.does in ("forward", "backward"):
        name = span.does
    elif span.does == "segment":
        segment = plan.segments[span.index]
        name, waits = PREFIX + range_of(segment), [f"c{index}" for index in segment.waits]
        about = {"needs": segment.needs, "waits": waits, "operations": len(segment.operations)}
    else:
        c, cost = plan.collectives[span.index], step.collectives[span.index]
        name = f"{PREFIX}{c.name} {c.kind.name if span.does == 'wire' else span.does}"
        if span.does == "wire":
            about = {"does": collective(c, plan), "wire_bytes": cost.wire_bytes, "link_bytes": cost.link_bytes}
    return {
        "ph": "X",
        "name": name,
        "cat": "wire" if span.does == "wire" else "compute",
        "pid": PROCESS,
        "tid": WIRE if span.does == "wire" else COMPUTE,
        "ts": round(span.begin * 1e6, 3),
        "dur": round(span.seconds * 1e6, 3),
        "args": about,
    }
