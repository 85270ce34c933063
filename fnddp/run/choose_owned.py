"""Choose the fastest codecs for both hops of `own` on a link, among those for which Muon's loss was measured."""

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
    """The pipelines of both hops. It unpacks to them, in the order of the arguments of `own`.

    Attributes:
        costs: The cost of each pair that was compared, the exact pair first: `pair.costs[0].step(backward_seconds)`.
    """

    gradients: Sync
    weights: Sync
    costs: tuple[Cost, ...] = field(default=(), repr=False)

    def __iter__(self) -> Iterator[Sync]:
        yield self.gradients
        yield self.weights


class Pair(NamedTuple):
    """The pipelines of both hops as text, and an upper bound of the loss that they add.

    Attributes:
        most: The bound, in nats above the loss with the exact mean: the upper end of the 95 % confidence interval over
            seeds, or infinity if nothing was measured.
    """

    gradients: str
    weights: str
    most: float = math.inf


@cache
def _study() -> dict[str, Any]:
    return json.loads(Path(cost.__file__).with_name("muon.json").read_text())


def pairs(within: float = 0.01) -> tuple[Pair, ...]:
    """Return the study's pairs for which repeated runs rule out a loss of over `within` nats, the exact one first."""
    if not within >= 0:
        raise ValueError(f"choose_owned: within must be a number of nats of at least 0, got {within!r}")
    every = [Pair(**row) for row in _study()["pairs"]]
    return tuple(each for each in every if each.most <= within)


def hop_seconds() -> dict[str, float]:
    """Return the seconds to encode and decode a byte of float32 on a hop, by pipeline (one core, 8 ranks)."""
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
    """Return the two pipelines of `own`, of gradients and of weights, with the shortest step of Muon on a link.

    Candidates are only those pairs of `benchmarks/muon_bits.py` for which repeated runs rule out that Muon's loss ends
    more than `within` above that of the exact mean. Planning both hops takes seconds. The time of gradients can overlap
    with backward; that of weights overlaps with nothing. The exact pair is returned unless another one wins by 10 %. If
    the time of backward is unknown, the worst case counts, as in `choose`. If you can measure your model's loss, do
    that instead: the study is of one small model, on 8 ranks.

    Args:
        model: The model, before it is passed to `own`; the meta device is allowed. If a leaf is not float32, bfloat16
            or float16, the hops are exact.
        optimizer: One or several optimizers, as for `own`. One of them must be Muon.
        links: The link between ranks, also as text: "1gbit:20us".
        within: Largest acceptable loss above the exact mean's, in nats.
        world_size: Number of ranks; None for the ranks of the process group.
        codec_seconds: Seconds to encode and decode a byte of the model, alone, by the pipeline of a hop, as named in
            `pair.costs`. None for times of one core of an AMD EPYC, many times longer than on a GPU. Pairs with a
            pipeline that is not in it are not chosen.
        backward_seconds: Time of backward; None if unknown.

    Returns:
        A pair for `own(model, optimizer, *pair)`, with the costs of all pairs that were compared.

    Raises:
        ValueError: No optimizer is Muon; `within` is negative or NaN; a link is invalid; `codec_seconds` has a hop
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
        raise ValueError(f"choose_owned: codec_seconds has {unknown[0]!r}, which is not among {sorted(hop_seconds())}")
    optimizers = several(optimizer)
    among = pairs(within)
    if not any(map(is_muon, optimizers)):
        names = ", ".join(type(each).__name__ for each in optimizers)
        raise ValueError(
            f"choose_owned: losses were measured with Muon, but the optimizer is {names}; add torch.optim.Muon for "
            "the matrices, or name the hops: own's defaults, 'two_shot' and 'allgather', are lossless"
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
    """Return the plans of both hops of each pair, for leaves on `device`; None for the parameters' device."""
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
    """Return the choice that `choose_owned` makes, with its costs."""
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
