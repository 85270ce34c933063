"""A plan as text: like a jaxpr, with a schedule."""

from collections.abc import Sequence
from itertools import groupby

from fnddp.ir.program import Collective
from fnddp.ir.schedule import Schedule
from fnddp.show.names import action, amount, line, text
from fnddp.show.runs import Run, merged, runs


def show(plan: Schedule, code: bool = False) -> str:
    """See `Plan.show`."""
    shown = list(runs(plan)) if code else list(merged(runs(plan)))
    lines = [*header(plan)]
    for slot, of_slot in groupby(shown, key=lambda run: run.slot):
        lines += ["", f"slot {slot}"]
        for run in of_slot:
            lines.append(f"  {_when(run)}{run.kind}, {count(len(run.operations), 'operation')}")
            lines += [f"      {line(operation)}" for operation in run.operations if code]
            if run.launches is not None:
                lines.append(f"    send {_collective(run.launches, plan.rounds)}")
    return "\n".join([*lines, "", *footer(plan)])


def header(plan: Schedule) -> list[str]:
    """What the plan is for."""
    nbytes = sum(leaf.nbytes for leaf in plan.leaves.values())
    sizes = {c.group: c.world_size for c in plan.collectives}
    groups = [f"{count(n, 'rank')}{'' if name is None else f' in group {name}'}" for name, n in sizes.items()]
    buckets = len(set(plan.buckets.values()))
    return [
        repr(plan.sync),
        f"{count(len(plan.leaves), 'leaf', 'leaves')}, {count(parameters(plan), 'parameter')}, {size(nbytes)}, "
        f"{count(buckets, 'bucket')}; {', '.join(groups) or 'no collectives'}"
        f"{'' if plan.backend is None else f'; run by {plan.backend}'}",
    ]


def footer(plan: Schedule) -> list[str]:
    """What a step costs."""
    full = 4 * parameters(plan)
    against = f"; float32 gradients: {full:,} B, {full / plan.wire_bytes:.1f}x as much" if plan.wire_bytes else ""
    return [
        f"on the wire: {plan.wire_bytes:,} B per rank{against}",
        f"{count(plan.rounds, 'round')}, {count(len(plan.collectives), 'collective')}; "
        f"peak extra memory {size(plan.peak_bytes)}",
    ]


def _when(run: Run) -> str:
    conditions = [f"need {some([text(path) for path in run.needs], 'gradients')}"] if run.needs else []
    conditions += [f"wait {', '.join([c.name for c in run.waits])}"] if run.waits else []
    return f"{', '.join(conditions)}: " if conditions else ""


def _collective(c: Collective, rounds: int) -> str:
    within = f"{count(c.world_size, 'rank')}{'' if c.group is None else f' in group {c.group}'}"
    labels = [text(payload.label) for payload in c.payloads]
    return (
        f"{c.name}: {action(c)} {amount(c)} over {within}, {c.wire_bytes:,} B, "
        f"round {c.depth + 1} of {rounds}: {some(labels, 'payloads')}"
    )


def parameters(plan: Schedule) -> int:
    """The number of elements of all leaves."""
    return sum(leaf.shape.numel() for leaf in plan.leaves.values())


def some(names: Sequence[str], what: str) -> str:
    """All of a few names, the first of many."""
    return ", ".join(names if len(names) <= 4 else [*names[:2], f"... {len(names)} {what}"])


def count(n: int, one: str, many: str = "") -> str:
    """`n` of something."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def size(nbytes: int) -> str:
    """Bytes, in KiB or MiB if they are many."""
    if nbytes < 10 * 2**10:
        return f"{nbytes:,} B"
    return f"{nbytes / 2**10:.1f} KiB" if nbytes < 2**20 else f"{nbytes / 2**20:,.1f} MiB"
