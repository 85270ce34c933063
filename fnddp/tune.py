"""Time and loss together: which pipeline trains as well as the plain mean, in the shortest step."""

import math
import statistics
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fnddp.cost.compute import measure_backward, measure_segments
from fnddp.cost.queue import Links
from fnddp.cost.step import Compute, MeanStep
from fnddp.options import checked_int
from fnddp.parse import parse
from fnddp.plan.period import period
from fnddp.simulate_training import simulate_training
from fnddp.sync import Sync
from fnddp.tree import Leaves

MEAN = "allreduce"
SIXTEEN_BITS = ("fp16(allreduce)", "bf16(allreduce)", "bf16(two_shot)")
"""What compression has to beat: half of the bytes, for the price of a cast."""

CANDIDATES = (
    "bucketize(quantize(two_shot))",
    "error_feedback(bucketize(quantize(two_shot, bits=4)))",
    "error_feedback(bucketize(sign(two_shot, chunk=256)))",
    "error_feedback(topk(bf16(allgather), ratio=0.01))",
    "error_feedback(topk(bf16(allgather), ratio=0.05))",
    "error_feedback(powersgd(bf16(allreduce), rank=1))",
    "error_feedback(powersgd(bf16(allreduce), rank=4))",
)
MARGIN = 0.02
"""A step that is shorter by less is not said to be: predictions are not better than that."""
SAME = 1e-4
"""Losses that differ by less, relative to them, are the same: rounding does that."""

Batch: TypeAlias = tuple[Tensor, ...]
Forward: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Problem:
    """Something to train.

    Attributes:
        make: A new module for a seed.
        loss: `loss(forward, batch)`: a rank's mean loss, a scalar. It calls `forward` as it would the module.
        batches: `batches(n, seed, steps)`: for each step tensors with a row for each rank, `[n, batch, ...]`.
        optimizer: Makes one for a list of tensors.
        quality: The final loss, of a function that stands for the trained module, in eval mode; None for the mean of
            the training losses of the last tenth of the steps.
    """

    make: Callable[[int], nn.Module]
    loss: Callable[[Forward, Batch], Tensor]
    batches: Callable[[int, int, int], Iterable[Batch]]
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
    quality: Callable[[Forward], float] | None = None

    def parameters(self) -> Leaves:
        """What is trained of a new module, by name."""
        return _trained(self.make(0))


