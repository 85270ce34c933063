"""The laws that every pipeline keeps, as functions, to test the transforms of this package or your own.

A law is a function of `(rank, sync, grads)` that every rank runs. `sync` is a pipeline over the default group, and
`grads(rank, step)` returns a rank's gradients in a step, the same at each call. `check` runs all laws that apply.
"""

import copy
import functools
import io
import math
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp.core import tree
from fnddp.core.codec import Codec
from fnddp.core.parse import parse, pipeline_of
from fnddp.core.state import describe, load_state_dict, parts, state_dict
from fnddp.core.sync import REPLICATED, Exchange, State, Sync, all_in, registry
from fnddp.core.tree import Leaves, Tree
from fnddp.ir.program import LeafSpec
from fnddp.plan.draft import Donation
from fnddp.plan.lower import Traces
from fnddp.reducers.halves import to_all, to_owners
from fnddp.run.engine import Engine, Synchronized
from fnddp.simulation.ranks import RankFailed, run_threads
from fnddp.simulation.simulate import simulate
from fnddp.torch_private import TorchDispatchMode
from fnddp.transforms.cast import cast
from fnddp.transforms.memory import error_feedback
from fnddp.transforms.weighted import weighted
from fnddp.wire.groups import current, within, world_size
from fnddp.wire.weights import Weight

Grads: TypeAlias = Callable[[int, int], Tree]
"""Type of `grads(rank, step)`: a rank's gradients in a step. Tree, shapes and dtypes are equal on all ranks."""

Law: TypeAlias = Callable[[int, Sync, Grads], None]

STEPS = 4

# Memory that a step may write over, in jit, value_and_grad, DistributedDataParallel and register.
DONATIONS = (Donation(), Donation("yes"), Donation("yes", True), Donation("at_end", True))
SMALL_BUCKETS = (200, 500)  # bytes; a few small leaves then fill several buckets


class LawError(AssertionError):
    """A pipeline breaks a law. The message names the law, the rank, the number of ranks, the leaf and the error."""


def check(
    sync: Sync | str,
    *,
    ranks: Sequence[int] = (1, 2, 3, 4),
    grads: Grads | None = None,
    on: Literal["threads", "gloo"] = "threads",
) -> None:
    """Check that `sync` keeps every law that applies to it.

    Law 5 (the exact mean) applies if nothing is lost, law 8 (error feedback) to means, law 9 (text) to registered
    transforms, law 11 (weights) to means over one group. Law 12 applies to `to_owners`, and replaces the laws about
    means that all ranks have. A pipeline that cannot be lowered runs whole, after all gradients have come. Sums over
    several ranks may differ by roundings of the leaf's dtype, of float32, and of each `cast` in the pipeline.

    Args:
        sync: A pipeline over the default group, or its text, such as `my_transform(allreduce)`. Try several nestings.
        ranks: World sizes to try, on threads. Include some above 1, because one rank cannot disagree with another.
        grads: `grads(rank, step)`: a rank's gradients in that step, the same at each call. None for trees of 0 to 9
            leaves: matrices and a channels-last convolution; all dtypes including integers and bools; a bare tensor.
        on: "threads" of this process, or "gloo" for the ranks of the default process group. All of them must call
            it (without a group, this process is the only rank). On threads sums are in rank order, so law 6 holds
            bitwise; a ring of more than two ranks has another order, and law 6 holds up to rounding.

    Raises:
        LawError: A law is broken.
        RankFailed: `sync` itself raised on a rank, or took more than three minutes.

    >>> import fnddp
    >>> check(fnddp.fp16(fnddp.allreduce), ranks=(1, 2))
    """
    sync = pipeline_of("check: sync", sync)
    for of_rank in TREES.values() if grads is None else [grads]:
        if on == "gloo":
            check_on_rank(dist.get_rank() if dist.is_initialized() else 0, sync, of_rank)
            continue
        for n in ranks:
            try:
                run_threads(n, check_on_rank, sync, of_rank)
            except RankFailed as failed:
                broken = [error for error in failed.errors.values() if isinstance(error, LawError)]
                raise broken[0] if broken else failed from None


def check_on_rank(rank: int, sync: Sync, grads: Grads, traces: Traces | None = None) -> None:
    """Check all laws that apply, on one rank of several. The ranks may share `traces`."""
    for law in LAWS:
        if applies(law, sync) and (law is not law_5_lossless_is_exact or loses_nothing(rank, sync, grads)):
            law(rank, sync, grads, **({"traces": traces} if law in LOWERED else {}))


