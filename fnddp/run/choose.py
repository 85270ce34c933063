"""The fastest pipeline for a link: as a pure function, and measured by the ranks that will use it."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Final, Literal, TypeAlias

import torch
from torch import nn

from fnddp import cost
from fnddp.core import tree
from fnddp.core.agreement import agree, description
from fnddp.core.buckets import BUCKET_CAPS, assign_buckets
from fnddp.core.codec import Carrier
from fnddp.core.parse import parse, pipeline_of
from fnddp.core.sync import Sync, all_in
from fnddp.core.tree import Leaves, Tree
from fnddp.cost.estimate import Links, parsed
from fnddp.cost.link import Link, duration
from fnddp.cost.measure import measure_link
from fnddp.plan.lower import lower
from fnddp.plan.plan import Plan
from fnddp.reducers.all_reduce import allreduce
from fnddp.run.measure import measure_segments
from fnddp.transforms.bucketize import bucketize
from fnddp.transforms.powersgd import powersgd
from fnddp.wire import control
from fnddp.wire.c10d import C10D
from fnddp.wire.groups import live_rank, world_size
from fnddp.wire.protocol import Elastic, Wire

AUTO: Final = "auto"
Auto: TypeAlias = Literal["auto"]
Loss: TypeAlias = Literal["none", "some"]

MARGIN = 0.1
"""A pipeline must win by this fraction: two predictions, each within 5 % on two hosts (benchmarks/cost-accuracy.md)."""

SLOWDOWN = 1.5
"""A codec takes about this many times as long within a step as alone: backward and messages share its core."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of leaves for which losses were measured, or that have less to lose; others keep the plain mean."""

CODEC_SECONDS = {
    "allreduce": 0.1e-9,
    "bf16(allreduce)": 0.4e-9,
    "bucketize(quantize(two_shot))": 1.4e-9,
    "bucketize(quantize(two_shot, bits=4))": 1.3e-9,
    "error_feedback(bucketize(quantize(two_shot, bits=4)))": 3.1e-9,
    "bucketize(quantize(two_shot, bits=4, rounding='stochastic'))": 3.7e-9,
    "error_feedback(powersgd(bf16(allreduce), rank=8))": 1.15e-9,
    "error_feedback(bucketize(sign(quantize(two_shot(server_memory=True)), chunk=128)))": 2.1e-9,
}
"""Seconds to encode and decode a byte of float32 gradients, by pipeline: on one core of an Intel Xeon, eight ranks."""

SHARE_BYTES = 8 * 2**20  # of the leaves, to measure with
CALLS = 2  # of which the fastest counts: a rank that waits for the CPU is not a slow one
SIZE_SECONDS = 0.06  # for each size of a message: with less, a network's burst passes for its rate

_log = logging.getLogger("fnddp")


@cache
def candidates(loss: Loss) -> tuple[str, ...]:
    """Return the pipelines of the study that `loss` allows behind any optimizer, the plain mean first."""
    rows = json.loads(Path(cost.__file__).with_name("losses.json").read_text())
    texts = [row["pipeline"] for row in rows if row["optimizer"] is None and (row["safe"] or loss == "some")]
    return tuple(dict.fromkeys([repr(allreduce), *texts]))


@dataclass(frozen=True)
class Cost:
    """The times of a pipeline in a step.

    Attributes:
        pipeline: The pipeline, as text.
        wire_seconds: Time of its collectives, one after the other.
        last_seconds: Of that, the time of its last bucket, which begins when backward ends.
        codec_seconds: Time to encode and decode, within a step.
        weights: The pipeline of the second hop, of weights, as text; "" for a mean, which has none.
        weights_seconds: Time of the second hop's collectives, which hide behind nothing.
    """

    pipeline: str
    wire_seconds: float
    last_seconds: float
    codec_seconds: float
    weights: str = ""
    weights_seconds: float = 0.0

    def step(self, backward_seconds: float) -> float:
        """Return the time of a step in which all but the last bucket hides, and forward takes half of backward."""
        communicated = max(backward_seconds + self.last_seconds, self.wire_seconds)
        return 0.5 * backward_seconds + communicated + self.weights_seconds + self.codec_seconds