@dataclass(frozen=True)
class Outcome:
    """What a pipeline costs, and what it does to the loss.

    Attributes:
        pipeline: Its expression.
        wire_bytes: What one rank hands to its collectives in a step, the mean over a period after all warm-ups.
        link_bytes: What one rank sends over its link in a step, likewise.
        step: The steps of such a period, predicted.
        losses: The final loss, by seed.
    """

    pipeline: str
    wire_bytes: int
    link_bytes: int
    step: MeanStep
    losses: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Of a step, in the mean."""
        return self.step.seconds

    @property
    def loss(self) -> float:
        """The mean over seeds; infinite where a training diverged."""
        mean = statistics.fmean(self.losses)
        return mean if math.isfinite(mean) else math.inf

    @property
    def spread(self) -> float:
        """Half of what lies between the best and the worst seed."""
        return (max(self.losses) - min(self.losses)) / 2 if math.isfinite(self.loss) else math.inf

    def beats(self, other: "Outcome") -> bool:
        """Whether `other` is no better in anything, and worse in something."""
        slack = SAME * abs(other.loss)
        is_no_worse = self.seconds <= other.seconds and self.loss <= other.loss + slack
        return is_no_worse and (self.seconds < other.seconds or self.loss < other.loss - slack)


@dataclass(frozen=True)
class Tuned:
    """What `tune` found.

    Attributes:
        outcomes: Of each pipeline, the fastest first.
        compute: Forward and backward, as measured.
        within: How much worse than the plain mean's a loss may be, relative to it.
    """

    outcomes: tuple[Outcome, ...]
    compute: Compute
    within: float

    @property
    def mean(self) -> Outcome:
        """The plain mean's."""
        return next(each for each in self.outcomes if each.pipeline == MEAN)

    @property
    def threshold(self) -> float:
        """The largest loss that is good enough; not finite where the plain mean diverged."""
        return self.mean.loss + self.within * abs(self.mean.loss)

    @property
    def good(self) -> tuple[Outcome, ...]:
        """Whose loss is good enough, the fastest first; none where the plain mean diverged, which is one otherwise."""
        is_known = math.isfinite(self.threshold)
        return tuple(each for each in self.outcomes if is_known and each.loss <= self.threshold)

    @property
    def pareto(self) -> tuple[Outcome, ...]:
        """What no other beats in time and loss."""
        return tuple(each for each in self.outcomes if not any(other.beats(each) for other in self.outcomes))

    @property
    def winner(self) -> Outcome:
        """The fastest whose loss is good enough, if it is faster than `plain` by `MARGIN`; `plain` otherwise.

        Without any whose loss is good enough it is the plain mean, which has diverged: see `doubt`.
        """
        return next((each for each in self.good if _is_faster(each, self.plain)), self.plain)

    @property
    def plain(self) -> Outcome:
        """What there is to beat: the fastest 16-bit wire that is good enough, if that beats the plain mean itself."""
        half = self.sixteen_bits
        return half if half is not None and _is_faster(half, self.mean) else self.mean

    @property
    def sixteen_bits(self) -> Outcome | None:
        """The fastest 16-bit wire whose loss is good enough."""
        return next((each for each in self.good if each.pipeline in SIXTEEN_BITS), None)

    @property
    def verdict(self) -> str:
        """The winner, and whether it is worth its while."""
        if not self.good:
            return "No winner: there is no loss to compare with"
        best, plain = self.winner, self.plain
        if best is plain:
            return f"Nothing beats {'the plain mean' if plain is self.mean else 'a 16-bit wire'}: {plain.pipeline}"
        ratio = f"{best.pipeline}: {plain.seconds / best.seconds:.2f}x as fast as {plain.pipeline}"
        return ratio if self.sixteen_bits else f"{ratio}; no 16-bit wire is good enough"

    @property
    def doubt(self) -> str | None:
        """What keeps the losses from telling pipelines apart; None if nothing does."""
        if not math.isfinite(self.mean.loss):
            return "the plain mean itself diverged: lower the learning rate"
        noise = self.mean.spread
        if len(self.mean.losses) < 2:
            return "one seed says nothing of the spread: give more"
        if noise > self.within * abs(self.mean.loss):
            relative = noise / abs(self.mean.loss)
            return f"seeds alone move the plain mean's loss by {relative:.1%}, more than {self.within:.1%}"
        return None


def _is_faster(one: Outcome, other: Outcome) -> bool:
    return one.seconds < (1 - MARGIN) * other.seconds


class Progress(NamedTuple):
    """So many runs of so many are done."""

    done: int
    of: int