def applies(law: Law, sync: Sync) -> bool:
    """Return True if `law` is about pipelines such as `sync`. Law 5 also needs a pipeline that `loses_nothing`."""
    halves = {type(each) for each in all_in(sync)} & {to_owners, to_all}
    if law in (law_1_outputs_are_like_inputs, law_12_what_owners_have_is_the_mean):
        return (to_owners in halves) == (law is law_12_what_owners_have_is_the_mean)
    if halves and law in (law_5_lossless_is_exact, law_10_simulated_is_real, law_11_weighted_is_pooled):
        return False
    if not sync.agrees and law in (
        law_2_all_ranks_get_the_same_bits,
        law_4_sent_reduces_to_mean,
        law_5_lossless_is_exact,
        law_8_error_feedback_loses_nothing,
    ):  # about means that all ranks have
        return False
    if sync.takes_weight and law in (
        law_5_lossless_is_exact,
        law_8_error_feedback_loses_nothing,
        law_11_weighted_is_pooled,
    ):
        return False
    if law in (law_4_sent_reduces_to_mean, law_5_lossless_is_exact):
        return len(sync.ops) == 1 and sync.sent_is_exact
    if law is law_8_error_feedback_loses_nothing:
        return sync.ops == {"mean"} and sync.sent_is_exact and _remembering(sync) is not None
    if law is law_10_simulated_is_real:
        return sync.traceable and sync.groups is not None and sync.groups <= {None}
    if law is law_11_weighted_is_pooled:
        return sync.ops == {"mean"} and sync.groups is not None and len(sync.groups) == 1
    return law is not law_9_text_parses_back or _is_registered(sync)


def loses_nothing(rank: int, sync: Sync, grads: Grads) -> bool:
    """Return True if `sent` is bitwise equal to the input, on all ranks and in all steps."""
    same = [bits(done.sent) == bits(leaves) for leaves, done in _exchanges(sync, grads, rank)]
    return all(gather(all(same)))


def _is_registered(sync: Sync) -> bool:
    known = registry.get(type(sync).__name__)
    return known is type(sync) and all(_is_registered(child) for child in sync.children())


LAWS: list[Law] = []


def _stated(law: Callable[..., None]) -> Callable[..., None]:
    """Add `law` to the list of laws, and the law, the pipeline and the number of ranks to each error that it raises."""

    @functools.wraps(law)
    def checked(rank: int, sync: Sync, grads: Grads, **options: Any) -> None:
        number, name = law.__name__.removeprefix("law_").split("_", 1)
        if sync.takes_weight:
            grads = functools.partial(_scalable, grads)
        where = f"{sync!r} on rank {rank} of {world_size(None)}"
        try:
            with torch.no_grad():
                law(rank, sync, grads, **options)
        except LawError as broken:
            stated = " ".join(str(law.__doc__).split())
            title = f"law {number} ({name.replace('_', ' ')}) is broken by {where}"
            raise LawError(f"{title}: {broken}\nThe law: {stated}") from None
        except Exception as error:
            error.add_note(f"while checking law {number} ({name.replace('_', ' ')}) of {where}")
            leaves = tree.flatten(grads(rank, 0))[0]
            whole = {path: str(leaf.dtype) for path, leaf in leaves.items() if not leaf.dtype.is_floating_point}
            if whole:
                error.add_note(
                    f"the test gradients have leaves of all dtypes, here {whole}; if the pipeline only supports "
                    "floating point, pass your own gradients: check(sync, grads=lambda rank, step: {...})"
                )
            raise

    LAWS.append(checked)
    return checked


