"""Find the pipeline with the shortest step among those with a final loss near the plain mean's. See `fnddp tune`."""

import ast
import math
import statistics
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fnddp.core.options import checked_int
from fnddp.core.parse import parse
from fnddp.core.sync import Sync, all_in
from fnddp.core.syntax import expression_of
from fnddp.core.tree import Leaves
from fnddp.cost.estimate import Compute, Links, MeanStepCost
from fnddp.plan.period import period
from fnddp.plan.plan import Plan
from fnddp.run.choose import MARGIN, choice
from fnddp.run.choose_owned import Hops, Pair, choose_owned, owned_plans
from fnddp.run.hops import first_hop, is_muon, second_hop, several
from fnddp.run.measure import measure_backward, measure_segments
from fnddp.schedules.choose import warmup
from fnddp.show.text import count
from fnddp.simulation.training import simulate_training
from fnddp.transforms.memory import shared_momentum, without_momentum

Batch: TypeAlias = tuple[Tensor, ...]
Forward: TypeAlias = Callable[..., Any]  # a module, or a function that runs it with other parameters
Loss: TypeAlias = Callable[[Forward, Batch], Tensor]

ADAMW = partial(torch.optim.AdamW, lr=1e-3)

MEAN = "allreduce"
SIXTEEN_BITS = ("fp16(allreduce)", "bf16(allreduce)", "bf16(two_shot)")
"""Pipelines that compression has to beat: half of the bytes, for the price of a cast."""

SAME = 1e-4
"""Losses with a smaller relative difference count as equal: rounding alone makes such differences."""

SMALL = 1 << 20
"""Elements of a model below which several threads do not make training faster; if other processes use their cores, they
make it many times as slow."""


@dataclass(frozen=True)
class Compared:
    """A kind of pipelines that `tune` compares: means, or both hops of owners."""

    plain: str  # the lossless pipeline; others must match its loss
    called: str  # the same in words
    halves: tuple[str, ...]  # the pipelines that send 16 bits
    chooser: str  # the name of the automatic choice, made without training
    use: str  # the code that uses one, with `{}` for its texts


MEANS = Compared(MEAN, "the plain mean", SIXTEEN_BITS, 'sync="auto"', "sync={}")
OWNERS = Compared(
    "two_shot, allgather",
    "exact hops",
    ("bf16(two_shot), allgather", "bf16(two_shot), ef21(bf16(allgather))"),
    "fnddp.choose_owned",
    "fnddp.own(model, optimizer, {})",
)

CANDIDATES = (
    "bucketize(quantize(two_shot))",
    "bucketize(quantize(two_shot, bits=4))",
    "error_feedback(bucketize(quantize(two_shot, bits=4)))",
    "error_feedback(topk(bf16(allgather), ratio=0.01))",
    "error_feedback(topk(bf16(allgather), ratio=0.05))",
    "error_feedback(powersgd(bf16(allreduce), rank=4))",
    "error_feedback(powersgd(bf16(allreduce), rank=8))",
)

CANDIDATES_OF_HOPS = (
    "error_feedback(quantize(two_shot)), ef21(quantize(allgather))",
    "error_feedback(quantize(two_shot, bits=4)), ef21(quantize(allgather, bits=4))",
    "error_feedback(lloyd_max(two_shot, bits=3)), ef21(lloyd_max(allgather, bits=3))",
    "error_feedback(lloyd_max(two_shot, bits=2)), ef21(lloyd_max(allgather, bits=2))",
    "error_feedback(quantize(two_shot, bits=4)), ef21(lloyd_max(allgather, bits=2))",
)

Way: TypeAlias = Sync | Hops
"""The pipeline of a training: a mean, or both hops of owners."""


def way_of(text: str, *, own: bool) -> Way:
    """Return the pipeline, or with `own` both hops: "GRADIENTS, WEIGHTS", as `fnddp.own` takes them.

    Raises:
        ValueError: It does not parse, or there are not two hops.
        TypeError: `own` does not take it.

    >>> print(*way_of("quantize(two_shot, bits=4), allgather", own=True))
    quantize(two_shot, bits=4) allgather
    """
    if not own:
        return parse(text)
    _, both = expression_of(text)
    hops = [ast.unparse(hop) for hop in both.elts] if isinstance(both, ast.Tuple) else []
    if len(hops) != 2:
        raise ValueError(
            f"{text!r} must be two pipelines, as fnddp.own takes them: 'GRADIENTS, WEIGHTS', such as {OWNERS.plain!r}"
        )
    return Hops(first_hop("tune", hops[0]), second_hop("tune", hops[1]))


