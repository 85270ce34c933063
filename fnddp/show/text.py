"""A plan as text: like a jaxpr, with a schedule; and the names of its values."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from fnddp.core.codec import Codec
from fnddp.core.sync import all_in
from fnddp.core.table import Cut, Table
from fnddp.core.tree import ordered
from fnddp.ir import program
from fnddp.ir.plan_data import PlanData
from fnddp.ir.program import Collective, Name, Operation, Segment
from fnddp.reducers.carriers import two_shot_mean
from fnddp.reducers.halves import to_all, to_owners
from fnddp.transforms.cast import cast
from fnddp.transforms.memory import error_feedback
from fnddp.transforms.weighted import weighted
from fnddp.wire.kinds import ALL_REDUCE

PREFIX = "fnddp "  # of all names in a profiler's trace
MOST_PARTS = 24  # listed in a table of owners


def text(path: str) -> str:
    """Return a leaf path on one line."""
    return path if path and path.isprintable() else repr(path)


def name(of: Name) -> str:
    """Return the name of a value, such as `grads[weight]` or, for a payload of a collective or its result, `c0[1]`."""
    match of:
        case program.Grad(path):
            return f"grads[{text(path)}]"
        case program.StatePart(index):
            return f"state[{index}]"
        case program.Divisor(group):
            return "ranks" if group is None else f"ranks of {group}"
        case program.StepWeight():
            return "weight"
        case program.FoundNonfinite():
            return "nonfinite"
        case program.Sent(collective, position) | program.Received(collective, position):
            return f"c{collective}[{position}]"
        case program.PayloadRange(collective, first, last):
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
    if operation.leaves:
        read = "".join(f" from {argument}" for argument in arguments)
        of = count(operation.leaves, *(("part",) if operation.function == "keep" else ("leaf", "leaves")))
        return f"{operation.function} of {of}{read} -> {made}"
    arguments += [f"{key}={_argument(argument)}" for key, argument in operation.options]
    spec = "" if operation.spec is None else f": {operation.spec}"
    place = "" if operation.written is None else f" in {name(operation.written)}"
    return f"{made}{spec} = {operation.function}({', '.join(arguments)}){place}{more}"


def dtype(collective: Collective) -> str:
    """Return the dtype of the payloads, as in "float16"; several dtypes are bytes."""
    dtypes = {payload.dtype for payload in collective.payloads}
    return "bytes" if len(dtypes) > 1 else str(dtypes.pop()).removeprefix("torch.")


def range_of(segment: Segment) -> str:
    """Return the name of a segment in a profiler's trace, as in "slot 0 encode"."""
    return f"slot {segment.slot} {'decode' if segment.commits else 'encode'}"


def _argument(argument: Any) -> str:
    if isinstance(argument, Name):
        return name(argument)
    if isinstance(argument, list):
        return f"[{', '.join(map(_argument, argument))}]"
    return str(argument).replace("torch.", "")


def _runs(plan: PlanData, *, merged: bool) -> Iterator[list[Segment]]:
    """Yield the segments of a plan; if `merged`, those of the same slot and kind together, up to a collective."""
    alike: list[Segment] = []
    for segment, following in zip(plan.segments, [*plan.segments[1:], None], strict=False):
        alike.append(segment)
        if not merged or segment.launches is not None or following is None or _look(segment) != _look(following):
            yield alike
            alike = []


def _look(segment: Segment) -> tuple[int, str]:
    return segment.slot, "decode" if segment.commits else "decode, encode" if segment.waits else "encode"


def show(plan: PlanData, code: bool = False) -> str:
    """See `Plan.show`."""
    lines, collectives = [*header(plan), *owners_of_rows(plan)], plan.collectives
    for slot, of_slot in groupby(_runs(plan, merged=not code), key=lambda run: run[0].slot):
        lines += ["", f"slot {slot}"]
        for run in of_slot:
            needs = [text(path) for segment in run for path in segment.needs]
            waits = [collectives[index].name for segment in run for index in segment.waits]
            when = [f"need {some(needs, 'gradients')}"] if needs else []
            when += [f"wait {', '.join(waits)}"] if waits else []
            kind, operations = _look(run[0])[1], [operation for segment in run for operation in segment.operations]
            lines.append(f"  {', '.join(when)}{': ' if when else ''}{kind}, {count(len(operations), 'operation')}")
            lines += [f"      {line(operation)}" for operation in operations if code]
            if run[-1].launches is not None:
                lines.append(f"    send {collective(run[-1].launches, plan)}")
    return "\n".join([*lines, "", *footer(plan)])


