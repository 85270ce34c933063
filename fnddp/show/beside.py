"""A measured step and the predicted one in one file, from the same moment on."""

import json
from typing import Any

STEP = "fnddp step"
"""The name of a measured step on a profiler's clock."""


def beside(measured: str, predicted: str) -> str:
    """Return two traces as one, for https://ui.perfetto.dev: the predicted one is a process that begins with the step.

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
        raise ValueError(f"beside: the measured trace has no range {STEP!r}; measure within record_function({STEP!r})")
    for event in json.loads(predicted)["traceEvents"]:
        moved = {"ts": round(event["ts"] + begins[0], 3)} if "ts" in event else {}
        whole["traceEvents"].append(event | moved)
    return json.dumps(whole)
