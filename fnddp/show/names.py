"""The names of a plan's values, as its user reads them."""

from typing import Any

from fnddp.ir.program import (
    Collective,
    Divisor,
    Grad,
    Held,
    Mean,
    Name,
    Operation,
    Part,
    Received,
    Scratch,
    Segment,
    Sent,
    Span,
    Temp,
)

PREFIX = "fnddp "  # of everything on a profiler's clock


def text(path: str) -> str:
    """A leaf path on one line."""
    return path if path and path.isprintable() else repr(path)


def name(of: Name) -> str:
    """A value: `grads[weight]`, `state[3]`, `c0[1]` (a payload of a collective, or its result), `mean[weight]`."""
    match of:
        case Grad(path):
            return f"grads[{text(path)}]"
        case Part(index):
            return f"state[{index}]"
        case Divisor(group):
            return "ranks" if group is None else f"ranks of {group}"
        case Sent(collective, position) | Received(collective, position):
            return f"c{collective}[{position}]"
        case Span(collective, first, last):
            return f"c{collective}[{first}..{last}]"
        case Mean(path):
            return f"mean[{text(path)}]"
        case Scratch():
            return "scratch"
        case Held(own) | Temp(own):
            return own


def line(operation: Operation) -> str:
    """An operation: what it makes, of what, and where that lies."""
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
    """What lies in its buffer, as in "float16"; several dtypes are bytes."""
    dtypes = {payload.dtype for payload in collective.payloads}
    return "bytes" if len(dtypes) > 1 else str(dtypes.pop()).removeprefix("torch.")


def amount(collective: Collective) -> str:
    """What it carries, as in "float16[512]"."""
    kind = dtype(collective)
    return f"{kind}[{collective.wire_bytes if kind == 'bytes' else collective.numel}]"


def action(collective: Collective) -> str:
    """What it does, as in "all_reduce sum"."""
    return collective.kind.name if collective.op is None else f"{collective.kind.name} {collective.op}"


def range_of(segment: Segment) -> str:
    """What a segment is called on a profiler's clock, as in "slot 0 encode"."""
    return f"slot {segment.slot} {'decode' if segment.commits else 'encode'}"


def launch_of(collective: Collective) -> str:
    """What issuing a collective is called there, as in "c0 launch"."""
    return f"{collective.name} launch"


def wait_for(collective: Collective) -> str:
    """What waiting for a collective is called there, as in "c0 wait"."""
    return f"{collective.name} wait"


def _argument(argument: Any) -> str:
    if isinstance(argument, Name):
        return name(argument)
    if isinstance(argument, list):
        return f"[{', '.join(map(_argument, argument))}]"
    return str(argument).replace("torch.", "")