def tune(
    problem: Problem,
    pipelines: Sequence[str] = CANDIDATES,
    *,
    link: Links,
    ranks: int,
    steps: int = 200,
    seeds: Sequence[int] = (0, 1, 2),
    within: float = 0.01,
    bucket_cap_mb: float = 25,
    threads: int = 1,
    tell: Callable[[Progress], None] = lambda _: None,
) -> Tuned:
    """Trains with each pipeline on `ranks` virtual ranks, costs a step of each on `link`, and compares.

    The plain mean and 16-bit wires are always among them. Losses are simulated (`fnddp.simulate_training`); times are
    predicted (`Plan.predict`), from forward, backward and each segment as measured here, on one rank's batch. The wrong
    judge for a cluster whose processors are not like this one's, for a loss that decides after more steps than these,
    and for a warm-up: it is trained with, but costed as if it were over.

    Args:
        problem: What is trained.
        pipelines: Their expressions.
        link: What connects the ranks.
        ranks: How many of them, n.
        steps: Training steps.
        seeds: A training for each, of the initial parameters and the batches; pipelines share them.
        within: How much worse than the plain mean's a loss may be, relative to it.
        bucket_cap_mb: MiB of gradients whose payloads travel together.
        threads: Of a rank, while it is timed.
        tell: Called after each training.

    Raises:
        ValueError: A pipeline does not parse, does not fit, or takes no mean; there is no step or no seed; `within` is
            negative.
        LoweringError: A pipeline has no plan.
    """
    if checked_int("tune: steps", steps) < 1 or checked_int("tune: ranks", ranks) < 1:
        raise ValueError(f"tune: steps and ranks must be at least 1, got {steps} and {ranks}")
    if not seeds:
        raise ValueError("tune: seeds must name at least one seed, such as (0, 1, 2), got none")
    if not 0 <= within < math.inf:
        raise ValueError(f"tune: within must be 0 or more, such as 0.01, got {within!r}")
    syncs = {repr(sync): sync for sync in map(parse, (MEAN, *SIXTEEN_BITS, *pipelines))}
    for sync in syncs.values():
        _require_mean(sync)
    model = problem.make(seeds[0])
    leaves = _trained(model)
    with _threads(threads):
        compute = _measured_backward(problem, model, leaves, ranks)
        costs = {text: cost(sync, leaves, link, ranks, compute, bucket_cap_mb) for text, sync in syncs.items()}
    runs = [(text, seed) for seed in seeds for text in syncs]
    losses: dict[str, list[float]] = {text: [] for text in syncs}
    for done, (text, seed) in enumerate(runs, start=1):
        losses[text].append(final_loss(problem, syncs[text], ranks, seed, steps))
        tell(Progress(done, len(runs)))
    outcomes = [replace(each, losses=tuple(losses[text])) for text, each in costs.items()]
    return Tuned(tuple(sorted(outcomes, key=lambda each: each.seconds)), compute, within)


def final_loss(problem: Problem, sync: Sync, n: int, seed: int, steps: int) -> float:
    """The loss that training with `sync` on `n` virtual ranks ends with."""
    model = problem.make(seed)

    def loss_fn(params: Leaves, *batch: Tensor) -> Tensor:
        return problem.loss(_forward(model, params), batch)

    # Fused attention has no rule for vmap, which would run it rank by rank, and warn.
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(seed)
        trained = simulate_training(
            loss_fn,
            _trained(model),
            problem.batches(n, seed, steps),
            sync,
            world_size=n,
            optimizer=problem.optimizer,
        )
    if problem.quality is None:
        return trained.losses[-max(1, steps // 10) :].mean().item()
    with torch.no_grad():
        return problem.quality(_forward(model.eval(), trained.params))


def cost(sync: Sync, leaves: Leaves, link: Links, n: int, compute: Compute, bucket_cap_mb: float) -> Outcome:
    """What a step of `sync` costs after all warm-ups, its segments measured here: the mean over what it repeats."""
    repeated = period(sync, leaves, world_size=n, arrival=compute.order, bucket_cap_mb=bucket_cap_mb)
    timed = [(each, measure_segments(each.plan, each.state)) for each in repeated]
    predicted = [(each.plan.predict(link, replace(compute, segments=own)), each.steps) for each, own in timed]
    step = MeanStep(tuple(predicted))
    return Outcome(repr(sync), round(step.wire_bytes), round(step.link_bytes), step, ())


def _measured_backward(problem: Problem, model: nn.Module, leaves: Leaves, n: int) -> Compute:
    batch = next(iter(problem.batches(n, 0, 1)))
    own = tuple(part[0] for part in batch)

    def loss_fn(params: Leaves) -> Tensor:
        return problem.loss(_forward(model, params), own)

    return measure_backward(loss_fn, leaves)


def _require_mean(sync: Sync) -> None:
    if not sync.ops:
        raise ValueError(f"tune: {sync!r} exchanges nothing, so ranks would train apart; name one with a reducer in it")


def _forward(model: nn.Module, params: Any) -> Forward:
    return lambda *inputs: functional_call(model, params, inputs)


def _trained(model: nn.Module) -> Leaves:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


@contextmanager
def _threads(n: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
