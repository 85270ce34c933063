"""Costs of pipelines for `fnddp plan`, from their plans: a table, the plans in full, or JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import Tensor

from fnddp.cli.failures import WrongArgument
from fnddp.cli.terminal import Table, echo
from fnddp.core.state import at_step
from fnddp.core.sync import Sync
from fnddp.cost.estimate import Links, Step
from fnddp.cost.link import duration
from fnddp.plan.lower import lower, planned_world
from fnddp.plan.period import period
from fnddp.plan.plan import Plan
from fnddp.show.text import count, size
from fnddp.wire.groups import DEFAULT_GROUP, World, WorldSize, within

Costs = dict[str, Any]  # of a step, or the mean of several, as JSON has them


@dataclass(frozen=True)
class Setting:
    """The model, ranks and links that pipelines are planned for."""

    model: str
    parameters: dict[str, Tensor]  # by name, without values
    ranks: WorldSize  # of all groups, or of each
    links: dict[str, Links]  # by the text that writes them
    step: int | None  # of all counters; None for a step after all warm-ups
    backward: float | None  # seconds; None to hide nothing behind it
    bucket_cap_mb: float

    @property
    def elements(self) -> int:
        """The number of elements of all parameters."""
        return sum(p.numel() for p in self.parameters.values())

    def __str__(self) -> str:
        sizes = {None: self.ranks} if isinstance(self.ranks, int) else self.ranks
        ranks = ", ".join(f"{count(n, 'rank')}{f' in group {group}' if group else ''}" for group, n in sizes.items())
        when = "after all warm-ups" if self.step is None else f"step {self.step}"
        return (
            f"{self.model}: {self.elements:,} parameters in {count(len(self.parameters), 'leaf', 'leaves')}; "
            f"{ranks}; {when}; buckets of {self.bucket_cap_mb:g} MiB"
        )


@dataclass(frozen=True)
class Planned:
    """The plans of a pipeline in the steps of a period, and their costs."""

    text: str
    plans: tuple[Plan, ...]  # one for each phase
    phases: list[Costs]  # those that differ, each with the number of steps of a period that have them
    mean: Costs

    @property
    def busiest(self) -> Plan:
        """The plan that sends most."""
        return max(self.plans, key=lambda plan: plan.wire_bytes)


def planned(sync: Sync, setting: Setting) -> Planned:
    """Lower `sync` for ranks that need not exist."""
    ranks, cap = World(size=setting.ranks).size_of(sync.groups), setting.bucket_cap_mb
    try:
        if setting.step is None:
            repeated = period(sync, setting.parameters, world_size=ranks, bucket_cap_mb=cap)
            plans = [(each.plan, each.steps) for each in repeated]
        else:
            with within(planned_world(sync, sync.groups, ranks)):
                state = at_step(setting.step, sync.init(setting.parameters))
            plans = [(lower(sync, setting.parameters, state=state, world_size=ranks, bucket_cap_mb=cap), 1)]
    except (TypeError, ValueError) as error:  # a LoweringError is a TypeError
        raise WrongArgument.of(error) from error
    phases: dict[str, Costs] = {}
    for plan, steps in plans:
        costs = _costs(plan, setting)
        phases.setdefault(repr(costs), {"steps": 0, **costs})["steps"] += steps
    of_phases = [*phases.values()]
    return Planned(repr(sync), tuple(plan for plan, _ in plans), of_phases, _mean(of_phases, setting))


def _costs(plan: Plan, setting: Setting) -> Costs:
    backward = setting.backward or 0.0
    estimates = {text: plan.estimate(on, backward_seconds=backward) for text, on in setting.links.items()}
    return {
        "wire_bytes": plan.wire_bytes,
        "reduction": _reduction(plan.wire_bytes, setting),
        "link_bytes": next(iter(estimates.values())).link_bytes,  # the same on all links
        "collectives": len(plan.collectives),
        "rounds": plan.rounds,
        "peak_bytes": plan.peak_bytes or None,  # never 0 bytes: the means are among them
        "links": {text: _times(step, setting) for text, step in estimates.items()},
    }


def _times(step: Step, setting: Setting) -> dict[str, float]:
    times = {"communication_seconds": step.communication_seconds}
    if setting.backward is not None:
        times |= {"step_seconds": step.seconds, "exposed_seconds": step.exposed_seconds}
    return times


def _mean(phases: Sequence[Costs], setting: Setting) -> Costs:
    """Return the mean of bytes and times, and the maximum of rounds and memory."""

    def mean(values: Iterable[float]) -> float:
        return fmean(values, [each["steps"] for each in phases]) if len(phases) > 1 else next(iter(values))

    found = {key: mean(each[key] for each in phases) for key in ("wire_bytes", "link_bytes", "collectives")}
    return {
        **found,
        "reduction": _reduction(found["wire_bytes"], setting),
        "rounds": max(each["rounds"] for each in phases),
        "peak_bytes": max(each["peak_bytes"] or 0 for each in phases) or None,
        "links": {
            text: {name: mean(each["links"][text][name] for each in phases) for name in times}
            for text, times in phases[0]["links"].items()
        },
    }


def _reduction(wire_bytes: float, setting: Setting) -> float | None:
    """Return 4 bytes for each parameter over what is sent; None if that is nothing."""
    return 4 * setting.elements / wire_bytes if wire_bytes else None


def show(setting: Setting, planned: Sequence[Planned], *, in_full: bool) -> None:
    """Print the table, a row for each pipeline and below it one for each kind of its steps; `in_full`, each plan."""
    costs = {"comm": 9} if setting.backward is None else {"comm": 7, "step": 9, "exposed": 6}
    headings = [text.replace(",", "\n") for text in setting.links]
    times = {f"{heading}\n{cost}": weight for heading in headings for cost, weight in costs.items()}
    sizes = {"wire B": 8, "reduction": 5, "link B": 2, "collec-\ntives": 3, "rounds": 4, "memory": 1}
    legend = {
        "wire B": "bytes that a rank passes to its collectives in a step",
        "reduction": "4 bytes for each parameter, over wire B",
        "link B": "bytes that a rank sends in a ring",
        "rounds": "of collectives, of which each waits for the one before",
        "memory": "at most, in addition to gradients and state; -: not known",
        "comm": "all collectives, one after the other",
        "step": f"with a backward of {duration(setting.backward or 0.0)}; buckets are ready at even intervals of it",
        "exposed": "time that a step waits for communication",
    }
    note = "Times are computed, not measured, and leave encoding and decoding out. To measure: fnddp bench."
    rows: list[tuple[str, ...]] = []
    for each in planned:
        rows.append((each.text, *_row(each.mean)))
        steps = sum(kind["steps"] for kind in each.phases)
        rows += [(f"  {kind['steps']} of {steps} steps", *_row(kind)) for kind in each.phases if len(each.phases) > 1]
    if any(len(each.phases) > 1 for each in planned):
        note += " Where steps differ, a pipeline is their mean, and below it is each kind."
    echo(f"{setting}\n")
    Table("pipeline", {**sizes, **times}, rows, legend, note).show()
    for plan in (plan for each in planned if in_full for plan in each.plans):
        print(f"{plan}\n")


def _row(costs: Costs) -> tuple[str, ...]:
    return (
        f"{round(costs['wire_bytes']):,}",
        "-" if costs["reduction"] is None else f"{costs['reduction']:.1f}x",
        f"{round(costs['link_bytes']):,}",
        f"{costs['collectives']:.3g}" if costs["collectives"] % 1 else f"{costs['collectives']:.0f}",
        str(costs["rounds"]),
        "-" if costs["peak_bytes"] is None else size(costs["peak_bytes"]),
        *(duration(seconds) for times in costs["links"].values() for seconds in times.values()),
    )


def as_json(setting: Setting, planned: Sequence[Planned]) -> dict[str, Any]:
    """Return setting and costs as a dictionary of JSON values."""
    ranks = setting.ranks
    return {
        "model": setting.model,
        "parameters": setting.elements,
        "leaves": len(setting.parameters),
        "ranks": ranks if isinstance(ranks, int) else {group or DEFAULT_GROUP: n for group, n in ranks.items()},
        "step": setting.step,
        "bucket_cap_mb": setting.bucket_cap_mb,
        "backward_seconds": setting.backward,
        "pipelines": [{"pipeline": each.text, **each.mean, "phases": each.phases} for each in planned],
    }