@dataclass(frozen=True)
class Choice:
    """The choice of `sync="auto"`, which `choose`, `fnddp plan auto`, `doctor`, `tune` and the tables of docs share.

    Attributes:
        costs: The costs of all pipelines that may be taken, the plain mean's first; none if no other may be.
        backward_seconds: Time of backward; None if unknown.
    """

    costs: tuple[Cost, ...] = ()
    backward_seconds: float | None = None

    @property
    def taken(self) -> str:
        """The pipeline, as text."""
        return self.best.pipeline if self.costs else repr(allreduce)

    @property
    def best(self) -> Cost:
        """The costs of the pipeline that is taken, of those that there are."""
        # Ratios are largest where backward takes no time, or just hides all collectives of a pipeline but the last.
        backwards = (
            [0.0, *(each.wire_seconds - each.last_seconds for each in self.costs)]
            if self.backward_seconds is None
            else [self.backward_seconds]
        )
        least = [(backward, min(each.step(backward) for each in self.costs)) for backward in backwards]

        def regret(each: Cost) -> float:
            return max((each.step(backward) / best for backward, best in least if best), default=1.0)

        plain, best = self.costs[0], min(self.costs, key=regret)
        return plain if regret(plain) <= (1 + MARGIN) * regret(best) else best

    @property
    def compared(self) -> str:
        """What has been compared, in words: what is taken first, then the fastest."""
        order = sorted(
            self.costs, key=lambda each: (each.pipeline != self.taken, each.wire_seconds + each.codec_seconds)
        )
        costs = [f"{each.pipeline} {duration(each.wire_seconds)} + {duration(each.codec_seconds)}" for each in order]
        return f"at most, for collectives + codec of a step: {', '.join(costs)}"

    def slowest(self, others: "Sequence[Choice]") -> "Choice":
        """Return the choice by the largest costs of each pipeline; by none if one of the groups has none."""
        seconds = ("wire_seconds", "last_seconds", "codec_seconds")
        costs = [
            Cost(row[0].pipeline, *(max(getattr(each, name) for each in row) for name in seconds))
            for row in zip(self.costs, *(each.costs for each in others), strict=False)  # of an empty list: nothing
        ]
        return Choice(tuple(costs), self.backward_seconds)


def choose(
    params: Tree | nn.Module,
    links: Links | str,
    loss: Loss = "none",
    *,
    world_size: int | None = None,
    codec_seconds: Mapping[str, float] = CODEC_SECONDS,
    backward_seconds: float | None = None,
) -> Sync:
    """Return the pipeline with the shortest step on a link: a pure function, for ranks that need not be there.

    Whether a link is slow depends on how much of it hides behind backward. Where that time is unknown, this returns the
    pipeline whose largest ratio to the best step, over all times of backward, is least. The plain mean stays unless
    another wins by `MARGIN`. Codecs that encode leaf by leaf, without `bucketize`, are not taken: they cost more the
    more leaves there are. The wrong choice where you can measure the loss of a model: `fnddp tune` trains with each
    pipeline.

    Args:
        params: Parameters or gradients, which may be on the meta device. A leaf that is not float32, bfloat16 or
            float16 keeps the plain mean for all.
        links: The link of the ranks, also as text: "1gbit:20us".
        loss: "none" for pipelines that surely end less than 0.01 nats above the plain mean; "some" for all of
            docs/convergence.md that need no optimizer of their own.
        world_size: Number of ranks; None for those that run.
        codec_seconds: Seconds to encode and decode a byte of gradients, alone, by pipeline. Those not in it are not
            taken.
        backward_seconds: Time of backward; None if unknown.

    Raises:
        ValueError: `loss` is neither, or `backward_seconds` is negative.

    >>> params = {"w": torch.empty(4096, 4096, device="meta")}
    >>> for rate in ("100mbit", "100gbit"):
    ...     print(choose(params, rate, world_size=2))
    bucketize(quantize(two_shot))
    allreduce
    """
    return parse(choice(params, parsed(links), loss, world_size, codec_seconds, backward_seconds).taken)


def choice(
    params: Tree | nn.Module,
    links: Links,
    loss: Loss = "none",
    world_size: int | None = None,
    codec_seconds: Mapping[str, float] = CODEC_SECONDS,
    backward_seconds: float | None = None,
) -> Choice:
    """Return what `choose` takes, with the costs that decide it."""
    if loss not in ("none", "some"):
        raise ValueError(f'choose: loss must be "none" or "some", got {loss!r}')
    if backward_seconds is not None and backward_seconds < 0:
        raise ValueError(f"choose: backward_seconds must be at least 0, got {backward_seconds}")
    if isinstance(params, nn.Module):
        leaves: Leaves = {name: p for name, p in params.named_parameters() if p.requires_grad}
    else:
        ordered, spec = tree.flatten(params)
        leaves = {path: ordered[path] for path in spec.paths}  # in whose reverse gradients arrive
    shares = _shares(leaves, loss, world_size, torch.device("meta"))
    return Choice(_costs(shares, links, codec_seconds), backward_seconds)


@dataclass(frozen=True)
class _Share:
    """The plan of a pipeline for a share of the leaves: all of them have `times` its bytes, and its costs.

    `last` is the fraction of all bytes that is in the bucket that is full last.
    """

    plan: Plan
    times: float
    last: float

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.plan.leaves.values())


