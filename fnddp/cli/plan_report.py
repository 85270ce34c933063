"""What `fnddp plan` prints: a table, the plans in full, or JSON."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import Tensor

from fnddp.cli import terminal
from fnddp.cli.table import Column, Table
from fnddp.cost.estimate import Estimate
from fnddp.cost.link import duration
from fnddp.cost.queue import Links
from fnddp.plan.plan import Plan
from fnddp.show.text import count, size
from fnddp.wire.groups import DEFAULT_GROUP, WorldSize


@dataclass(frozen=True)
class Setting:
    """What pipelines are planned for.

    Attributes:
        model: Its name.
        parameters: By name, without values.
        ranks: Number of ranks, or those of each group.
        links: By the text that writes them.
        step: Of all counters; None for a step after all warm-ups.
        backward: Seconds; None to hide nothing behind it.
        bucket_cap_mb: Gradients in a bucket, MiB.
    """

    model: str
    parameters: dict[str, Tensor]
    ranks: WorldSize
    links: dict[str, Links]
    step: int | None
    backward: float | None
    bucket_cap_mb: float

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def _ranks(self) -> list[str]:
        if isinstance(self.ranks, int):
            return [count(self.ranks, "rank")]
        return [f"{count(n, 'rank')}{f' in group {group}' if group else ''}" for group, n in self.ranks.items()]

    def __str__(self) -> str:
        when = "after all warm-ups" if self.step is None else f"step {self.step}"
        return (
            f"{self.model}: {self.elements:,} parameters in {count(len(self.parameters), 'leaf', 'leaves')}; "
            f"{', '.join(self._ranks)}; {when}; buckets of {self.bucket_cap_mb:g} MiB"
        )


@dataclass(frozen=True)
class Costs:
    """What a step costs, or the mean of several.

    Attributes:
        wire_bytes: What a rank hands to its collectives.
        link_bytes: What a rank sends in a ring, which is the same on all links.
        collectives: How many.
        rounds: The longest chain of them.
        peak_bytes: Memory beside gradients and state; None if a plan does not know it.
        times: Seconds by name, by the text of the link.
    """

    wire_bytes: float
    link_bytes: float
    collectives: float
    rounds: int
    peak_bytes: int | None
    times: dict[str, dict[str, float]]

    @classmethod
    def of(cls, plan: Plan, setting: Setting) -> "Costs":
        estimates = {text: plan.estimate(at, backward_seconds=setting.backward) for text, at in setting.links.items()}
        return cls(
            plan.wire_bytes,
            next(iter(estimates.values())).link_bytes,
            len(plan.collectives),
            plan.rounds,
            plan.peak_bytes or None,  # never 0 bytes: the means are among them
            {text: _times(estimate) for text, estimate in estimates.items()},
        )

    @classmethod
    def mean(cls, costs: Sequence["Costs"], steps: Sequence[int]) -> "Costs":
        """Of bytes and times; of rounds and memory the most that there are."""

        def mean(values: Iterable[float]) -> float:
            return fmean(values, steps)

        return cls(
            mean(each.wire_bytes for each in costs),
            mean(each.link_bytes for each in costs),
            mean(each.collectives for each in costs),
            max(each.rounds for each in costs),
            max(each.peak_bytes or 0 for each in costs) or None,
            {
                text: {name: mean(each.times[text][name] for each in costs) for name in times}
                for text, times in costs[0].times.items()
            },
        )


@dataclass(frozen=True)
class Planned:
    """What a pipeline does in the steps of a period, and what that costs.

    Attributes:
        plans: One for each phase.
        phases: Costs that differ, and how many steps of a period have them.
        mean: Over the period.
    """

    plans: tuple[Plan, ...]
    phases: tuple[tuple[Costs, int], ...]
    mean: Costs

    @classmethod
    def of(cls, recurring: Sequence[tuple[Plan, int]], setting: Setting) -> "Planned":
        """Of plans, and how many steps of a period each is for."""
        phases: list[tuple[Costs, int]] = []
        for plan, steps in recurring:
            costs = Costs.of(plan, setting)
            steps += sum(count for other, count in phases if other == costs)
            phases = [*((other, count) for other, count in phases if other != costs), (costs, steps)]
        mean = Costs.mean(*zip(*phases, strict=True)) if len(phases) > 1 else phases[0][0]
        return cls(tuple(plan for plan, _ in recurring), tuple(phases), mean)

    @property
    def text(self) -> str:
        """The pipeline."""
        return repr(self.plans[0].sync)

    @property
    def period(self) -> int:
        """Steps."""
        return sum(steps for _, steps in self.phases)

    @property
    def busiest(self) -> Plan:
        """The plan that sends most."""
        return max(self.plans, key=lambda plan: plan.wire_bytes)


def show(setting: Setting, planned: Sequence[Planned], *, in_full: bool) -> None:
    """Prints the table and, `in_full`, each plan."""
    print(f"{terminal.folded(str(setting))}\n")
    table(setting, planned).show()
    for plan in (plan for each in planned if in_full for plan in each.plans):
        print(f"{plan}\n")


def table(setting: Setting, planned: Sequence[Planned]) -> Table:
    """The comparison: a row for each pipeline, and below it one for each kind of its steps, if they are not alike."""
    costs = {"comm": 9} if setting.backward is None else {"comm": 7, "step": 9, "exposed": 6}
    headings = [text.replace(",", "\n") for text in setting.links]
    times = [Column(f"{heading}\n{cost}", weight) for heading in headings for cost, weight in costs.items()]
    columns = [
        Column("wire B", 8),
        Column("reduction", 5),
        Column("link B", 2),
        Column("collec-\ntives", 3),
        Column("rounds", 4),
        Column("memory", 1),
        *times,
    ]
    rows: list[tuple[str, ...]] = []
    for each in planned:
        rows.append((each.text, *_row(each.mean, setting)))
        for kind, steps in each.phases if len(each.phases) > 1 else ():
            rows.append((f"  {steps} of {each.period} steps", *_row(kind, setting)))
    return Table("pipeline", columns, rows, _caption(setting))


def _row(costs: Costs, setting: Setting) -> tuple[str, ...]:
    reduction = _reduction(costs, setting)
    return (
        f"{round(costs.wire_bytes):,}",
        "-" if reduction is None else f"{reduction:.1f}x",
        f"{round(costs.link_bytes):,}",
        f"{costs.collectives:.3g}" if costs.collectives % 1 else f"{costs.collectives:.0f}",
        str(costs.rounds),
        "-" if costs.peak_bytes is None else size(costs.peak_bytes),
        *(duration(seconds) for times in costs.times.values() for seconds in times.values()),
    )


def _reduction(costs: Costs, setting: Setting) -> float | None:
    """How many times fewer bytes than 4 for each parameter; None if nothing is sent."""
    return 4 * setting.elements / costs.wire_bytes if costs.wire_bytes else None


def as_json(setting: Setting, planned: Sequence[Planned]) -> str:
    """The same, for programs."""
    return json.dumps(
        {
            "model": setting.model,
            "parameters": setting.elements,
            "leaves": len(setting.parameters),
            "ranks": setting.ranks
            if isinstance(setting.ranks, int)
            else {group or DEFAULT_GROUP: n for group, n in setting.ranks.items()},
            "step": setting.step,
            "bucket_cap_mb": setting.bucket_cap_mb,
            "backward_seconds": setting.backward,
            "pipelines": [
                {
                    "pipeline": each.text,
                    **_as_json(each.mean, setting),
                    "phases": [{"steps": steps, **_as_json(costs, setting)} for costs, steps in each.phases],
                }
                for each in planned
            ],
        },
        indent=1,
    )


def _as_json(costs: Costs, setting: Setting) -> dict[str, Any]:
    return {
        "wire_bytes": costs.wire_bytes,
        "reduction": _reduction(costs, setting),
        "link_bytes": costs.link_bytes,
        "collectives": costs.collectives,
        "rounds": costs.rounds,
        "peak_bytes": costs.peak_bytes,
        "links": costs.times,
    }


def _times(cost: Estimate) -> dict[str, float]:
    communication = {"communication_seconds": cost.communication_seconds}
    if cost.backward_seconds is None:
        return communication
    return {**communication, "step_seconds": cost.step_seconds, "exposed_seconds": cost.exposed_seconds}


def _caption(setting: Setting) -> str:
    if setting.backward is None:
        comm = "comm: all collectives, one after the other; what backward hides of them: --backward SECONDS"
    else:
        comm = (
            f"comm: all collectives; step: with a backward of {duration(setting.backward)}, in which buckets are ready "
            "at even intervals\nexposed: what is left to wait for after it"
        )
    return (
        "wire: bytes that a rank hands to its collectives in a step; reduction: against 4 for each parameter\n"
        "steps that are not alike: their mean, and below it each kind of them\n"
        "link: bytes that a rank sends in a ring; rounds: collectives that wait for one another\n"
        "memory: at most, beside the gradients and the state (-: not known)\n"
        f"{comm}\n"
        "Times are computed, not measured: gloo's ring, on links of the given bandwidth and latency (none unless "
        "given); to encode and decode takes no time here. To measure steps: fnddp bench"
    )