@_stated
def law_1_outputs_are_like_inputs(rank: int, sync: Sync, grads: Grads) -> None:
    """The mean has the tree, shapes, dtypes and devices of the gradients, and the next state those of the last one.

    The mean is None for a leaf without an update, in a pipeline that skips steps. Means of finite gradients are
    finite; if all are NaN, a mean is not, unless `hides_nonfinite`.
    """
    example = grads(rank, 0)
    leaves, spec = tree.flatten(example)
    want, state = _specs(example), sync.init(example)
    want_state = _state_specs(state)
    for step in range(STEPS + 1):
        given = grads(rank, step) if step < STEPS else tree.map_leaves(torch.zeros_like, example)
        mean, state = called(sync, given, state)
        got = _specs(mean)
        updated = {path: leaf if path in got else None for path, leaf in leaves.items()}
        expected = tree.structure(tree.unflatten(spec, updated))
        _require(tree.structure(mean) == expected, f"step {step}: the mean is a {tree.structure(mean)}")
        wanted = {path: like for path, like in want.items() if path in got or not sync.skips}
        _require_equal(got, wanted, f"step {step}: leaf", "in the mean")
        _require_equal(_state_specs(state), want_state, f"step {step}: state", "in the next state")
        for path, leaf in tree.flatten(mean)[0].items():
            finite = not tree.is_inexact(leaf) or bool(leaf.isfinite().all())
            of = "finite gradients" if step < STEPS else "zeros"
            _require(finite, f"step {step}: leaf {path!r}: the mean of {of} is not finite")
    if not sync.agrees or sync.hides_nonfinite or not sync.traceable:  # some of these raise
        return
    spoiled = {path: torch.full_like(leaf, math.nan) for path, leaf in leaves.items() if tree.is_inexact(leaf)}
    state, given = sync.init(example), list[Tensor]()
    for _ in range(STEPS):  # each step may send another part
        done = exchanged(sync, leaves | spoiled, state)
        state = done.state
        given += [done.mean[path] for path in spoiled.keys() & done.mean.keys() if done.mean[path].numel()]
    is_shown = not given or any(not mean.isfinite().all() for mean in given)
    _require(is_shown, "gradients of all ranks are NaN, but no mean is; declare this with hides_nonfinite = True")


@_stated
def law_2_all_ranks_get_the_same_bits(rank: int, sync: Sync, grads: Grads) -> None:
    """The mean, and the replicated parts of the state, are bitwise the same on all ranks."""
    means, state = run(sync, grads, rank)
    shared = {f"the state {part.path!r}": part.value for part in parts(state) if part.kind == REPLICATED}
    for step, mean in enumerate(means):
        shared |= {f"step {step}: leaf {path!r}": leaf for path, leaf in tree.flatten(mean)[0].items()}
    everyone: list[dict[str, Any]] = gather(shared)
    for what, first in everyone[0].items():
        for other, values in enumerate(everyone):
            _require(values.keys() == everyone[0].keys(), f"rank {other} and rank 0 have updates for different leaves")
            if bits([values[what]]) != bits([first]):
                raise LawError(f"{what}, on rank {other} against rank 0, {_difference(values[what], first)}")


@_stated
def law_3_inputs_are_unmodified(rank: int, sync: Sync, grads: Grads) -> None:
    """Neither the gradients nor the state nor torch's global random generator are changed."""
    state = sync.init(grads(rank, 0))
    for step in range(STEPS):
        mine = grads(rank, step)
        before = copy.deepcopy((mine, state))
        generator = torch.get_rng_state()
        _, next_state = called(sync, mine, state)
        _require_same_bits(mine, before[0], f"step {step}: the given gradient")
        _require_same_bits(state, before[1], f"step {step}: the given state")
        untouched = torch.equal(torch.get_rng_state(), generator)
        _require(untouched, f"step {step}: random numbers came from the global generator; use fnddp.core.random")
        state = next_state


@_stated
def law_4_sent_reduces_to_mean(rank: int, sync: Sync, grads: Grads) -> None:
    """The mean of `sent` over ranks (the sum, max or min, if the reducer takes that) is `mean`.

    For a leaf without an update, it is 0.
    """
    scale = 0.0
    for step, (_, done) in enumerate(_exchanges(sync, grads, rank)):
        everyone = gather(done.sent)
        # The largest of all steps so far: a memory contains roundings of earlier steps, even if gradients are zeros.
        scale = max(scale, _largest(everyone))
        mean = {path: done.mean.get(path, torch.zeros_like(sent)) for path, sent in done.sent.items()}
        want, what = _reduce(everyone, _op(sync)), f"the {_op(sync)} over ranks of sent"
        _require_near(mean, want, f"step {step}: leaf", what, summed(sync), scale, terms=2 * len(everyone) + 4)


@_stated
def law_5_lossless_is_exact(rank: int, sync: Sync, grads: Grads) -> None:
    """A pipeline that loses nothing returns the exact mean."""
    means, _ = run(sync, grads, rank)
    for step, mean in enumerate(means):
        want, what = _exact(grads, step, _op(sync)), f"the exact {_op(sync)}"
        got, terms = tree.flatten(mean)[0], 2 * world_size(None)
        _require_near(got, want, f"step {step}: leaf", what, 0.0, _scale(grads, step), terms)