def header(plan: PlanData) -> list[str]:
    """Return the pipeline, and the leaves and ranks that it was lowered for."""
    nbytes = sum(leaf.nbytes for leaf in plan.leaves.values())
    sizes = {c.group: c.world_size for c in plan.collectives}
    buckets = len(set(plan.buckets.values()))
    return [
        repr(plan.sync),
        f"{count(len(plan.leaves), 'leaf', 'leaves')}, {count(_parameters(plan), 'parameter')}, {size(nbytes)}, "
        f"{count(buckets, 'bucket')}; {', '.join(_ranks(n, name) for name, n in sizes.items()) or 'no collectives'}"
        f"{'' if plan.backend is None else f'; run by {plan.backend}'}",
    ]


def owners_of_rows(plan: PlanData) -> list[str]:
    """Return a table of each bucket of leaves with owners: the elements in each rank's row.

    For chunks of leaves (`two_shot`) there are tables only if they are short, as all chunks of a leaf look the same.
    """
    found = [each.owners for each in all_in(plan.sync) if isinstance(each, to_owners | to_all) and each.owners]
    inner, n = plan.sync, max((collective.world_size for collective in plan.collectives), default=1)
    while isinstance(inner, Codec | cast | error_feedback | weighted):  # which keep the leaves of a gradient apart
        inner = inner.inner
    is_short = isinstance(inner, two_shot_mean) and n > 1 and n * len(plan.leaves) <= MOST_PARTS
    lines: list[str] = []
    for bucket in dict.fromkeys(plan.buckets.values()) if found or is_short else ():
        leaves = {path: leaf for path, leaf in ordered(plan.leaves).items() if plan.buckets[path] == bucket}
        floats = {path: each for path, each in leaves.items() if each.dtype.is_floating_point or each.dtype.is_complex}
        sizes = {path: each.shape.numel() * (2 if each.dtype.is_complex else 1) for path, each in floats.items()}
        chunks = Table(n, {path: Cut(size, -(-size // n)) for path, size in sizes.items()})
        table = found[0].table({path: each.dtype.is_complex for path, each in floats.items()}) if found else chunks
        title, *rows = str(table).splitlines()
        more = [f"... {len(rows) - MOST_PARTS} more"] if len(rows) > MOST_PARTS else []
        listed = (title, *rows[:MOST_PARTS], *more)
        lines += ["", f"rows of owners in bucket {bucket}, in elements", *(f"  {each}" for each in listed)]
    return lines


def footer(plan: PlanData) -> list[str]:
    """Return lines on the bytes that a step sends, and on its memory."""
    plain = plain_link_bytes(plan.collectives, _parameters(plan))
    fewer = f", {plain / plan.link_bytes:.1f}x fewer than a plain mean of float32" if plain and plan.link_bytes else ""
    link = f"; on its link: {plan.link_bytes:,} B{fewer}" if plan.link_bytes else ""
    return [
        f"on the wire: {plan.wire_bytes:,} B per rank{link}",
        f"{count(plan.rounds, 'round')}, {count(len(plan.collectives), 'collective')}; "
        f"peak extra memory {size(plan.peak_bytes)}",
        *([f"CUDA graphs: {plan.uncapturable}"] if plan.uncapturable else []),
    ]


def plain_link_bytes(collectives: Iterable[Collective], elements: int) -> int:
    """Return the link bytes of a plain mean of float32 over the group of `collectives`; 0 for none or several."""
    ranks = {collective.group: collective.world_size for collective in collectives}
    return math.ceil(ALL_REDUCE.link_bytes(4 * elements, *ranks.values())) if len(ranks) == 1 else 0


def collective(c: Collective, plan: PlanData) -> str:
    """Return a line about `c`: its kind, its bytes, its ranks, and when it runs."""
    labels, kind = [text(payload.label) for payload in c.payloads], dtype(c)
    does = f"{c.kind.name}{'' if c.op is None else f' {c.op}'} {kind}"
    when = f"round {c.depth + 1} of {plan.rounds}" if c.depth >= 0 else "ahead of gradients"
    return (
        f"{c.name}: {does}[{c.wire_bytes if kind == 'bytes' else c.numel}] over {_ranks(c.world_size, c.group)}, "
        f"{c.wire_bytes:,} B, {when}: {some(labels, 'payloads')}"
    )


def _ranks(n: int, group: str | None) -> str:
    return f"{count(n, 'rank')}{'' if group is None else f' in group {group}'}"


def _parameters(plan: PlanData) -> int:
    return sum(leaf.shape.numel() for leaf in plan.leaves.values())


def some(names: Sequence[str], what: str) -> str:
    """Return all of a few names, or the first of many."""
    return ", ".join(names if len(names) <= 4 else [*names[:2], f"... {len(names)} {what}"])


def count(n: int, one: str, many: str = "") -> str:
    """Return `n` and the noun, in the plural if it is not one."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def size(nbytes: int) -> str:
    """Return bytes, in KiB or MiB if they are many."""
    if nbytes < 10 * 2**10:
        return f"{nbytes:,} B"
    return f"{nbytes / 2**10:.1f} KiB" if nbytes < 2**20 else f"{nbytes / 2**20:,.1f} MiB"