def _shares(leaves: Leaves, loss: Loss, n: int | None, device: torch.device) -> dict[str, _Share]:
    """Return a share for each pipeline that may be taken, the plain mean's first: lowering all leaves takes seconds."""
    nbytes = sum(leaf.nbytes for leaf in leaves.values())
    if not nbytes or any(leaf.dtype not in DTYPES for leaf in leaves.values()):
        return {}
    dtype = max(leaves.values(), key=lambda leaf: leaf.nbytes).dtype
    part = {"part": torch.empty(max(1, min(nbytes, SHARE_BYTES) // dtype.itemsize), dtype=dtype, device=device)}
    sizes = {path: leaf.nbytes for path, leaf in reversed(leaves.items())}  # about the order in which they arrive
    buckets = assign_buckets(sizes, BUCKET_CAPS)
    last = sum(size for path, size in sizes.items() if buckets[path] == max(buckets.values()))
    shares: dict[str, _Share] = {}
    for text in candidates(loss):
        kinds = {type(each) for each in all_in(parse(text))}
        if any(issubclass(kind, Carrier) for kind in kinds) and bucketize not in kinds:
            continue  # it encodes leaf by leaf, in hundreds of operations that a share does not show
        # The cost of PowerSGD depends on the shapes of matrices, that of others on the number of elements.
        sample, times = (leaves, 1.0) if powersgd in kinds else (part, nbytes / part["part"].nbytes)
        shares[text] = _Share(lower(parse(text), sample, world_size=n), times, last / nbytes)
    return shares


def _costs(shares: Mapping[str, _Share], links: Links, codec_seconds: Mapping[str, float]) -> tuple[Cost, ...]:
    copy = codec_seconds.get(repr(allreduce), 0.0)  # no codec is faster than a copy
    costs: list[Cost] = []
    for text, each in shares.items():
        if text in codec_seconds or text == repr(allreduce):
            nbytes = each.times * each.nbytes
            wire = each.times * each.plan.estimate(links).communication_seconds
            codec = SLOWDOWN * nbytes * max(copy, codec_seconds.get(text, 0.0))
            costs.append(Cost(text, wire, wire * each.last, codec))
    return tuple(costs)


def resolved(sync: str | Sync) -> Sync | Auto:
    """Return the pipeline, that of a text; "auto" as it is."""
    return AUTO if sync == AUTO else pipeline_of("sync", sync)


def automatic(
    leaves: Callable[[], Leaves], group: str | None, wire: Wire = C10D, other_groups: Sequence[str | None] = ()
) -> Sync:
    """Measure the link between the ranks of `group` and their codecs, and return the pipeline to use, on all alike.

    A rank that cannot measure leaves the plain mean for all. What was measured and chosen is logged on the first rank.

    Args:
        leaves: Returns the leaves to synchronize; if it raises on a rank, the others raise a RankMismatchError.
        other_groups: Further groups, whose ranks measure at the same time and take the same pipeline.
    """
    begun = perf_counter()
    held: Leaves = {}

    def require_measurable() -> None:
        if wire is not C10D:
            raise ValueError(f'sync="auto" measures torch.distributed, and not {wire!r}; name a pipeline')

    if isinstance(wire, Elastic):  # whose replicas may not have met yet
        require_measurable()

    def describe() -> dict[str, str]:
        require_measurable()
        held.update(leaves())
        return {**description(allreduce, held, None), "pipeline": AUTO}

    agree(describe, group, wire, call=f"sync={AUTO!r}")
    n = world_size(group)
    made, found = measured(held, group) if n > 1 else (Choice(), "one rank")
    for other in other_groups:
        made = made.slowest(control.all_gather_object(made, other))
    if not any(live_rank(each) for each in (group, *other_groups)):
        _log.warning("%s", _line(made, found, perf_counter() - begun))
    return parse(made.taken)


def measured(leaves: Leaves, group: str | None, link: Link | None = None) -> tuple[Choice, str]:
    """Return the choice on the link of `group`, with the codecs of its slowest rank, and what was found in words.

    All ranks of `group` must call it. The link is measured if it is not given.
    """
    n = world_size(group)
    shares: dict[str, _Share] = {}
    try:
        shares = _shares(leaves, "none", n, next(iter(leaves.values())).device)
        mine: dict[str, float] | str = {
            text: min(sum(measure_segments(each.plan, calls=1)) for _ in range(CALLS)) / each.nbytes
            for text, each in shares.items()
        }
    except Exception as error:
        mine = f"{type(error).__name__}: {error}"
    everyone: list[dict[str, float] | str] = control.all_gather_object(mine, group)
    for rank, each in enumerate(everyone):
        if isinstance(each, str):
            return Choice(), f"rank {rank} could not measure, {each}"
    if not shares:
        return Choice(), "not all leaves are of float32, bfloat16 or float16"
    slowest = {text: max(each[text] for each in everyone if isinstance(each, dict)) for text in shares}
    link = measure_link(group, seconds=SIZE_SECONDS) if link is None else link
    return Choice(_costs(shares, link, slowest)), f"{n} ranks, {link}"


def _line(made: Choice, found: str, seconds: float) -> str:
    taken, over = made.taken, f"; {made.compared}" if made.costs else ""
    return f'sync="auto" takes {taken}, measured in {duration(seconds)}: {found}{over}. To pin it: sync="{taken}"'
