"""Costs of pipelines for `fnddp plan`, from their plans: a table, the plans, or JSON; also of a sharded model."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import Tensor

from fnddp.cli import checks
from fnddp.cli.failures import WrongArgument, wrong_if
from fnddp.cli.terminal import SIZES, Grid, echo
from fnddp.core.state import at_step
from fnddp.core.sync import Sync
from fnddp.cost.estimate import Links
from fnddp.cost.link import Link, duration
from fnddp.plan.lower import lower, planned_world
from fnddp.plan.period import period
from fnddp.plan.plan import Plan
from fnddp.show.text import count, plain_link_bytes, size
from fnddp.wire.groups import DEFAULT_GROUP, World, WorldSize, within

_BLOCK = re.compile(r"(?:.*?\.)??\d+(?=\.)")

Costs = dict[str, Any]  # of a step, or the mean of several, as JSON values


@dataclass(frozen=True)
class Setting:
    """The model, ranks and links that pipelines are planned for."""

    model: str
    parameters: dict[str, Tensor]  # by name, without values
    ranks: WorldSize  # of all groups, or of each
    links: dict[str, Links]  # by their text
    step: int | None  # of all counters; None for a step after all warm-ups
    backward: float | None  # seconds; None if no communication overlaps with it
    bucket_cap_mb: float
    arrival: list[str] | None  # names of parameters in the order of their gradients, if known

    @property
    def elements(self) -> int:
        return sum(p.numel() for p in self.parameters.values())

    def __str__(self) -> str:
        sizes = {None: self.ranks} if isinstance(self.ranks, int) else self.ranks
        ranks = ", ".join(f"{count(n, 'rank')}{f' in group {group}' if group else ''}" for group, n in sizes.items())
        when = "after all warm-ups" if self.step is None else f"step {self.step}"
        return (
            f"{self.model}: {self.elements:,} parameters in {count(len(self.parameters), 'leaf', 'leaves')}; "
            f"{ranks}; {when}; buckets of {self.bucket_cap_mb:g} MiB"
        )


def planned(sync: Sync, setting: Setting) -> tuple[list[Plan], Costs]:
    """Lower `sync` for ranks that need not exist; return the plan of each step of a period, and the costs.

    `phases` are the different costs of steps, each with its number of steps in a period; `first_step` has the costs of
    the very first step, if it sends other messages.
    """
    ranks = World(size=setting.ranks).size_of(sync.groups)
    arrival = None if setting.step == 0 else setting.arrival  # the first step learns it
    options: Any = {"world_size": ranks, "bucket_cap_mb": setting.bucket_cap_mb, "arrival": arrival}
    with wrong_if(TypeError, ValueError):  # a LoweringError is a TypeError
        if setting.step is None:
            repeated = period(sync, setting.parameters, **options)
            plans = [(each.plan, each.steps) for each in repeated]
            first = lower(sync, setting.parameters, **options | {"arrival": None})
        else:
            with within(planned_world(sync, sync.groups, ranks)):
                state = at_step(setting.step, sync.init(setting.parameters))
            first = lower(sync, setting.parameters, state=state, **options)
            plans = [(first, 1)]
    phases: dict[str, Costs] = {}
    for plan, steps in plans:
        costs = _costs([(plan, 1)], setting)
        phases.setdefault(repr(costs), {"steps": 0, **costs})["steps"] += steps
    mean = _costs(plans if len(phases) > 1 else plans[:1], setting)
    is_known = any(_look(first) == _look(plan) for plan, _ in plans)
    return [plan for plan, _ in plans], {
        "pipeline": repr(sync),
        **mean,
        "phases": [*phases.values()],
        "first_step": None if is_known else _costs([(first, 1)], setting),
    }


def _look(plan: Plan) -> tuple[int, int, int]:
    return len(plan.collectives), plan.rounds, plan.wire_bytes


def _costs(plans: Sequence[tuple[Plan, int]], setting: Setting) -> Costs:
    """Return the costs of a step: the mean of bytes and times over the steps of each plan; the maximum of others."""

    def mean(values: Sequence[Any]) -> Any:
        return fmean(values, [steps for _, steps in plans]) if len(plans) > 1 else values[0]

    backward = setting.backward or 0.0
    estimates = {
        text: [plan.estimate(on, backward_seconds=backward) for plan, _ in plans] for text, on in setting.links.items()
    }
    times = ["communication_seconds"] + ["step_seconds", "exposed_seconds"] * (setting.backward is not None)
    link_bytes = mean([step.link_bytes for step in next(iter(estimates.values()))])  # the same on all links
    plain = plain_link_bytes([each for plan, _ in plans for each in plan.collectives], setting.elements)
    return {
        "wire_bytes": mean([plan.wire_bytes for plan, _ in plans]),
        "link_bytes": link_bytes,
        "reduction": plain / link_bytes if plain and link_bytes else None,
        "collectives": mean([len(plan.collectives) for plan, _ in plans]),
        "rounds": max(plan.rounds for plan, _ in plans),
        "peak_bytes": max(plan.peak_bytes for plan, _ in plans) or None,  # never 0 bytes: it includes the means
        "links": {
            text: {time: mean([getattr(step, time.removeprefix("step_")) for step in steps]) for time in times}
            for text, steps in estimates.items()
        },
    }


def show(setting: Setting, pipelines: Sequence[Costs]) -> None:
    """Print a row for each pipeline, and below it one for each kind of its steps."""
    costs = {"comm": 9} if setting.backward is None else {"comm": 7, "step": 9, "exposed": 6}
    headings = [text.replace(",", "\n") for text in setting.links]
    times = {f"{heading}\n{cost}": weight for heading in headings for cost, weight in costs.items()}
    sizes = {"wire B": 2, "link B": 8, "reduction": 5, "collec-\ntives": 3, "rounds": 4, "memory": 1}
    legend = {
        **SIZES,
        "reduction": "times fewer link bytes than a plain mean of float32; -: none, or several groups",
        "rounds": "collectives that wait for each other, one after the other",
        "memory": "maximum, in addition to gradients and state; a plan on CPUs keeps more; -: not known",
        "comm": "time of all collectives, one after the other",
        "step": f"with a backward of {duration(setting.backward or 0.0)}; buckets are ready at even intervals of it",
        "exposed": "time that a step waits for communication",
    }
    note = "Times are computed, not measured, and leave encoding and decoding out. To measure: fnddp bench."
    rows: list[tuple[str, ...]] = []
    for mean in pipelines:
        rows.append((mean["pipeline"], *_row(mean)))
        steps = sum(kind["steps"] for kind in mean["phases"])
        rows += [
            (f"  {kind['steps']} of {steps} steps", *_row(kind)) for kind in mean["phases"] if kind["steps"] < steps
        ]
        if mean["first_step"]:
            rows.append(("  the first step", *_row(mean["first_step"])))
    if any(len(mean["phases"]) > 1 for mean in pipelines):
        note += " Where steps differ, a pipeline is their mean, and below it is each kind."
    if any(mean["first_step"] for mean in pipelines):
        note += " The first step begins warm-ups, and expects gradients in the reverse order of parameters."
    elif setting.arrival is None and setting.step is None:
        note += " Gradients are taken to come in the reverse order of parameters: that of this model is not known."
    echo(f"{setting}\n")
    Grid("pipeline", {**sizes, **times}, rows, legend, note).show()


def _row(costs: Costs) -> tuple[str, ...]:
    return (
        f"{round(costs['wire_bytes']):,}",
        f"{round(costs['link_bytes']):,}",
        "-" if costs["reduction"] is None else f"{costs['reduction']:.1f}x",
        f"{costs['collectives']:.3g}" if costs["collectives"] % 1 else f"{costs['collectives']:.0f}",
        str(costs["rounds"]),
        "-" if costs["peak_bytes"] is None else size(costs["peak_bytes"]),
        *(duration(seconds) for times in costs["links"].values() for seconds in times.values()),
    )


def as_json(setting: Setting, pipelines: Sequence[Costs]) -> dict[str, Any]:
    ranks = setting.ranks
    return {
        "model": setting.model,
        "parameters": setting.elements,
        "leaves": len(setting.parameters),
        "ranks": ranks if isinstance(ranks, int) else {group or DEFAULT_GROUP: n for group, n in ranks.items()},
        "step": setting.step,
        "bucket_cap_mb": setting.bucket_cap_mb,
        "backward_seconds": setting.backward,
        "pipelines": pipelines,
    }


def show_axes(
    model: str,
    pipelines: Sequence[str],
    links: Sequence[str],
    as_json: bool,
    shards: int,
    replicas: int,
    gradients: str | None,
    weights: str | None,
) -> None:
    """Print the plan of a step of `model`, with the time of each axis on each of `links`."""
    from fnddp.integrations.fsdp.axes import plan_axes  # importing FSDP2 takes a second

    if len(pipelines) > (replicas > 1):
        fix = "give one" if replicas > 1 else "give their number, --replicas N; --gradients and --weights are of shards"
        raise WrongArgument(f"{' '.join(map(repr, pipelines))}: one pipeline is planned, between replicas: {fix}")
    by_text = {text: _by_axis(text, replicas) for text in links}
    parameters = checks.check_model(model, trains=False)
    groups = blocks(parameters)
    world_size = {"shards": shards, "replicas": replicas}
    with wrong_if(TypeError, ValueError):
        between = [*pipelines, None][0]
        plan = plan_axes(groups, world_size=world_size, gradients=gradients, weights=weights, replicas=between)
    elements = sum(p.numel() for p in parameters.values())
    if as_json:
        axes = [
            {
                "axis": axis.name,
                "pipeline": axis.pipeline,
                "ranks": axis.ranks,
                "messages": len(axis.messages),
                "wire_bytes": axis.wire_bytes,
                "link_bytes": axis.link_bytes(),
                "links": {text: axis.seconds(on[axis.name]) for text, on in by_text.items()},
            }
            for axis in plan.axes
        ]
        print(json.dumps({"model": model, "parameters": elements, "groups": len(groups), "axes": axes}, indent=1))
        return
    echo(
        f"{model}: {elements:,} parameters in {count(len(groups), 'group')}, as fully_shard on each numbered module "
        f"and on the model makes them; {count(shards, 'shard')} in {count(replicas, 'replica')}"
    )
    for text, on in by_text.items():
        print(f"\n{text}\n{plan.show(on)}")


def blocks(parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return parameters by their numbered module, such as "layers.3"; "" for the rest.

    >>> list(blocks({"wte.weight": None, "h.0.up.weight": None, "h.1.up.weight": None, "2.weight": None}))
    ['', 'h.0', 'h.1', '2']
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for path, parameter in parameters.items():
        block = _BLOCK.match(path)
        groups.setdefault(block[0] if block else "", {})[path] = parameter
    return groups


def _by_axis(text: str, replicas: int) -> dict[str, Link]:
    links = checks.check_links(text)
    if isinstance(links, Link):
        links = {"shards": links, "replicas": links}
    wanted = ("shards", "replicas") if replicas > 1 else ("shards",)
    if not set(wanted) <= links.keys() <= {"shards", "replicas"}:
        raise WrongArgument(f"--link {text}: give {','.join(f'{each}=...' for each in wanted)}, or one link for all")
    between = links["shards"]
    return {"gradients": between, "weights": between, "replicas": links.get("replicas", between)}