@_stated
def law_6_lowered_is_eager(
    rank: int,
    sync: Sync,
    grads: Grads,
    *,
    donation: Donation | None = None,
    seed: int = 0,  # of the order of gradients on each rank
    traces: Traces | None = None,
) -> None:
    """The lowered pipeline gives the means and states of `sync` itself, bit for bit, for any order of gradients.

    If a backend's order of summation depends on an element's position, they differ by roundings, equal on all ranks.
    """
    # Lowering takes longer than everything else, so each number of ranks tries the donation of one adapter only.
    donation = DONATIONS[world_size(None) % len(DONATIONS)] if donation is None else donation
    exact = world_size(None) <= 2 or dist.get_backend() == "threaded"  # all elements are summed in one order
    order = random.Random(1000 * seed + rank)  # a different order on each rank
    learns_order = (seed + world_size(None)) % 2 == 1
    engine = make_engine(sync, grads(rank, 0), donation, learns_order, traces)
    expected = sync.init(grads(rank, 0))
    start: State = copy.deepcopy(expected)
    want: list[Leaves] = []
    got: list[Leaves] = []
    for step in range(STEPS):
        if not exact and step:
            expected = copy.deepcopy(engine.state)  # otherwise roundings accumulate over the steps
        mean, expected = called(sync, grads(rank, step), expected)
        done = engine_step(engine, start, grads(rank, step), order)
        start = None  # from now on only the engine holds its state, and writes over it
        want.append(tree.flatten(mean)[0])
        got.append(done.mean)
        where = f"step {step} with {donation}"
        _require_equal(_specs(done.mean), _specs(want[-1]), f"{where}: leaf", "from the engine")
        _require_equal(_state_specs(engine.state), _state_specs(expected), f"{where}: state", "from the engine")
        if exact:
            _require_same_bits(done.mean, want[-1], f"{where}: the engine's mean of")
            _require_same_bits(engine.state, expected, f"{where}: the engine's state")
            continue
        scale = _scale(grads, step) + _largest([want[-1]])
        terms = 4 * world_size(None)
        _require_near(done.mean, want[-1], f"{where}: leaf", "the eager mean", rounding(sync), scale, terms)
        everyone = gather(bits(done.mean)) if sync.agrees else []
        _require(everyone[1:] == everyone[:-1], f"{where}: ranks have other bits of the engine's mean")
    for step in range(STEPS if exact else 0):
        what = f"with {donation} a later step has overwritten step {step}'s mean of"
        _require_same_bits(got[step], want[step], what)


@_stated
def law_7_resuming_is_exact(rank: int, sync: Sync, grads: Grads) -> None:
    """Saving the state, loading it and continuing gives bitwise the same results as continuing."""
    _require_resuming(lambda state, steps: run(sync, grads, rank, steps, state), lambda: sync.init(grads(rank, 0)))


@_stated
def law_7_resuming_an_engine_is_exact(
    rank: int,
    sync: Sync,
    grads: Grads,
    *,
    donation: Donation = DONATIONS[2],
    seed: int = 0,  # of the order of gradients on each rank
    traces: Traces | None = None,
) -> None:
    """A lowered pipeline that starts from the saved state continues with bitwise the same results."""
    order = random.Random(1000 * seed + rank)
    traces = Traces() if traces is None else traces  # shared, because a trace takes longer than everything else
    first, another = [make_engine(sync, grads(rank, 0), donation, traces=traces) for _ in range(2)]

    def steps(state: State, numbers: range) -> tuple[list[Tree], State]:
        engine, means = another if numbers.start else first, list[Tree]()
        for step in numbers:
            means.append(engine_step(engine, state, grads(rank, step), order).mean)
            state = None
        return means, copy.deepcopy(engine.state)

    _require_resuming(steps, lambda: sync.init(grads(rank, 0)))


@_stated
def law_12_what_owners_have_is_the_mean(rank: int, sync: Sync, grads: Grads) -> None:
    """The parts of a leaf that ranks own, concatenated in rank order, are the mean of `sent` over ranks."""
    scale = 0.0
    for step, (leaves, done) in enumerate(_exchanges(sync, grads, rank)):
        everyone, owned = gather(done.sent), gather(done.mean)
        scale = max(scale, _largest(everyone))
        have: Leaves = {}
        for path, leaf in leaves.items():
            parts = [each[path].reshape(-1) for each in owned]
            have[path] = torch.cat(parts).view(leaf.shape) if leaf.numel() else leaf
        want = _reduce(everyone, "mean")
        where, terms = f"step {step}: leaf", 2 * len(everyone) + 4
        _require_near(have, want, where, "the mean over ranks of sent", summed(sync), scale, terms)