def text_of(way: Way) -> str:
    """Return the text from which `way_of` makes `way`: its inverse."""
    return ", ".join(map(repr, syncs_of(way)))


def syncs_of(way: Way) -> tuple[Sync, ...]:
    """Return the pipeline, or that of each hop."""
    return (way,) if isinstance(way, Sync) else tuple(way)


@dataclass(frozen=True)
class Problem:
    """A model, batches and a loss: the input of `tune` and of all commands.

    Attributes:
        build: A function that makes a new module. Its initial values depend on torch's global seed.
        loss: `loss(forward, batch)`: a rank's mean loss, a scalar. It calls `forward` like the module.
        batch: `batch(rank, ranks, generator)`: the next batch of one of `ranks` ranks.
        optimizer: A function that makes one for a list of tensors, in the order of the module's parameters, with `lr`
            for another learning rate; or several, each for a part, such as Muon for matrices and AdamW for the rest.
        quality: A function that takes the trained module, or a function in its place, in eval mode, and returns the
            final loss; None for the mean of the training losses in the last tenth of the steps.
        accuracy: A function of the same that returns the share of held-out data classified correctly; None without it.
    """

    build: Callable[[], nn.Module]
    loss: Loss
    batch: Callable[[int, int, torch.Generator], Batch]
    optimizer: Callable[..., torch.optim.Optimizer | Sequence[torch.optim.Optimizer]] = ADAMW
    quality: Callable[[Forward], float] | None = None
    accuracy: Callable[[Forward], float] | None = None

    def make(self, seed: int) -> nn.Module:
        """Make a new module that depends only on `seed`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()

    def batches(self, n: int, seed: int, steps: int) -> Iterator[Batch]:
        """Yield for each step tensors with a row for each rank, `[n, batch, ...]`."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            rows = [self.batch(rank, n, generator) for rank in range(n)]
            yield tuple(torch.stack(parts) for parts in zip(*rows, strict=True))

    def loss_of(self, module: nn.Module) -> Callable[..., Tensor]:
        """Return the loss as a function of the parameters of `module`, and a batch."""

        def of_parameters(params: Leaves, *batch: Tensor) -> Tensor:
            return self.loss(standing_for(module, params), batch)

        return of_parameters


def trained(module: nn.Module) -> Leaves:
    """Return the parameters that require gradients, by name."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def standing_for(module: nn.Module, params: Any) -> Forward:
    """Return a function that runs `module` with other parameters."""
    return lambda *inputs: functional_call(module, params, inputs)


def final_loss(
    problem: Problem, way: Way, n: int, seed: int, steps: int, tell: Callable[[int], None] = lambda step: None
) -> float:
    """Return the final loss of a training with `way` on `n` virtual ranks; call `tell` before each step."""
    model = problem.make(seed)

    def batches() -> Iterator[Batch]:
        for step, batch in enumerate(problem.batches(n, seed, steps)):
            tell(step)
            yield batch

    sync, *weights = syncs_of(way)
    # Fused attention has no rule for vmap: vmap would run it rank by rank, and warn.
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(seed)
        done = simulate_training(
            problem.loss_of(model),
            trained(model),
            batches(),
            sync,
            weights=weights[0] if weights else None,
            world_size=n,
            optimizer=partial(_optimizers, problem, sync),
        )
    if problem.quality is None:
        return done.losses[-max(1, steps // 10) :].mean().item()
    with torch.no_grad():
        return float(problem.quality(standing_for(model.eval(), done.params)))


def _optimizers(problem: Problem, sync: Sync, params: list[Tensor]) -> list[torch.optim.Optimizer]:
    """Return the optimizers of `problem`; without momentum of their own if the pipeline has momentum."""
    made = several(problem.optimizer(params))
    for each in all_in(sync):
        if isinstance(each, shared_momentum):
            try:
                return [without_momentum(optimizer, each.beta) for optimizer in made]
            except TypeError as error:
                raise ValueError(f"tune: {sync!r} gives a momentum; {error}") from error
    return made


STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t at 95 %, by degrees of freedom from 1 on; 2.1 beyond."""

MOST_SEEDS = 30
"""The largest number of trainings with each pipeline that is worth proposing."""


