"""Time and loss together: which pipeline ends near the plain mean's loss, in the shortest step."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from fnddp.core.options import checked_int
from fnddp.core.parse import parse
from fnddp.core.sync import Sync
from fnddp.core.tree import Leaves
from fnddp.cost.estimate import Links
from fnddp.cost.step import Compute, MeanStep
from fnddp.plan.period import period
from fnddp.run.measure import measure_segments
from fnddp.simulate.tune.outcome import MEAN, SIXTEEN_BITS, Outcome, Tuned
from fnddp.simulate.tune.problem import Problem, backward_of, final_loss, trained

CANDIDATES = (
    "bucketize(quantize(two_shot))",
    "error_feedback(bucketize(quantize(two_shot, bits=4)))",
    "error_feedback(bucketize(sign(two_shot, chunk=256)))",
    "error_feedback(topk(bf16(allgather), ratio=0.01))",
    "error_feedback(topk(bf16(allgather), ratio=0.05))",
    "error_feedback(powersgd(bf16(allreduce), rank=1))",
    "error_feedback(powersgd(bf16(allreduce), rank=4))",
)


class Progress(NamedTuple):
    """The number of trainings that are done, and of all."""

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
    """Train with each pipeline on `ranks` virtual ranks, cost a step of each on `link`, and compare.

    The plain mean and 16-bit wires are always among them. Losses are simulated (`fnddp.simulate_training`); times are
    predicted (`Plan.predict`), from forward, backward and each segment as measured here, on one rank's batch. The wrong
    judge at a learning rate that is not the plain mean's best (all train at one, and the order may be another at
    another); for a cluster whose processors are not like this one's, or are shared by ranks; for a loss that decides
    after more steps than these; and for a warm-up: it is trained with, but costed as if it were over.

    Args:
        problem: The model, batches and loss.
        pipelines: Expressions.
        link: The connection of the ranks.
        ranks: Number of virtual ranks.
        steps: Number of training steps.
        seeds: A training for each, of the initial parameters and the batches; pipelines share them.
        within: How much worse than the plain mean's a loss may be, relative to it.
        bucket_cap_mb: MiB of gradients whose payloads travel together.
        threads: Number of threads of a rank, while it is timed.
        tell: Called after each training.

    Raises:
        ValueError: A pipeline does not parse, does not fit, names a group, or takes no mean; there is no step or no
            seed; `within` is negative.
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
    leaves = trained(problem.make(0))
    with _threads(threads):
        compute = backward_of(problem, ranks)
        costs = {text: cost(sync, leaves, link, ranks, compute, bucket_cap_mb) for text, sync in syncs.items()}
    runs = [(text, seed) for seed in seeds for text in syncs]
    losses: dict[str, list[float]] = {text: [] for text in syncs}
    for done, (text, seed) in enumerate(runs, start=1):
        losses[text].append(final_loss(problem, syncs[text], ranks, seed, steps))
        tell(Progress(done, len(runs)))
    outcomes = [replace(each, losses=tuple(losses[text])) for text, each in costs.items()]
    return Tuned(tuple(sorted(outcomes, key=lambda each: each.seconds)), compute, within)


def cost(sync: Sync, leaves: Leaves, link: Links, n: int, compute: Compute, bucket_cap_mb: float) -> Outcome:
    """Return the cost of a step of `sync` after all warm-ups, the mean over its period; measure its segments here."""
    repeated = period(sync, leaves, world_size=n, arrival=compute.order, bucket_cap_mb=bucket_cap_mb)
    timed = [(each, measure_segments(each.plan, each.state)) for each in repeated]
    predicted = [(each.plan.predict(link, replace(compute, segments=own)), each.steps) for each, own in timed]
    step = MeanStep(tuple(predicted))
    return Outcome(repr(sync), round(step.wire_bytes), round(step.link_bytes), step, ())


def _require_mean(sync: Sync) -> None:
    if named := [group for group in sync.groups or () if group is not None]:
        raise ValueError(
            f"tune: {sync!r} reduces over process group {sorted(named)[0]!r}, but tune's virtual ranks are one group; "
            "leave it out, or cost the pipeline with lower(sync, params, world_size={...}).predict(link, compute)"
        )
    if not sync.ops:
        raise ValueError(f"tune: {sync!r} exchanges nothing, so each rank would train alone; add a reducer")


@contextmanager
def _threads(n: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
