"""The names of a plan's values, for its readers."""

from typing import Any

from fnddp.ir import program
from fnddp.ir.program import Collective, Name, Operation, Segment

PREFIX = "fnddp "  # of everything on a profiler's clock


def text(path: str) -> str:
    """Return a leaf path on one line."""
    return path if path and path.isprintable() else repr(path)


def name(of: Name) -> str:
    """Return the name of a value, such as `grads[weight]` or, for a payload of a collective or its result, `c0[1]`."""
    match of:
        case program.Grad(path):
            return f"grads[{text(path)}]"
        case program.Part(index):
            return f"state[{index}]"
        case program.Divisor(group):
            return "ranks" if group is None else f"ranks of {group}"
        case program.Sent(collective, position) | program.Received(collective, position):
            return f"c{collective}[{position}]"
        case program.Span(collective, first, last):
            return f"c{collective}[{first}..{last}]"
        case program.Mean(path):
            return f"mean[{text(path)}]"
        case program.Scratch():
            return "scratch"
        case program.Held(own) | program.Temp(own):
            return own


def line(operation: Operation) -> str:
    """Return an operation: its result, its arguments, and where the result is stored."""
    made = name(operation.made)
    more = f", and {operation.count - 1} more" if operation.count > 1 else ""
    if operation.spec is None and operation.function == "copy":
        return f"{made} = {_argument(operation.arguments[0])}{more}"
    arguments = [_argument(argument) for argument in operation.arguments]
    arguments += [f"{key}={_argument(argument)}" for key, argument in operation.options]
    spec = "" if operation.spec is None else f": {operation.spec}"
    place = "" if operation.written is None else f" in {name(operation.written)}"
    return f"{made}{spec} = {operation.function}({', '.join(arguments)}){place}{more}"


def dtype(collective: Collective) -> str:
    """Return the dtype of the payloads, as in "float16"; several dtypes are bytes."""
    dtypes = {payload.dtype for payload in collective.payloads}
    return "bytes" if len(dtypes) > 1 else str(dtypes.pop()).removeprefix("torch.")


def range_of(segment: Segment) -> str:
    """Return the name of a segment on a profiler's clock, as in "slot 0 encode"."""
    return f"slot {segment.slot} {'decode' if segment.commits else 'encode'}"


def _argument(argument: Any) -> str:
    if isinstance(argument, Name):
        return name(argument)
    if isinstance(argument, list):
        return f"[{', '.join(map(_argument, argument))}]"
    return str(argument).replace("torch.", "")