class Gap(NamedTuple):
    """A pipeline's final losses minus the plain mean's, by seed: both trained from the same parameters and batches."""

    gaps: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.gaps)

    @property
    def spread(self) -> float:
        """The standard deviation over seeds."""
        return statistics.stdev(self.gaps) if len(self.gaps) > 1 and math.isfinite(self.mean) else 0.0

    @property
    def half(self) -> float:
        """Half the width of the 95 % confidence interval of the mean over all seeds, by Student's t."""
        return self._half(len(self.gaps))

    def is_within(self, most: float) -> bool:
        """Return True if the seeds show with confidence that the mean is at most `most`."""
        return not any(self.gaps) or self.mean + self.half <= most

    def is_above(self, most: float) -> bool:
        """Return True if the seeds show with confidence that the mean is above `most`, or a training diverged."""
        return not math.isfinite(self.mean) or self.mean - self.half > most

    def seeds_to_tell(self, most: float) -> int | None:
        """Return how many seeds would decide, if mean and spread did not change; None for too many."""
        if len(self.gaps) < 2:
            return 3
        more = range(len(self.gaps) + 1, MOST_SEEDS + 1)
        return next((n for n in more if self._half(n) < abs(most - self.mean)), None)

    def _half(self, n: int) -> float:
        quantile = (*STUDENT[n - 2 : n - 1], 2.1)[0]
        return quantile * self.spread / math.sqrt(n) if n > 1 else math.inf

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.spread:.3f}" if math.isfinite(self.mean) else "diverged"


