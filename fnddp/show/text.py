"""A plan as text: like a jaxpr, with a schedule."""

from collections.abc import Sequence
from itertools import groupby

from fnddp.ir.program import Collective
from fnddp.ir.schedule import Schedule
from fnddp.show.names import dtype, line, text
from fnddp.show.runs import Run, runs


def show(plan: Schedule, code: bool = False) -> str:
    """See `Plan.show`."""
    lines = [*header(plan)]
    for slot, of_slot in groupby(runs(plan, merged=not code), key=lambda run: run.slot):
        lines += ["", f"slot {slot}"]
        for run in of_slot:
            when = f"{', '.join(conditions)}: " if (conditions := conditions_of(run)) else ""
            lines.append(f"  {when}{run.kind}, {count(len(run.operations), 'operation')}")
            lines += [f"      {line(operation)}" for operation in run.operations if code]
            if run.launches is not None:
                lines.append(f"    send {collective(run.launches, plan)}")
    return "\n".join([*lines, "", *footer(plan)])


def header(plan: Schedule) -> list[str]:
    """Return the pipeline, and what it was lowered for."""
    nbytes = sum(leaf.nbytes for leaf in plan.leaves.values())
    sizes = {c.group: c.world_size for c in plan.collectives}
    buckets = len(set(plan.buckets.values()))
    return [
        repr(plan.sync),
        f"{count(len(plan.leaves), 'leaf', 'leaves')}, {count(_parameters(plan), 'parameter')}, {size(nbytes)}, "
        f"{count(buckets, 'bucket')}; {', '.join(_ranks(n, name) for name, n in sizes.items()) or 'no collectives'}"
        f"{'' if plan.backend is None else f'; run by {plan.backend}'}",
    ]


def footer(plan: Schedule) -> list[str]:
    """Return what a step sends and keeps."""
    full = 4 * _parameters(plan)
    against = f"; float32 gradients: {full:,} B, {full / plan.wire_bytes:.1f}x as much" if plan.wire_bytes else ""
    return [
        f"on the wire: {plan.wire_bytes:,} B per rank{against}",
        f"{count(plan.rounds, 'round')}, {count(len(plan.collectives), 'collective')}; "
        f"peak extra memory {size(plan.peak_bytes)}",
    ]


def conditions_of(run: Run) -> list[str]:
    """Return the gradients and the collectives without which `run` does not start."""
    needs = [f"need {some([text(path) for path in run.needs], 'gradients')}"] if run.needs else []
    return needs + ([f"wait {', '.join([c.name for c in run.waits])}"] if run.waits else [])


def collective(c: Collective, plan: Schedule) -> str:
    """Return a line on what `c` does, with how much, over which ranks, and when."""
    labels, kind = [text(payload.label) for payload in c.payloads], dtype(c)
    does = f"{c.kind.name}{'' if c.op is None else f' {c.op}'} {kind}"
    return (
        f"{c.name}: {does}[{c.wire_bytes if kind == 'bytes' else c.numel}] over {_ranks(c.world_size, c.group)}, "
        f"{c.wire_bytes:,} B, round {c.depth + 1} of {plan.rounds}: {some(labels, 'payloads')}"
    )


def _ranks(n: int, group: str | None) -> str:
    return f"{count(n, 'rank')}{'' if group is None else f' in group {group}'}"


def _parameters(plan: Schedule) -> int:
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
