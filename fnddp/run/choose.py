"""Choose the fastest pipeline for a link: by a pure function, or by measurement on the ranks that will use it."""

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
"""A pipeline must win by this fraction, since each of two predictions is within 5 % (benchmarks/cost-accuracy.md)."""

SLOWDOWN = 1.5
"""A codec takes about this many times longer in a step than alone, because backward and messages share its core."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of leaves that may be compressed: losses were measured for them, or they are less precise than those."""

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
"""Seconds to encode and decode a byte of float32 gradients, by pipeline (one core of an Intel Xeon, eight ranks)."""

SHARE_BYTES = 8 * 2**20  # bytes of leaves to measure with
CALLS = 2  # the fastest counts, because a rank may have waited for the CPU
SIZE_SECONDS = 0.06  # for each message size; in less time one measures the network's burst rate

_log = logging.getLogger("fnddp")


@cache
def candidates(loss: Loss) -> tuple[str, ...]:
    """Return the pipelines of the study of losses that `loss` allows for any optimizer, the plain mean first."""
    rows = json.loads(Path(cost.__file__).with_name("losses.json").read_text())
    texts = [row["pipeline"] for row in rows if row["optimizer"] is None and (row["safe"] or loss == "some")]
    return tuple(dict.fromkeys([repr(allreduce), *texts]))


@dataclass(frozen=True)
class Cost:
    """The times that a pipeline takes in a step.

    Attributes:
        pipeline: The pipeline, as text.
        wire_seconds: Time of its collectives, one after the other.
        last_seconds: The part of that for the last bucket. It begins when backward ends.
        codec_seconds: Time to encode and decode, within a step.
        weights: The pipeline of the second hop, for weights, as text; "" for a mean, because it has no second hop.
        weights_seconds: Time of the second hop's collectives. They do not overlap with computation.
    """

    pipeline: str
    wire_seconds: float
    last_seconds: float
    codec_seconds: float
    weights: str = ""
    weights_seconds: float = 0.0

    def step(self, backward_seconds: float) -> float:
        """Return the time of a step if all but the last bucket overlaps backward, and forward takes half as long."""
        communicated = max(backward_seconds + self.last_seconds, self.wire_seconds)
        return 0.5 * backward_seconds + communicated + self.weights_seconds + self.codec_seconds


