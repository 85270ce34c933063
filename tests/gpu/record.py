"""What a step does on an accelerator: its kernels and collectives, and what the host waits for.

From torch's profiler or, on the device of `tests/accelerator`, which that does not know, from its own record.
"""

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import profile, record_function, supported_activities

KINDS = {"sendrecv": "alltoall"}  # names of NCCL's that are not those of torch


class Kernel(NamedTuple):
    """A kernel, or the collective of a backend: then with its kind, such as "allreduce"."""

    collective: str | None
    stream: int
    begin: float
    end: float

    def meets(self, other: "Kernel") -> bool:
        """Return True if both run at the same time, each on a stream of its own."""
        return self.stream != other.stream and max(self.begin, other.begin) < min(self.end, other.end)


def recorded(step: Callable[[], None]) -> tuple[list[Kernel], list[str]]:
    """Return the kernels of a step, in the order in which the host launches them, and names of the host's waits."""
    accelerator = torch.accelerator.current_accelerator()
    torch.accelerator.synchronize()
    return _by_sim(step) if accelerator is not None and accelerator.type == "sim" else _by_torch(step)


def _by_sim(step: Callable[[], None]) -> tuple[list[Kernel], list[str]]:
    from tests.accelerator import device

    waits: list[str] = []
    device.trace(True)
    device.on_wait(waits.append)
    step()
    device.on_wait(None)
    ranges = device.trace(False)
    return [Kernel(_kind("collective _*([A-Z]+)", name), *place) for name, *place in ranges], waits


def _by_torch(step: Callable[[], None]) -> tuple[list[Kernel], list[str]]:
    with profile(activities=supported_activities(), acc_events=True) as profiler:
        with record_function("one step"):
            step()
        torch.accelerator.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    calls = [event for event in events if event.get("cat", "").endswith(("_runtime", "_driver"))]
    launched = {call["args"]["correlation"]: call["ts"] for call in calls if "correlation" in call["args"]}
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert kernels, "a step has launched nothing: the trace is not what this takes it for"
    kernels.sort(key=lambda kernel: launched.get(kernel["args"]["correlation"], kernel["ts"]))
    return [
        Kernel(_kind("ccl[a-z]*_([a-z]+)", each["name"]), each["args"]["stream"], each["ts"], each["ts"] + each["dur"])
        for each in kernels
    ], _waits(events, calls)


def _kind(pattern: str, name: str) -> str | None:
    found = re.search(pattern, name, re.IGNORECASE)
    kind = None if found is None else found[1].lower()
    return None if kind is None else KINDS.get(kind, kind)


def _waits(events: list[dict[str, Any]], calls: list[dict[str, Any]]) -> list[str]:
    """Return what the host waited for within the step, on any thread. What backends call by themselves is not ours."""
    steps = [event for event in events if event["name"] == "one step" and event.get("cat") == "user_annotation"]
    theirs = [event for event in events if event["name"].startswith(("c10d::", "record_param_comms"))]
    inside = [call for call in calls if any(_during(call, step) for step in steps)]
    waits = [call for call in inside if call["name"].endswith(("Synchronize", "Memcpy"))]  # of CUDA and ROCm
    return [call["name"] for call in waits if not any(call["tid"] == c["tid"] and _during(call, c) for c in theirs)]


def _during(event: dict[str, Any], outer: dict[str, Any]) -> bool:
    return outer["ts"] <= event["ts"] <= outer["ts"] + outer["dur"]
