"""The steps of a plan as its user reads them: with leaf paths, and those that look alike as one."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fnddp.plan.ir import Collective
from fnddp.plan.passes.emit import Step, buffer_name

if TYPE_CHECKING:
    from fnddp.plan.plan import Plan

_NAME = re.compile(r"mean\[\d+\]|\w+")


@dataclass(frozen=True)
class Run:
    """Steps of a slot that look alike, as one.

    Attributes:
        slot: Of all of them.
        kind: "encode" before a collective, "decode" after it, "decode, encode" between two rounds.
        needs: Leaves whose gradients must have arrived.
        waits: Collectives that must be complete.
        code: Their operations.
        launches: The collective that the last one issues.
    """

    slot: int
    kind: str
    needs: tuple[str, ...]
    waits: tuple[Collective, ...]
    code: tuple[str, ...]
    launches: Collective | None


def runs(plan: "Plan") -> Iterator[Run]:
    """The steps of a plan, with the names that its user knows."""
    paths = {name: path for path, name in plan.leaf_names.items()}
    known = {name: f"grads[{text(path)}]" for name, path in paths.items()}
    known |= {name: f"state[{i}]" for i, name in enumerate(plan.state_names)}
    known |= {name: f"mean[{text(path)}]" for name, path in plan.results.items()}
    for step, feeds in zip(plan.steps, _feeds(plan.steps), strict=True):
        kind = "decode" if not feeds else "decode, encode" if step.waits else "encode"
        needs = tuple(text(paths[name]) for name in step.needs)
        waits = tuple(plan.collectives[index] for index in step.waits)
        code = tuple(_NAME.sub(lambda found: known.get(found[0], found[0]), line) for line in step.code)
        yield Run(step.slot, kind, needs, waits, code, step.launches)


def merged(steps: Iterable[Run]) -> Iterator[Run]:
    """Runs that follow each other in a slot, of the same kind, as one; up to a collective."""
    last: Run | None = None
    for run in steps:
        if last is None:
            last = run
        elif last.launches is None and (last.slot, last.kind) == (run.slot, run.kind):
            needs, waits = (*last.needs, *run.needs), (*last.waits, *run.waits)
            last = Run(run.slot, run.kind, needs, waits, (*last.code, *run.code), run.launches)
        else:
            yield last
            last = run
    if last is not None:
        yield last


def text(path: str) -> str:
    """A leaf path on one line."""
    return path if path and path.isprintable() else repr(path)


def _feeds(steps: Sequence[Step]) -> list[bool]:
    """For each step whether a collective depends on it."""
    feeds: list[bool] = []
    needed: set[str] = set()
    pending: set[str] = set()  # parts of buffers that are sent later
    for step in reversed(steps):
        if step.launches is not None:
            pending |= {buffer_name(step.launches, i) for i in range(len(step.launches.payloads))}
        here = step.launches is not None or not needed.isdisjoint(step.outputs) or not pending.isdisjoint(step.inputs)
        needed |= set(step.inputs) - pending if here else set()
        feeds.append(here)
    return feeds[::-1]