@dataclass(frozen=True)
class Choice:
    """The choice of `sync="auto"`, shared by `choose`, `fnddp plan auto`, `doctor`, `tune` and the tables in docs.

    Attributes:
        costs: The costs of all allowed pipelines, the plain mean first; empty if only the plain mean is allowed.
        backward_seconds: Time of backward; None if unknown.
    """

    costs: tuple[Cost, ...] = ()
    backward_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.backward_seconds is not None and not self.backward_seconds >= 0:  # NaN too
            raise ValueError(f"backward_seconds must be at least 0, got {self.backward_seconds}")

    @property
    def taken(self) -> str:
        """The chosen pipeline, as text."""
        return self.best.pipeline if self.costs else repr(allreduce)

    @property
    def best(self) -> Cost:
        """The costs of the chosen pipeline. `costs` must not be empty."""
        worst = self._worst
        plain, best = self.costs[0], min(self.costs, key=worst.__getitem__)
        return plain if worst[plain] <= (1 + MARGIN) * worst[best] else best

    @property
    def _worst(self) -> dict[Cost, float]:
        """The largest ratio of each pipeline's step to the fastest one's, over all backward times."""
        # Ratios are largest if backward takes no time, or just hides all collectives of a pipeline but the last.
        backwards = (
            [0.0, *(each.wire_seconds - each.last_seconds for each in self.costs)]
            if self.backward_seconds is None
            else [self.backward_seconds]
        )
        least = [(backward, min(each.step(backward) for each in self.costs)) for backward in backwards]
        return {
            each: max((each.step(backward) / best for backward, best in least if best), default=1.0)
            for each in self.costs
        }

    @property
    def compared(self) -> str:
        """The comparison in words: the costs of the choice, of the fastest other pipelines, and the runner-up."""
        best, worst = self.best, self._worst
        order = sorted(self.costs, key=lambda each: (each != best, each.wire_seconds + each.codec_seconds))
        costs = [f"{each.pipeline} {duration(each.wire_seconds)} + {duration(each.codec_seconds)}" for each in order]
        second = min(order[1:], key=worst.__getitem__, default=best)
        if second != best:
            ratio = worst[second] / worst[best]
            costs[-1] += f"; runner-up: {second.pipeline}, whose worst case takes {ratio:.2f}x as long"
            costs[-1] += ", too little to leave the plain mean" if ratio < 1 else ""
        return f"at most, for collectives + codec of a step: {', '.join(costs)}"

    def slowest(self, others: "Sequence[Choice]") -> "Choice":
        """Return the choice by the largest cost of each pipeline over several groups; empty if a group has no costs."""
        seconds = ("wire_seconds", "last_seconds", "codec_seconds")
        costs = [
            Cost(row[0].pipeline, *(max(getattr(each, name) for each in row) for name in seconds))
            for row in zip(self.costs, *(each.costs for each in others), strict=False)  # empty if one of the lists is
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
    """Return the pipeline with the shortest step on a link. This is a pure function that needs no running ranks.

    How much a slow link costs depends on how much communication backward hides. If the time of backward is unknown,
    this returns the pipeline with the smallest worst-case ratio to the best step over all times of backward. It returns
    the plain mean unless another pipeline wins by 10 % (`MARGIN`). Codecs that encode leaf by leaf, without
    `bucketize`, are never chosen, because their cost grows with the number of leaves. If you can measure the loss of
    your model, use `fnddp tune` instead: it trains with each pipeline.

    Args:
        params: Parameters or gradients; the meta device is allowed. If a leaf is not float32, bfloat16 or float16, the
            result is the plain mean.
        links: The link between ranks, also as text: "1gbit:20us".
        loss: "none" for pipelines that certainly end less than 0.01 nats above the plain mean; "some" for all pipelines
            in docs/convergence.md that do not need an optimizer of their own.
        world_size: Number of ranks; None for the ranks of the process group.
        codec_seconds: Seconds to encode and decode a byte of gradients, alone, by pipeline: only these are chosen.
        backward_seconds: Time of backward; None if unknown.

    Raises:
        ValueError: `loss` is neither "none" nor "some", or `backward_seconds` is negative or NaN.

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
    """Return the choice that `choose` makes, with the costs of all pipelines."""
    if loss not in ("none", "some"):
        raise ValueError(f'choose: loss must be "none" or "some", got {loss!r}')
    if isinstance(params, nn.Module):
        leaves: Leaves = {name: p for name, p in params.named_parameters() if p.requires_grad}
    else:
        ordered, spec = tree.flatten(params)
        leaves = {path: ordered[path] for path in spec.paths}  # gradients arrive in the reverse order
    shares = _shares(leaves, loss, world_size, torch.device("meta"))
    return Choice(_costs(shares, links, codec_seconds), backward_seconds)


@dataclass(frozen=True)
class _Share:
    """The plan of a pipeline for a share of the leaves. All leaves have `times` the bytes, and cost `times` as much.

    `last` is the fraction of all bytes that is in the last bucket.
    """

    plan: Plan
    times: float
    last: float

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.plan.leaves.values())


def _shares(leaves: Leaves, loss: Loss, n: int | None, device: torch.device) -> dict[str, _Share]:
    """Return a share for each allowed pipeline, the plain mean first, because lowering all leaves takes seconds."""
    nbytes = sum(leaf.nbytes for leaf in leaves.values())
    if not nbytes or any(leaf.dtype not in DTYPES for leaf in leaves.values()):
        return {}
    dtype = max(leaves.values(), key=lambda leaf: leaf.nbytes).dtype
    part = {"part": torch.empty(max(1, min(nbytes, SHARE_BYTES) // dtype.itemsize), dtype=dtype, device=device)}
    sizes = {path: leaf.nbytes for path, leaf in reversed(leaves.items())}  # roughly the order of arrival
    buckets = assign_buckets(sizes, BUCKET_CAPS)
    last = sum(size for path, size in sizes.items() if buckets[path] == max(buckets.values()))
    shares: dict[str, _Share] = {}
    for text in candidates(loss):
        kinds = {type(each) for each in all_in(parse(text))}
        if any(issubclass(kind, Carrier) for kind in kinds) and bucketize not in kinds:
            continue  # it encodes leaf by leaf: a share does not show these hundreds of operations
        # PowerSGD's cost depends on the shapes of matrices, the others' cost on the number of elements.
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
    """Return the pipeline, parsed if it is a text; return "auto" unchanged."""
    return AUTO if sync == AUTO else pipeline_of("sync", sync)


def automatic(
    leaves: Callable[[], Leaves], group: str | None, wire: Wire = C10D, other_groups: Sequence[str | None] = ()
) -> Sync:
    """Measure the link of `group` and the codecs of its ranks; return the pipeline to use, the same on all ranks.

    If a rank cannot measure, all use the plain mean. The first rank logs the measurements and the choice.

    Args:
        leaves: Function that returns the leaves. If it raises on a rank, the other ranks raise a RankMismatchError.
        other_groups: Further groups with ranks that measure at the same time and use the same pipeline.
    """
    begun = perf_counter()
    held: Leaves = {}

    def require_measurable() -> None:
        if wire is not C10D:
            raise ValueError(f'sync="auto" can only measure torch.distributed, got {wire!r}; name a pipeline')

    if isinstance(wire, Elastic):  # replicas may not have joined yet
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
    """Return the choice for the link of `group` and the codecs of its slowest rank, and the measurements in words.

    All ranks of `group` must call it. The link is measured unless it is given.
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
