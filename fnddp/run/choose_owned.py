"""The fastest codecs for both hops of `own` on a link, among those with which Muon's loss was measured."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fnddp import cost
from fnddp.core.parse import parse
from fnddp.core.sync import Sync
from fnddp.cost.estimate import Links, parsed
from fnddp.plan.plan import Plan
from fnddp.run.choose import DTYPES, SLOWDOWN, Choice, Cost
from fnddp.run.hops import is_muon, owners_of, parameters_of, plan_of_gradients, plan_of_weights, several
from fnddp.wire.groups import world_size as size_of


@dataclass(frozen=True)
class Hops:
    """The pipelines of both hops. It unpacks to these, in the order in which `own` takes them.

    Attributes:
        costs: Of each pair that was compared, the exact one first: `pair.costs[0].step(backward_seconds)`.
    """

    gradients: Sync
    weights: Sync
    costs: tuple[Cost, ...] = field(default=(), repr=False)

    def __iter__(self) -> Iterator[Sync]:
        yield self.gradients
        yield self.weights


class Pair(NamedTuple):
    """The texts of two hops, and how much they may lose.

    Attributes:
        most: Nats above the exact mean: the upper end of the interval of 95 % confidence over seeds; infinite where
            nothing was measured.
    """

    gradients: str
    weights: str
    most: float = math.inf


@cache
def _study() -> dict[str, Any]:
    return json.loads(Path(cost.__file__).with_name("muon.json").read_text())


def pairs(within: float = 0.01) -> tuple[Pair, ...]:
    """Return the pairs of the study for which seeds rule out a loss of more than `within` nats, the exact one first."""
    if not within >= 0:
        raise ValueError(f"choose_owned: within must be a number of nats that is not negative, got {within!r}")
    every = [Pair(**row) for row in _study()["pairs"]]
    return tuple(each for each in every if each.most <= within)


def hop_seconds() -> dict[str, float]:
    """Return seconds to encode and decode a byte of float32 on a hop, by its pipeline: on one core, of 8 ranks."""
    return _study()["seconds_per_byte"]


def choose_owned(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    links: Links | str,
    within: float = 0.01,
    *,
    world_size: int | None = None,
    codec_seconds: Mapping[str, float] | None = None,
    backward_seconds: float | None = None,
) -> Hops:
    """Return `gradients` and `weights` of `own` with the shortest step on a link: `choose` for Muon with owners.

    Candidates are the pairs of `benchmarks/muon_bits.py`, no others, for which the seeds rule out that Muon ends more
    than `within` above the exact mean. Both hops are planned as `own` plans them, padding included, which takes
    seconds: gradients travel behind backward, weights behind nothing. The exact pair stays unless another wins by a
    tenth, and of unknown times of backward the worst counts, as in `choose`. The wrong choice where you can measure the
    loss of a model: that of the study is of one small one, on 8 ranks.

    Args:
        model: As `own` takes it, before it does; also on the meta device. With a leaf that is not float32, bfloat16 or
            float16 the hops are exact.
        optimizer: As `own` takes them: one, or several, of which one is Muon.
        links: The link of the ranks, also as text: "1gbit:20us".
        within: Nats.
        world_size: Number of ranks; None for those that run.
        codec_seconds: Seconds to encode and decode a byte of the model, alone, by the pipeline of a hop, as
            `pair.costs` names them; None for those of one core of an AMD EPYC, many times those of a GPU. Pairs with
            one that is not in it are not taken.
        backward_seconds: Time of backward; None if unknown.

    Returns:
        A pair for `own(model, optimizer, *pair)`, with the costs of all that were compared.

    Raises:
        ValueError: No optimizer is Muon; `within` is negative or NaN; a link is no link; `codec_seconds` has a hop
            that was not measured; a parameter is in no optimizer, or in two, or is not the model's.

    >>> from fnddp import Link
    >>> with torch.device("meta"):
    ...     net = nn.Linear(512, 512, bias=False)
    >>> muon = torch.optim.Muon(net.parameters())
    >>> for rate in ("100mbit", "1000gbit"):
    ...     print(*choose_owned(net, muon, Link.parse(rate), world_size=4))
    error_feedback(quantize(two_shot)) ef21(quantize(allgather))
    two_shot allgather
    """
    links = parsed(links)
    if unknown := sorted({*(codec_seconds or ())} - {*hop_seconds()}):
        raise ValueError(f"choose_owned: codec_seconds has {unknown[0]!r}, which is no hop of {sorted(hop_seconds())}")
    optimizers = several(optimizer)
    among = pairs(within)
    if not any(map(is_muon, optimizers)):
        names = ", ".join(type(each).__name__ for each in optimizers)
        raise ValueError(
            f"choose_owned: losses were measured with Muon, and the optimizer is {names}; add torch.optim.Muon for the "
            "matrices, or name the hops: own's defaults, 'two_shot' and 'allgather', lose nothing"
        )
    if any(p.dtype not in DTYPES for p in model.parameters() if p.requires_grad):
        among = among[:1]
    plans = owned_plans("choose_owned", model, optimizers, among, world_size)
    choice = owned_choice(plans, links, codec_seconds, backward_seconds)
    return Hops(parse(choice.best.pipeline), parse(choice.best.weights), choice.costs)


Plans = dict[Pair, tuple[Plan, tuple[Plan, ...]]]


def owned_plans(
    who: str,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    among: Sequence[Pair],
    world_size: int | None = None,
    *,
    device: str | None = "meta",
) -> Plans:
    """Return the plans of both hops of each pair, for leaves on `device`; None for that of the parameters."""
    named = parameters_of(who, model, optimizers)
    n = size_of(None) if world_size is None else world_size
    owners = [owners_of(each, of, n) for each, of in zip(named, optimizers, strict=True)]
    like = [{name: torch.empty_like(p, device=device) for name, p in each.items()} for each in named]
    of_all = {name: each[name] for name, _ in model.named_parameters() for each in like if name in each}

    @cache
    def first(text: str) -> Plan:
        return plan_of_gradients(parse(text), of_all, owners)

    @cache
    def second(text: str) -> tuple[Plan, ...]:
        return tuple(plan_of_weights(parse(text), each, of) for each, of in zip(like, owners, strict=True))

    return {each: (first(each.gradients), second(each.weights)) for each in among}


def owned_choice(
    plans: Plans,
    links: Links,
    codec_seconds: Mapping[str, float] | None = None,
    backward_seconds: float | None = None,
) -> Choice:
    """Return what `choose_owned` takes, with the costs that decide it."""
    seconds = hop_seconds() if codec_seconds is None else codec_seconds
    exact = next(iter(plans))
    least = {hop: seconds.get(hop, 0.0) for hop in (exact.gradients, exact.weights)}  # no codec is faster than a copy
    costs: list[Cost] = []
    for pair, (first, second) in plans.items():
        if pair != exact and not {pair.gradients, pair.weights} <= {*seconds, *least}:
            continue
        there = first.estimate(links).collectives
        last = max((each.bucket for each in first.collectives), default=0)
        of_last = [x.seconds for x, each in zip(there, first.collectives, strict=True) if each.bucket == last]
        codec = max(seconds.get(pair.gradients, 0.0), least[exact.gradients])
        codec += max(seconds.get(pair.weights, 0.0), least[exact.weights])
        costs.append(
            Cost(
                pair.gradients,
                sum(each.seconds for each in there),
                sum(of_last),
                SLOWDOWN * codec * sum(leaf.nbytes for leaf in first.leaves.values()),
                pair.weights,
                sum(plan.estimate(links).communication_seconds for plan in second),
            )
        )
    return Choice(tuple(costs), backward_seconds)