@dataclass(frozen=True)
class Outcome:
    """The costs of a pipeline, and the final losses of training with it.

    Attributes:
        pipeline: The pipeline, as text.
        wire_bytes: Bytes that one rank passes to its collectives in a step, the mean over a period after all warm-ups.
        link_bytes: Bytes that one rank sends over its link in a step, the same mean.
        step: The predicted steps of such a period.
        losses: The final loss, by seed.
    """

    pipeline: str
    wire_bytes: int
    link_bytes: int
    step: MeanStepCost
    losses: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The mean time of a step."""
        return self.step.seconds

    @property
    def loss(self) -> float:
        """The mean over seeds; infinite where a training diverged."""
        mean = statistics.fmean(self.losses)
        return mean if math.isfinite(mean) else math.inf

    @property
    def spread(self) -> float:
        """Half the distance between the best and the worst seed."""
        return (max(self.losses) - min(self.losses)) / 2 if math.isfinite(self.loss) else math.inf

    def as_json(self) -> dict[str, Any]:
        """Return the costs as a dictionary of JSON values."""
        parts = ("encode", "decode", "communication", "exposed")
        times = {f"{part}_seconds": getattr(self.step, f"{part}_seconds") for part in parts}
        sizes = {"wire_bytes": self.wire_bytes, "link_bytes": self.link_bytes}
        return {"pipeline": self.pipeline, **sizes, "step_seconds": self.seconds, **times}

    def beats(self, other: "Outcome") -> bool:
        """Return True if this is no worse than `other` in time and loss, and better in one of them."""
        slack = SAME * abs(other.loss)
        is_no_worse = self.seconds <= other.seconds and self.loss <= other.loss + slack
        return is_no_worse and (self.seconds < other.seconds or self.loss < other.loss - slack)


@dataclass(frozen=True)
class Tuned:
    """The findings of `tune`.

    Attributes:
        outcomes: The outcome of each pipeline, the fastest first.
        compute: Measured times of forward and backward.
        within: Largest excess of a loss over the plain mean's that is good enough, in units of the loss.
        chosen: The choice of `sync="auto"` or `choose_owned` on the link; None if `choose_owned` lacks Muon.
        among: The pipelines that may win; None for all.
        kind: Means, or both hops of owners.
    """

    outcomes: tuple[Outcome, ...]
    compute: Compute
    within: float
    chosen: str | None = MEAN
    among: Collection[str] | None = None
    kind: Compared = MEANS

    def of(self, pipeline: str) -> Outcome:
        """Return the outcome of `pipeline`."""
        return next(each for each in self.outcomes if each.pipeline == pipeline)

    @property
    def mean(self) -> Outcome:
        """The outcome of the plain mean, or of exact hops."""
        return self.of(self.kind.plain)

    def gap(self, of: Outcome) -> Gap:
        """Return the losses of `of` minus the plain mean's."""
        return Gap(tuple(loss - mean for loss, mean in zip(of.losses, self.mean.losses, strict=True)))

    @property
    def good(self) -> tuple[Outcome, ...]:
        """Outcomes with a loss surely within, the fastest first; empty if the plain mean diverged."""
        is_known = math.isfinite(self.mean.loss)
        return tuple(each for each in self.outcomes if is_known and self.gap(each).is_within(self.within))

    @property
    def unclear(self) -> tuple[Outcome, ...]:
        """Outcomes with too few seeds to decide whether their loss is within."""
        is_known, good = math.isfinite(self.mean.loss), self.good
        gaps = [(each, self.gap(each)) for each in self.outcomes if is_known and each not in good]
        return tuple(each for each, gap in gaps if not gap.is_above(self.within))

    @property
    def pareto(self) -> tuple[Outcome, ...]:
        """Outcomes that are not beaten by another in time and loss."""
        return tuple(each for each in self.outcomes if not any(other.beats(each) for other in self.outcomes))

    @property
    def winner(self) -> Outcome | None:
        """The fastest pipeline with a loss surely within; None if losses do not decide.

        Within `MARGIN` of its time, the choice of `sync="auto"`, the plain mean or a cast wins, in this order.
        """
        best = self._best
        return None if best is None or self._doubtful else best

    def _may_win(self, each: Outcome) -> bool:
        return self.among is None or each.pipeline in self.among

    @property
    def _best(self) -> Outcome | None:
        good = [*filter(self._may_win, self.good)]
        near = [each for each in good if (1 - MARGIN) * each.seconds <= good[0].seconds]
        order = (self.chosen, self.kind.plain, *self.kind.halves)
        ranked = [(order.index(each.pipeline) if each.pipeline in order else len(order), each) for each in near]
        return min(ranked, key=lambda pair: pair[0])[1] if ranked else None

    @property
    def _doubtful(self) -> list[Outcome]:
        """Unclear outcomes that could change the winner."""
        best, unclear = self._best, [*filter(self._may_win, self.unclear)]
        faster = [each for each in unclear if best and each.seconds < (1 - MARGIN) * best.seconds]
        return [each for each in unclear if each in faster or each.pipeline == self.chosen]

    @property
    def verdict(self) -> str:
        """The winner in words, and its speed-up; or the reason why there is no winner, and which option to raise."""
        best, kind = self.winner, self.kind
        if best is None:
            return f"Undecided: {self.doubt}"
        if best is self.mean:
            return f"Nothing beats {kind.called}: {kind.plain}"
        said = f"{best.pipeline}: {self.mean.seconds / best.seconds:.2f}x as fast as {kind.called}"
        if best.pipeline in kind.halves:
            return f"Nothing beats a 16-bit wire: {said}"
        half = next((each for each in self.good if each.pipeline in kind.halves), None)
        return f"{said}, {half.seconds / best.seconds:.2f}x as {half.pipeline}" if half else said

    def usage(self, of: Outcome) -> str:
        """Return the code that uses a pipeline, or both hops."""
        way = way_of(of.pipeline, own=self.kind == OWNERS)
        return self.kind.use.format(", ".join(f'"{sync!r}"' for sync in syncs_of(way)))

    @property
    def doubt(self) -> str | None:
        """The reason why the losses do not decide, and which option to raise; None if they do."""
        if not math.isfinite(self.mean.loss):
            return f"training with {self.kind.called} diverged; lower --rate"
        if not self._doubtful:
            return None
        names = " and ".join(each.pipeline for each in self._doubtful)
        wanted = [self.gap(each).seeds_to_tell(self.within) or math.inf for each in self._doubtful]
        enough = f"raise --seeds to {max(wanted)}" if math.inf not in wanted else ""
        return (
            f"{count(len(self.mean.losses), 'seed')} cannot tell whether the loss of {names} is within "
            f"{self.within:.3g} of that of {self.kind.called}; {enough or 'double --steps, or give another --within'}"
        )

    @property
    def notes(self) -> list[str]:
        """Notes that compare the winner with the choice of `sync="auto"`, or name faster pipelines that may not win."""
        takes, best = f"{self.kind.chooser} takes {self.chosen} on this link", self.winner
        if self.chosen is None:
            notes = list[str]()
        elif best is None or best.pipeline == self.chosen:
            notes = [f"{takes}{', too' if best else ''}"]
        elif self.of(self.chosen) not in self.good:
            notes = [f"{takes}, which ends {self.gap(self.of(self.chosen)).mean:.3g} above {self.kind.called} here"]
        else:
            notes = [f"{takes}: it knows neither your losses nor how long backward takes"]
        faster = replace(self, among=None).winner
        if best is not None and faster is not None and faster is not best and not self._may_win(faster):
            ratio = f"{best.seconds / faster.seconds:.2f}x as fast as {best.pipeline}"
            notes.append(f"For this model only, {faster.pipeline} loses as little, {ratio}: try --model with your own")
        return notes


