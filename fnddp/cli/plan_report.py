"""What `fnddp plan` prints: a table, the plans in full, or JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fnddp.cli.table import Column, Table
from fnddp.cost.estimate import Estimate
from fnddp.cost.link import Link, duration
from fnddp.plan.plan import Plan
from fnddp.show.text import size


@dataclass(frozen=True)
class Setting:
    """What pipelines are planned for.

    Attributes:
        model: Its name.
        parameters: By name, without values.
        ranks: Number of ranks.
        links: By the text that writes them.
        step: Of all counters; None for a step after all warm-ups.
        backward: Seconds; None to hide nothing behind it.
        bucket_cap_mb: Gradients in a bucket, MiB.
    """

    model: str
    parameters: dict[str, Tensor]
    ranks: int
    links: dict[str, Link]
    step: int | None
    backward: float | None
    bucket_cap_mb: float

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(p.numel() for p in self.parameters.values())

    def __str__(self) -> str:
        when = "after all warm-ups" if self.step is None else f"step {self.step}"
        return (
            f"{self.model}: {self.elements:,} parameters in {len(self.parameters)} leaves; {self.ranks} ranks; {when}; "
            f"buckets of {self.bucket_cap_mb:g} MiB"
        )


@dataclass(frozen=True)
class Planned:
    """A plan and what it costs.

    Attributes:
        plan: The plan.
        reduction: How many times fewer bytes than 4 for each parameter; None if nothing is sent.
        estimates: By the text of the link.
    """

    plan: Plan
    reduction: float | None
    estimates: dict[str, Estimate]

    @classmethod
    def of(cls, plan: Plan, setting: Setting) -> "Planned":
        return cls(
            plan,
            4 * setting.elements / plan.wire_bytes if plan.wire_bytes else None,
            {text: plan.estimate(link, backward_seconds=setting.backward) for text, link in setting.links.items()},
        )

    @property
    def link_bytes(self) -> int:
        """What a rank sends in a ring, which is the same on all links."""
        return next(iter(self.estimates.values())).link_bytes

    @property
    def peak_bytes(self) -> int | None:
        """Memory beside gradients and state; None if the plan does not know it."""
        return self.plan.peak_bytes or None  # never 0 bytes: the means are among them


def show(setting: Setting, planned: Sequence[Planned], *, in_full: bool) -> None:
    """Prints the table and, `in_full`, each plan."""
    print(f"{setting}\n")
    table(setting, planned).show()
    for each in planned if in_full else ():
        print(f"{each.plan}\n")


def table(setting: Setting, planned: Sequence[Planned]) -> Table:
    """The comparison, a row for each pipeline."""
    costs = {"comm": 9} if setting.backward is None else {"comm": 7, "step": 9, "exposed": 6}
    times = [Column(f"{text}\n{cost}", weight) for text in setting.links for cost, weight in costs.items()]
    columns = [
        Column("wire B", 8),
        Column("reduction", 5),
        Column("link B", 2),
        Column("collec-\ntives", 3),
        Column("rounds", 4),
        Column("memory", 1),
        *times,
    ]
    rows = [
        (
            repr(each.plan.sync),
            f"{each.plan.wire_bytes:,}",
            "-" if each.reduction is None else f"{each.reduction:.1f}x",
            f"{each.link_bytes:,}",
            str(len(each.plan.collectives)),
            str(each.plan.rounds),
            "-" if each.peak_bytes is None else size(each.peak_bytes),
            *(duration(seconds) for cost in each.estimates.values() for seconds in _costs(cost).values()),
        )
        for each in planned
    ]
    return Table("pipeline", columns, rows, _caption(setting))


def as_json(setting: Setting, planned: Sequence[Planned]) -> str:
    """The same, for programs."""
    return json.dumps(
        {
            "model": setting.model,
            "parameters": setting.elements,
            "leaves": len(setting.parameters),
            "ranks": setting.ranks,
            "step": setting.step,
            "bucket_cap_mb": setting.bucket_cap_mb,
            "backward_seconds": setting.backward,
            "pipelines": [
                {
                    "pipeline": repr(each.plan.sync),
                    "wire_bytes": each.plan.wire_bytes,
                    "reduction": each.reduction,
                    "link_bytes": each.link_bytes,
                    "collectives": len(each.plan.collectives),
                    "rounds": each.plan.rounds,
                    "peak_bytes": each.peak_bytes,
                    "links": {text: _costs(cost) for text, cost in each.estimates.items()},
                }
                for each in planned
            ],
        },
        indent=1,
    )


def _costs(cost: Estimate) -> dict[str, float]:
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
        "link: bytes that a rank sends in a ring; rounds: collectives that wait for one another\n"
        "memory: at most, beside the gradients and the state (-: not known)\n"
        f"{comm}\n"
        "Times are computed, not measured: gloo's ring, on links of the given bandwidth and latency (none unless "
        "given); to encode and decode takes no time here. To measure steps: fnddp bench"
    )