def _require_resuming(run: Callable[[State, range], tuple[list[Tree], State]], init: Callable[[], State]) -> None:
    straight, final = run(init(), range(STEPS))
    _, halfway = run(init(), range(STEPS // 2))
    file = io.BytesIO()
    torch.save(state_dict(halfway), file)
    file.seek(0)
    template = init()
    loaded = load_state_dict(template, torch.load(file, weights_only=True))
    _require_same_bits(template, init(), "the template of load_state_dict")
    resumed, again = run(loaded, range(STEPS // 2, STEPS))
    for step, mean in enumerate(resumed, STEPS // 2):
        _require_same_bits(mean, straight[step], f"step {step}, resumed: the mean of")
    _require_same_bits(again, final, "the state at the end:")


@_stated
def law_8_error_feedback_loses_nothing(rank: int, sync: Sync, grads: Grads) -> None:
    """With error feedback, the sum of all outputs plus the mean residual equals the sum of all mean gradients.

    int8 residuals lose up to half a level in each step on each rank.
    """
    remembering = _remembering(sync)
    assert remembering is not None
    state, means, lost = remembering.init(grads(rank, 0)), list[Tree](), 0.0
    for step in range(STEPS):
        mean, state = called(remembering, grads(rank, step), state)
        means.append(mean)
        lost += max(gather(max((scale.max().item() / 2 for scale in state.scale.values()), default=0.0)))
    residuals: list[Leaves] = gather(remembering.residuals(_leaves(grads, rank, 0), state))
    scale = sum(_scale(grads, step) for step in range(STEPS)) + _largest(residuals)
    outputs = [tree.flatten(mean)[0] for mean in means]
    exact = [_exact(grads, step, "mean") for step in range(STEPS)]
    got, want = Leaves(), Leaves()
    for path, left in _reduce(residuals, "mean").items():
        total = sum([_wide(mean[path]) for mean in outputs if path in mean], start=left)
        got[path] = total.to(_leaves(grads, rank, 0)[path].dtype)
        want[path] = sum([mean[path] for mean in exact], start=torch.zeros_like(left))
    terms = 4 * STEPS * len(residuals)
    _require_near(got, want, "leaf", f"the sum of {STEPS} mean gradients", summed(sync), scale, terms, lost)


@_stated
def law_9_text_parses_back(rank: int, sync: Sync, grads: Grads) -> None:
    """`parse(repr(sync))` returns an equal pipeline, with the same hash and the same text."""
    again = parse(repr(sync))
    _require(again == sync and hash(again) == hash(sync), f"parse gives {again!r}, which is not equal to it")
    _require(repr(again) == repr(sync), f"parse gives {again!r}")


@_stated
def law_10_simulated_is_real(rank: int, sync: Sync, grads: Grads) -> None:
    """`simulate(sync, n)` gives the result of n real ranks: bit for bit if all reducers are carriers and no step
    multiplies matrices or sums whole leaves, otherwise up to rounding. In the second case codecs and residuals in int8
    are not compared, because a rounding may change their choice (the largest element, a sign, the nearest level).
    """
    n, state = world_size(None), sync.init(grads(rank, 0))
    simulation = simulate(sync, n)
    for step in range(STEPS // 2):
        leaves = _leaves(grads, rank, step)
        eps = rounding(sync, *[leaf.dtype for leaf in leaves.values() if tree.is_inexact(leaf)])
        with _Sums() as sums:
            done = exchanged(sync, leaves, state)
        exact = not sums.found and (n == 1 or _only_carries(sync))
        everyone: list[Any] = gather((leaves, state, done))
        state = done.state  # the real one; otherwise roundings accumulate over the steps
        if rank == 0 and (exact or not any(map(_chooses, all_in(sync)))):
            stacked = {path: torch.stack([mine[path] for mine, _, _ in everyone]) for path in leaves}
            try:
                owned = simulation.of_ranks([own for _, own, _ in everyone])
                weights = [float(1 + other) for other in range(n)] if sync.takes_weight else None
                together = simulation.exchange(stacked, owned, weight=weights)
            except ValueError as error:
                raise LawError(f"step {step}: {error}") from error
            for other, (_, _, real) in enumerate(everyone):
                both = {path: (together.mean[path], leaf) for path, leaf in real.mean.items()}
                means = {path: mean if mean.shape == leaf.shape else mean[other] for path, (mean, leaf) in both.items()}
                sents = {path: together.sent[path][other] for path in real.sent}
                virtual = Exchange(means, sents, simulation.of_rank(together.state, other))
                where = f"step {step}: on rank {other}, simulated,"
                if exact:
                    _require_same_bits(virtual, real, where)
                else:
                    tensors = {part.path: part.value for part in parts(real) if isinstance(part.value, Tensor)}
                    scale = _scale(grads, step) + _largest([tensors])
                    _require_near(virtual, real, where, "the real one", eps, scale, terms=64 * n)


def _chooses(each: Sync) -> bool:
    return isinstance(each, Codec) or (isinstance(each, error_feedback) and each.residual == "int8")


@_stated
def law_11_weighted_is_pooled(rank: int, sync: Sync, grads: Grads) -> None:
    """For weights w of n ranks with the sum W, `weighted(sync)` is bitwise `sync` of the gradients times n w / W."""
    n = world_size(None)
    pooled = weighted(sync)
    plain = state = sync.init(_scalable(grads, rank, 0))
    for step in range(STEPS):
        weights = [float((3 * other + step) % 4) for other in range(n)]  # different in each step, some of them 0
        weights[step % n] += 1.0
        mine = _scalable(grads, rank, step)
        scale = torch.tensor(weights[rank], dtype=torch.float64) / (torch.tensor(weights).double().sum() / n)
        scaled = {path: weighted.scaled(leaf, scale) if sync.reduces(path) else leaf for path, leaf in mine.items()}
        want, plain = sync(scaled, plain)
        got, state = pooled(mine, state, weight=weights[rank])
        _require_same_bits(got, want, f"step {step}: with the weights {weights} the mean of")
        _require_same_bits(state, plain, f"step {step}: with the weights {weights} the state")


LOWERED: tuple[Law, ...] = (law_6_lowered_is_eager, law_7_resuming_an_engine_is_exact)
"""Laws that lower the pipeline. That takes longest, so they share `traces`."""


def weight_of(sync: Sync) -> float | None:
    """Return this rank's weight in all steps of `weighted`; None for another pipeline."""
    return float(1 + (dist.get_rank() if dist.is_initialized() else 0)) if sync.takes_weight else None


def called(sync: Sync, grads: Tree, state: State) -> tuple[Tree, State]:
    """Return `sync(grads, state)`, with a weight if it takes one."""
    return sync(grads, state, weight=weight_of(sync))


def exchanged(sync: Sync, leaves: Leaves, state: State) -> Exchange:
    """Return `sync.exchange(leaves, state)`, with a weight if it takes one."""
    weight = weight_of(sync)
    with within(replace(current(), weight=None if weight is None else Weight.of(weight))):
        return sync.exchange(leaves, state)


def run(
    sync: Sync, grads: Grads, rank: int, steps: range = range(STEPS), state: State = None
) -> tuple[list[Tree], State]:
    """Return the means of all `steps`, and the last state."""
    state = sync.init(grads(rank, 0)) if state is None else state
    means: list[Tree] = []
    for step in steps:
        mean, state = called(sync, grads(rank, step), state)
        means.append(mean)
    return means, state


def _exchanges(sync: Sync, grads: Grads, rank: int) -> Iterator[tuple[Leaves, Exchange]]:
    state = sync.init(grads(rank, 0))
    for step in range(STEPS):
        leaves = _leaves(grads, rank, step)
        done = exchanged(sync, leaves, state)
        state = done.state
        yield leaves, done


def make_engine(
    sync: Sync,
    grads: Tree,
    donation: Donation = DONATIONS[0],
    learns_order: bool = False,
    traces: Traces | None = None,
) -> Engine:
    """Return an engine for such gradients, with buckets so small that there are several."""
    leaves = {path: LeafSpec.of(leaf) for path, leaf in tree.flatten(grads)[0].items()}
    return Engine(sync, leaves, donation=donation, learns_order=learns_order, bucket_caps=SMALL_BUCKETS, traces=traces)


def engine_step(engine: Engine, state: State, grads: Tree, order: random.Random) -> Synchronized:
    """Run a step of `engine` from `state` (None for its own) on copies of `grads`, in a random order from `order`."""
    leaves, _ = tree.flatten(grads)
    step = engine.begin(state, weight=weight_of(engine.sync))
    for path in order.sample(list(leaves), len(leaves)):
        step.feed(path, leaves[path].clone())
    done = step.finish()
    _require(not done.unused, f"the engine treats {sorted(done.unused)} as unused, but all ranks passed gradients")
    given = [path for path in leaves if path in done.mean] if engine.sync.skips else list(leaves)
    _require(sorted(done.mean) == sorted(given), f"the engine returns means of {list(done.mean)}, not of {given}")
    return done


def gather(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    everyone, packed = [b""] * world_size(None), io.BytesIO()
    pickler = pickle.Pickler(packed)  # pickles a tensor as row-major bytes: torch's own way takes ten times as long
    pickler.dispatch_table = {Tensor: lambda leaf: (_unpickled, (_bytes(leaf), leaf.dtype, leaf.shape, leaf.device))}
    pickler.dump(value)
    dist.all_gather_object(everyone, packed.getvalue())
    return [pickle.loads(each) for each in everyone]


def _unpickled(data: bytes, dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> Tensor:
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return whole.view(dtype).reshape(shape).to(device)


def bits(value: Any) -> list[Any]:
    """Return a list that is equal for two values if and only if all their leaves have the same bits."""
    return [_bytes(part.value) if isinstance(part.value, Tensor) else part.value for part in parts(value)]


def _bytes(leaf: Tensor) -> bytes:
    dense = leaf.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


class _Sums(TorchDispatchMode):
    """A mode that detects operations with another order of summation under vmap: products, sums of whole leaves."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_sum = name in ("sum", "mean", "linalg_vector_norm") and made.ndim == 0
        self.found |= is_sum or name in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot")
        return made


def rounding(sync: Sync, *dtypes: torch.dtype) -> float:
    """Return the largest machine epsilon of float32, of `dtypes`, and of each `cast` in `sync`."""
    casts = [each.dtype for each in all_in(sync) if isinstance(each, cast)]
    return max(torch.finfo(dtype).eps for dtype in (torch.float32, *dtypes, *casts) if isinstance(dtype, torch.dtype))


def summed(sync: Sync) -> float:
    """Return the rounding error that a sum over ranks may have in addition to that of a leaf's own dtype.

    It is 0 for one rank, because nothing is summed: the loss of a `cast` must then be in `sent`.
    """
    return rounding(sync) if world_size(None) > 1 else 0.0


def _remembering(sync: Sync) -> error_feedback | None:
    """Return `sync` with error feedback; None if it has another kind of memory."""
    if isinstance(sync, error_feedback) and sync.decay == 1:
        return sync
    return None if any(each.remembers for each in all_in(sync)) else error_feedback(sync)


def _op(sync: Sync) -> str:
    return next(iter(sync.ops), "mean")


def _leaves(grads: Grads, rank: int, step: int) -> Leaves:
    return tree.flatten(grads(rank, step))[0]


def _scalable(grads: Grads, rank: int, step: int) -> Leaves:
    return {path: leaf for path, leaf in _leaves(grads, rank, step).items() if tree.is_inexact(leaf)}


def _wide(leaf: Tensor) -> Tensor:
    return leaf.cpu().to(torch.complex128 if leaf.is_complex() else torch.float64)


def _largest(everyone: Sequence[Leaves]) -> float:
    return max((torch.linalg.vector_norm(_wide(leaf)).item() for each in everyone for leaf in each.values()), default=0)


def _scale(grads: Grads, step: int) -> float:
    """Return the largest norm of a leaf on any rank. Roundings are relative to it."""
    return _largest([_leaves(grads, rank, step) for rank in range(world_size(None))])


def _exact(grads: Grads, step: int, op: str) -> Leaves:
    return _reduce([_leaves(grads, rank, step) for rank in range(world_size(None))], op)


def _reduce(everyone: Sequence[Leaves], op: str) -> Leaves:
    """Return the reduction over ranks, in double precision."""
    reduced: Leaves = {}
    for path, leaf in everyone[0].items():
        stack = torch.stack([_wide(leaves[path]) for leaves in everyone])
        wide: Tensor = getattr(torch, {"max": "amax", "min": "amin"}.get(op, op))(stack, 0)
        if not tree.is_inexact(leaf):
            wide = (wide + 0.5).floor()  # a mean of integers is rounded to the nearest, halves up
        # A sum of bools is True if any is True.
        reduced[path] = wide.clamp(max=1) if leaf.dtype == torch.bool else wide
    return reduced


def _specs(grads: Tree) -> dict[str, str]:
    return {path: f"{describe(leaf)} on {leaf.device}" for path, leaf in tree.flatten(grads)[0].items()}


def _state_specs(state: State) -> dict[str, str]:
    of_parts = {part.path: f"{part.kind} {describe(part.value)}" for part in parts(state)}
    return {"": f"a {tree.structure(state)}", **of_parts}


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise LawError(otherwise)


def _require_equal(got: Mapping[str, str], want: Mapping[str, str], what: str, where: str) -> None:
    for path in dict.fromkeys([*want, *got]):
        one, other = got.get(path, "nothing"), want.get(path, "nothing")
        _require(one == other, f"{what} {path!r} is {one} {where}, but was {other}")


def _only_carries(sync: Sync) -> bool:
    children = list(sync.children())
    if not children:
        return sync.carries or not sync.ops
    reduces_itself = sync.ops != frozenset[str]().union(*[child.ops for child in children])
    return not reduces_itself and all(map(_only_carries, children))


def _require_same_bits(got: Tree, want: Tree, what: str) -> None:
    # By path: an engine's means are flat, a pipeline's are a tree.
    for one, other in zip(parts(got), parts(want), strict=True):
        if bits([one.value]) != bits([other.value]):
            raise LawError(f"{what} {one.path!r} {_difference(one.value, other.value)}")


def _difference(got: Any, want: Any) -> str:
    if not isinstance(got, Tensor) or not isinstance(want, Tensor) or got.shape != want.shape:
        return f"is {got!r}, but should be {want!r}"
    error = (_wide(got) - _wide(want)).abs()
    return f"is off by up to {error.max().item():.3g}, in {int((error != 0).sum())} of {got.numel()} elements"


def _require_near(
    got: Tree, want: Tree, what: str, of: str, eps: float, scale: float, terms: int, lost: float = 0.0
) -> None:
    """Raise unless values are equal up to `lost` plus `terms` roundings (of `eps` or the leaf's dtype) at `scale`.

    Integers must be equal.
    """
    for one, other in zip(parts(got), parts(want), strict=True):
        where = f"{what} {one.path!r}: {of} and what the pipeline gives are"
        if not isinstance(one.value, Tensor):
            _require(one.value == other.value, f"{where} {other.value!r} and {one.value!r}")
        elif one.value.numel():
            rounded = max(eps, torch.finfo(one.value.dtype).eps) if tree.is_inexact(one.value) else 0.0
            error = (_wide(one.value) - _wide(other.value)).abs().max().item()
            allowed = terms * rounded * scale + lost
            _require(error <= allowed, f"{where} {error:.3g} apart, allowed {allowed:.3g}")


def _normal(rank: int, step: int) -> Callable[..., Tensor]:
    """Return a function that draws random tensors, different on each rank and in each step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(
            shape, generator=generator, dtype=torch.promote_types(dtype, torch.float32), device="cpu"
        ).to(dtype)

    return normal


class WeightAndBias(NamedTuple):
    """A node of the tree `mixed` with two leaves."""

    weight: Any
    bias: Any


def model(rank: int, step: int) -> Tree:
    """Return gradients like a small model's: a channels-last convolution, matrices, two of one shape, a vector."""
    normal = _normal(rank, step)
    return {
        "conv.weight": normal(8, 4, 3, 3).contiguous(memory_format=torch.channels_last),
        "fc.weight": normal(12, 20),
        "fc.bias": normal(12),
        "out.weight": normal(12, 20),
    }


def mixed(rank: int, step: int) -> Tree:
    """Return a nested tree of all dtypes, with a scalar, a leaf without elements, and strided leaves."""
    normal = _normal(rank, step)
    half, brain = torch.float16, torch.bfloat16
    return {
        "blocks": [WeightAndBias(normal(16, 24, dtype=half), normal(16, dtype=brain)), None],
        "head": (normal(20, 9).t(), (normal(), normal(0, 3))),
        "double.weight": normal(9, 8, dtype=torch.float64),
        "complex.weight": normal(6, 10, dtype=torch.complex64),
        "brain.weight": normal(10, 12, dtype=brain),
        "strided": normal(6, 8)[:, ::2],
        "count": torch.tensor([rank, 7, -3]),
        "flag": torch.tensor([True, rank == 0]),
    }


def bare(rank: int, step: int) -> Tree:
    """Return one tensor. Its path is the empty string."""
    return _normal(rank, step)(11, 7)


def empty(rank: int, step: int) -> Tree:
    return {"nothing": None, "none": []}


TREES: dict[str, Grads] = {"model": model, "mixed": mixed, "bare": bare, "empty": empty}