def tune(
    problem: Problem,
    pipelines: Sequence[str] | None = None,
    *,
    own: bool = False,
    link: Links,
    ranks: int,
    steps: int = 200,
    seeds: Sequence[int] = (0, 1, 2),
    within: float | str = 0.01,
    bucket_cap_mb: float = 25,
    threads: int = 1,
    among: Collection[str] | None = None,
    tell: Callable[[str, int, int], None] = lambda does, done, of: None,
    found: Callable[["Tuned", int], None] = lambda tuned, seeds: None,
) -> Tuned:
    """Train with each pipeline on `ranks` virtual ranks, predict the time of a step on `link`, and compare.

    Always includes the plain mean, 16-bit wires and the choice of `sync="auto"`; with `own` exact hops, hops of 16 bits
    and the choice of `fnddp.choose_owned`. Losses are simulated (`fnddp.simulate_training`). Times are predicted
    (`Plan.predict`) from forward, backward and each segment, measured here on one rank's batch, without the optimizer.
    The wrong choice at a learning rate that is not the plain mean's best, because all pipelines train at it; for a
    cluster with other or shared processors; if losses differ only later; and for warm-ups: predicted times omit these.

    Args:
        problem: The model, batches and loss.
        pipelines: Pipelines, as text; None for the usual ones.
        own: True to compare both hops of `fnddp.own`: each text is then "GRADIENTS, WEIGHTS".
        link: The connection of the ranks.
        ranks: Number of virtual ranks.
        steps: Number of training steps.
        seeds: Seeds of the initial parameters and batches; each pipeline is trained once with each seed.
        within: Largest excess over the plain mean's loss that is good enough: in units of the loss, such as 0.01 nats,
            or, as text, relative to that loss, such as "1%".
        bucket_cap_mb: MiB of gradients in one message; hops of owners use the default of `own`.
        threads: Number of threads of a rank during timing.
        among: The pipelines that may win; None for all.
        tell: Callback before each timing and training step: a description, the number done, and their total number.
        found: Callback after each seed: the findings so far, and the number of seeds.

    Raises:
        TypeError: `fnddp.own` does not take a hop or an optimizer.
        ValueError: A pipeline does not parse, does not fit, names a group, or is not a mean; there are no steps or no
            seeds; `within` is negative; a warm-up is as long as the training.
        LoweringError: A pipeline has no plan.
    """
    if checked_int("tune: steps", steps) < 1 or checked_int("tune: ranks", ranks) < 1:
        raise ValueError(f"tune: steps and ranks must be at least 1, got {steps} and {ranks}")
    if not seeds:
        raise ValueError("tune: seeds must name at least one seed, such as (0, 1, 2), got none")
    excess, is_relative = most_of(within)
    kind = OWNERS if own else MEANS
    if pipelines is None:
        pipelines = CANDIDATES_OF_HOPS if own else CANDIDATES
    model = problem.make(0)
    leaves, batch = trained(model), next(problem.batches(ranks, 0, 1))
    made = several(problem.optimizer([p for p in model.parameters() if p.requires_grad])) if own else []
    chosen = None if own else choice(leaves, link, world_size=ranks).taken
    if any(map(is_muon, made)):  # the study's losses were measured with Muon
        chosen = text_of(choose_owned(model, made, link, world_size=ranks))
    texts = (kind.plain, *kind.halves, *([] if chosen is None else [chosen]), *pipelines)
    ways = {text_of(way): way for way in (way_of(text, own=own) for text in texts)}
    for sync in (sync for way in ways.values() for sync in syncs_of(way)):
        _require_fit(sync, steps, own=own)
    for way in ways.values():
        _optimizers(problem, syncs_of(way)[0], [*leaves.values()])  # raises if they do not fit
    with on_threads(threads):
        tell("timing forward and backward", 0, len(ways))
        compute = measure_backward(problem.loss_of(model), leaves, *(part[0] for part in batch))
        pairs = [Pair(repr(way.gradients), repr(way.weights)) for way in ways.values() if isinstance(way, Hops)]
        plans = [*owned_plans("tune", model, made, pairs, ranks, device=None).values()] if own else []
        measured: dict[int, tuple[float, ...]] = {}
        costs: list[Outcome] = []
        for i, (text, way) in enumerate(ways.items()):
            tell(f"timing {text}", i, len(ways))
            if isinstance(way, Sync):
                costs.append(cost(way, leaves, link, ranks, compute, bucket_cap_mb))
            else:
                costs.append(_cost_of_hops(text, *plans[i], link, compute, measured))
    losses: dict[str, list[float]] = {text: [] for text in ways}

    def tuned() -> Tuned:
        outcomes = [replace(each, losses=tuple(losses[each.pipeline])) for each in costs]
        allowed = excess * (abs(statistics.fmean(losses[kind.plain])) if is_relative else 1.0)
        return Tuned(tuple(sorted(outcomes, key=lambda each: each.seconds)), compute, allowed, chosen, among, kind)

    for i, (seed, (text, way)) in enumerate(product(seeds, ways.items())):

        def tell_step(step: int, run: int = i, does: str = f"training {text}, seed {seed}") -> None:
            tell(does, run * steps + step, len(seeds) * len(ways) * steps)

        with on_threads(1 if sum(map(Tensor.numel, leaves.values())) < SMALL else torch.get_num_threads()):
            losses[text].append(final_loss(problem, way, ranks, seed, steps, tell_step))
        trained_seeds, left = divmod(i + 1, len(ways))
        if not left:
            found(tuned(), trained_seeds)
    return tuned()


def most_of(within: float | str) -> tuple[float, bool]:
    """Return `within` (0.01, "0.01" or "1%") as a number, and True if it is relative.

    Raises:
        ValueError: `within` has another form.

    >>> most_of("1%"), most_of(0.01)
    ((0.01, True), (0.01, False))
    """
    text = str(within)
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"within must be 0 or a positive number, such as 0.01 or 1%, got {within!r}")
    return (number / 100, True) if text.endswith("%") else (number, False)


def cost(sync: Sync, leaves: Leaves, link: Links, n: int, compute: Compute, bucket_cap_mb: float = 25) -> Outcome:
    """Return the cost of a step of `sync` after all warm-ups, the mean over its period; measure its segments here."""
    repeated = period(sync, leaves, world_size=n, arrival=compute.order, bucket_cap_mb=bucket_cap_mb)
    timed = [(each, measure_segments(each.plan, each.state)) for each in repeated]
    predicted = [(each.plan.predict(link, replace(compute, segments=own)), each.steps) for each, own in timed]
    step = MeanStepCost(tuple(predicted))
    return Outcome(repr(sync), round(step.wire_bytes), round(step.link_bytes), step, ())


def _cost_of_hops(
    text: str, first: Plan, back: Sequence[Plan], link: Links, compute: Compute, measured: dict[int, tuple[float, ...]]
) -> Outcome:
    """Return the cost of a step; `measured` has the segments of plans by their id, because pairs may share hops."""
    for plan in (first, *back):
        if id(plan) not in measured:
            measured[id(plan)] = measure_segments(plan)
    step = first.predict(link, replace(compute, segments=measured[id(first)]))
    for plan in back:  # it overlaps with no backward
        step = step.followed_by(plan.predict(link, Compute(segments=measured[id(plan)])))
    return Outcome(text, step.wire_bytes, step.link_bytes, MeanStepCost(((step, 1),)), ())


def _require_fit(sync: Sync, steps: int, *, own: bool) -> None:
    if named := [group for group in sync.groups or () if group is not None]:
        raise ValueError(
            f"tune: {sync!r} reduces over process group {sorted(named)[0]!r}, but tune's virtual ranks form one group; "
            "remove it, or cost the pipeline with lower(sync, params, world_size={...}).predict(link, compute)"
        )
    if not sync.ops:
        raise ValueError(f"tune: {sync!r} exchanges nothing, so ranks would train independently; add a reducer")
    for each in all_in(sync):
        if isinstance(each, warmup) and own:
            raise ValueError(f"tune: {sync!r} begins with another hop, but tune costs the first step; remove warmup")
        if isinstance(each, warmup) and each.steps >= steps:
            raise ValueError(
                f"tune: {sync!r} warms up for {each.steps} steps, so a training of {steps} steps does not test the "
                f"steps after warm-up; give more steps, such as {3 * each.steps}, or remove warmup"
            )


@contextmanager
def on_threads(n: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
