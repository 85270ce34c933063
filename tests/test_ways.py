"""The table of ways in by events: after each event training is what it would be without it, to the bit, or refuses.

A row is all events of one way in, on ranks of the pool, one after the other. The error of a cell names it. Weights are
in tests/test_weights.py.
"""

import copy
import os
import pickle
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fnddp import CollectiveError, DistributedDataParallel, RankMismatchError, StepFailedError
from fnddp.adapters.module.steps import Steps
from fnddp.laws import bits, gather
from fnddp.run.step import Step
from fnddp.run.vote import Vote
from tests.ranks import on_ranks
from tests.ways import (
    FAMILIES,
    OUTER,
    WAYS,
    Absent,
    Interrupt,
    Point,
    Refuses,
    Shape,
    Trap,
    Way,
    failing,
    interrupted,
    local,
)

MORE = {"compress", "torchft", "torchft_functional", "unplanned", *OUTER} - {"diloco"}
"""Rows of the second ring."""
RESHARDED = ["module", "register", "own", "compress_shards", "compress_replicas", "own_matrices"]
ENDINGS: dict[str, tuple[type, str]] = {
    "module": (Steps, "_keeps_promises"),
    "register": (Step, "commit"),
    "compress_shards": (Step, "commit"),
    "diloco": (Step, "commit"),
}
"""Methods that end when all ranks have agreed, and this one has not applied the result."""
Event = Callable[[type[Way], int, Path], Any]  # the bits of a training after it
STEPS = int(os.environ.get("FNDDP_TEST_STEPS", "20"))  # in which failures come at random points


def two(way: type[Way], *, text: str = "", shapes: tuple[Shape, Shape] = (Shape(), Shape())) -> tuple[Way, Way]:
    """Return two trainings that have taken a step, in which the order of gradients is learnt."""
    trainings = way(text, shape=shapes[0]), way(text, shape=shapes[1])
    for each in trainings:
        each.step(each.batch(dist.get_rank(), 0))
    return trainings


def step_alike(rank: int, step: int, *trainings: Way) -> Any:
    """Take a step of each training; require that all have the same bits then, and return them."""
    for each in trainings:
        each.step(each.batch(rank, step))
    first, *others = [each.all for each in trainings]
    assert all(each == first for each in others), f"after step {step}"
    return first


def go_on(rank: int, one: Way, other: Way) -> Any:
    """Require that two trainings have the same bits after each of two further steps; end them, and return the bits."""
    found = [step_alike(rank, step, one, other) for step in (50, 51)][-1]
    for each in (one, other):
        each.end()
    return found


# Failures


Place = str | tuple[Point, int]
"""Where a rank fails in a step: at a trap, or in a call of a point, by its number."""


def fail(rank: int, training: Way, step: int, place: Place, *, who: int) -> None:
    """Run a step in which one rank fails; nothing has changed after it."""
    held, is_mine = training.all, rank == who
    trap, point = (place, nullcontext()) if isinstance(place, str) else ("", place[0].at(place[1]))
    raises: Any = nullcontext()
    if is_mine:
        raises = pytest.raises((Trap, Interrupt))
    elif training.told:
        raises = pytest.raises(StepFailedError, match=training.told.format(who))
    try:
        with raises, point if is_mine else nullcontext():
            training.step(training.batch(rank, step, trap=trap if is_mine else ""))
        assert training.all == held
        assert not training.undoes or all(p.grad is None for p in training.model.parameters())
    except BaseException as error:
        error.add_note(f"in step {step}, where rank {who} fails at {place}")
        raise


def places(rank: int, training: Way, *, ends: bool = False) -> list[Place]:
    """Return all places in which a rank can fail in a step, or the first and last of each kind. Takes steps."""
    found: list[Place] = [*training.traps]
    for i, point in enumerate(training.points):
        with failing(point.owner, point.name, -1) as calls:
            training.backward(training.batch(rank, 90 + i))
            in_backward = len(calls)
            training.update()
        count = (len(calls) if training.updates else in_backward) + point.after
        assert count > 0, f"{point} is never reached"
        found += [(point, call) for call in (sorted({0, count - 1}) if ends else range(count))]
    return found


def a_failure_at_each_point(way: type[Way], rank: int, _: Path) -> Any:
    disturbed, straight = two(way)
    found = places(rank, disturbed, ends=way.shares)
    assert found == places(rank, straight, ends=way.shares)
    for i, place in enumerate(found):
        fail(rank, disturbed, 100 + i, place, who=i % way.ranks)
        step_alike(rank, i, disturbed, straight)
    return go_on(rank, disturbed, straight)


def fail_somewhere(rank: int, training: Way) -> None:
    fail(rank, training, 9, training.traps[-1] if training.traps else (training.points[0], 0), who=1)


def a_failure_in_the_first_step(way: type[Way], rank: int, _: Path) -> Any:
    """Before the order of gradients is learnt."""
    disturbed, straight = way(), way()
    fail_somewhere(rank, disturbed)
    return go_on(rank, disturbed, straight)


def a_checkpoint_after_a_failure(way: type[Way], rank: int, folder: Path) -> Any:
    """The others may wait in the failed step until this rank saves, loads or sets its state."""
    disturbed, straight = two(way)
    is_set = not isinstance(way.cells.get("states of other steps"), Absent)
    for go_back in (disturbed.save, disturbed.load, *([lambda _: disturbed.set_state(disturbed.state)] * is_set)):
        fail_somewhere(rank, disturbed)
        go_back(folder)
    return go_on(rank, disturbed, straight)


def an_error_of_all_ranks(trap: str) -> Event:
    def event(way: type[Way], rank: int, _: Path) -> Any:
        disturbed, straight = two(way)
        held = bits(disturbed.state)
        with pytest.raises(Trap):
            disturbed.step(disturbed.batch(rank, 9, trap=trap))
        assert bits(disturbed.state) == held
        return go_on(rank, disturbed, straight)

    return event


def a_dead_wire(way: type[Way], rank: int, _: Path) -> Any:
    disturbed, straight = two(way)
    held = disturbed.all
    with pytest.raises(CollectiveError) if way.told else nullcontext(), disturbed.dead_wire(rank):
        disturbed.step(disturbed.batch(rank, 1))
    assert disturbed.all == held
    return go_on(rank, disturbed, straight)


def an_error_in_the_update(way: type[Way], rank: int, folder: Path) -> None:
    """Some owners have updated theirs: weights and states of two steps would be one checkpoint."""
    training, _ = two(way)
    if rank == 1:
        training.optimizer.param_groups[0]["momentum"] = "none"
    with pytest.raises(TypeError if rank == 1 else StepFailedError, match="str" if rank == 1 else "restart"):
        training.step(training.batch(rank, 1))
    own_states = [training.keeper.optimizer_state_dict, training.keeper.optimizer_checkpoint().state_dict]
    for use in (lambda: training.save(folder), *own_states):
        with pytest.raises(RuntimeError, match="so there is no consistent checkpoint"):
            use()
    with pytest.raises(RuntimeError) as raised:
        training.step(training.batch(rank, 2))
    assert "clear them and continue" not in str(raised.value)  # which would say the opposite
    raise raised.value


# Gradients


def accumulation(way: type[Way], rank: int, _: Path) -> Any:
    shape = Shape(units=False)
    disturbed, straight = two(way, shapes=(shape, shape))
    for step in range(2):
        micro = [disturbed.batch(rank, 10 + step), disturbed.batch(rank, 20 + step)]
        disturbed.step(*micro)
        micro[0].xs += micro[1].xs
        straight.step(micro[0])
        assert disturbed.all == straight.all
    return go_on(rank, disturbed, straight)


def a_gradient_that_is_not_finite(way: type[Way], rank: int, _: Path) -> Any:
    """Without the optimizer's step, which all ranks leave out, it leaves nothing in the memory of the pipeline."""
    disturbed, straight = two(way)
    for step, factor in enumerate((float("nan"), float("inf"))):
        disturbed.step(disturbed.batch(rank, 10 + step, factor=factor if rank == step else 1.0))
        step_alike(rank, 20 + step, disturbed, straight)
    return go_on(rank, disturbed, straight)


def unused_leaves(way: type[Way], rank: int, _: Path) -> Any:
    """On some ranks, and on all: as where their gradients are zero."""
    shape = Shape(momentum=0.0)
    disturbed, straight = two(way, text=way.plain, shapes=(shape, shape))
    for step, uses in enumerate((False, True) if way.uses_alike else (rank == 0, False, rank == 1, True)):
        disturbed.step(disturbed.batch(rank, step, extra=1.0 if uses else None))
        straight.step(straight.batch(rank, step, extra=1.0 if uses else 0.0))
        found = bits(disturbed.leaves)
        assert found == bits(straight.leaves), step
    for each in (disturbed, straight):
        each.end()
    return found


def frozen_leaves(way: type[Way], rank: int, _: Path) -> Any:
    return go_on(rank, *two(way, shapes=(Shape(extra="frozen"), Shape(extra="constant"))))


def memory_formats(way: type[Way], rank: int, _: Path) -> Any:
    return go_on(rank, *two(way, shapes=(Shape(layout="other"), Shape())))


def an_update_in_inference_mode(way: type[Way], rank: int, _: Path) -> Any:
    """Plans keep memory, which must be usable outside of it, as that of optimizers would not be."""
    disturbed, straight = (way(shape=Shape(momentum=0.0)) for _ in range(2))
    for each in (disturbed, straight):
        each.backward(each.batch(rank, 0))
        with torch.inference_mode(each is disturbed):
            each.update()
    return go_on(rank, disturbed, straight)


# Pipelines and states


def another_pipeline(way: type[Way], rank: int, folder: Path) -> Any:
    """As a training that begins with it, from these parameters; and back."""
    changed, found = two(way)[0], []
    for text in (way.plain, way.text):
        fresh = way(text)
        changed.set_sync(text)
        changed.save(folder)
        fresh.load(folder)
        found += go_on(rank, changed, fresh)
    return found


def states_of_other_steps(way: type[Way], rank: int, _: Path) -> Any:
    disturbed, straight = two(way, text=way.counted)
    earlier = disturbed.state
    held, later = step_alike(rank, 1, disturbed, straight), disturbed.state
    for states in ((earlier, later), (later, earlier)):
        with pytest.raises(RankMismatchError, match="disagree about state"):
            disturbed.set_state(states[rank % 2])
        assert disturbed.all == held
    disturbed.set_state(later)
    return go_on(rank, disturbed, straight)


def reset(way: type[Way], rank: int, folder: Path) -> Any:
    disturbed, other = two(way)
    disturbed.save(folder)
    other.step(other.batch(rank, 9))
    other.load(folder, reset_sync=True)
    disturbed.reset()
    return go_on(rank, disturbed, other)


def a_checkpoint(way: type[Way], rank: int, folder: Path) -> Any:
    saved, loaded = two(way)
    saved.step(saved.batch(rank, 1))
    saved.save(folder)
    loaded.load(folder)
    held = saved.state
    before = bits(held)
    found = go_on(rank, saved, loaded)
    assert bits(held) == before  # what the caller holds, later steps do not write to
    return found


def a_checkpoint_of_another_way_in(way: type[Way], rank: int, folder: Path) -> None:
    for i, (text, names) in enumerate(FAMILIES):
        if way in (ways := [WAYS[name] for name in names]):
            saved = two(way, text=text)[0]
            (folder / str(i)).mkdir(exist_ok=True)
            saved.save(folder / str(i))
            others = [other(text) for other in ways if other is not way]
            for other in others:
                other.load(folder / str(i))
            for step in range(1, 3):
                for each in (saved, *others):
                    each.step(each.batch(rank, step))
                for other in others:
                    assert bits(other.leaves) == bits(saved.leaves), (text, type(other).__name__, step)


def weights_that_are_written(way: type[Way], rank: int, folder: Path) -> Any:
    """In place, or loaded, and saved then: training goes on with them, and owners have no others."""
    written, loaded = two(way)
    before, third = written.leaves, way()
    with torch.no_grad():
        for p in written.model.parameters():
            local(p).neg_() if hasattr(p, "to_local") else setattr(p, "data", -p)
    loaded.model.load_state_dict({name: -p for name, p in loaded.model.state_dict().items()})
    written.save(folder)
    third.load(folder)
    step_alike(rank, 1, written, loaded, third)
    for name, p in written.leaves.items():
        assert (p + before[name]).norm() < (p - before[name]).norm(), name
    third.end()
    return go_on(rank, written, loaded)


def weights_that_are_swapped_and_back(way: type[Way], rank: int, folder: Path) -> Any:
    """For an evaluation, such as those of an average, which may be saved meanwhile."""
    disturbed, straight = two(way)
    third, held = way(), {name: p.clone() for name, p in disturbed.model.state_dict().items()}
    disturbed.model.load_state_dict({name: p * 0.5 for name, p in held.items()})
    disturbed.save(folder)
    third.load(folder)
    assert bits(third.leaves) == bits(disturbed.leaves)
    disturbed.model.load_state_dict(held)
    third.end()
    return go_on(rank, disturbed, straight)


def hooks_of_a_step(way: type[Way], rank: int, _: Path) -> Any:
    """Such as an average of weights: each runs once, before anything changes, or when all ranks have all weights."""
    hooked, straight = two(way)
    seen = [bits(hooked.leaves)]
    for register in (hooked.optimizer.register_step_pre_hook, hooked.optimizer.register_step_post_hook):
        register(lambda *_: seen.append(bits(hooked.leaves)))
    for each in (hooked, straight):
        each.step(each.batch(rank, 1))
    assert seen == [seen[0], seen[0], bits(hooked.leaves)]
    return go_on(rank, hooked, straight)


def the_optimizers_own_methods(way: type[Way], rank: int, _: Path) -> Any:
    """An owner saves and loads what it has; the state of another rank, with the same indices, is an error."""
    disturbed, straight = two(way)
    saved = copy.deepcopy(disturbed.optimizer.state_dict())
    if way.owns:
        with pytest.raises(ValueError, match=r"this state of .* is for the leaves '"):
            disturbed.optimizer.load_state_dict(gather(saved)[1 - rank])
    disturbed.optimizer.state.clear()
    disturbed.optimizer.load_state_dict(saved)
    return go_on(rank, disturbed, straight)


def a_copy(copies: Callable[[Any], Any]) -> Event:
    def event(way: type[Way], rank: int, _: Path) -> Any:
        copied, straight = two(way)
        twin = copies(copied)
        for step in (1, 2):
            step_alike(rank, step, copied, twin, straight)
        return go_on(rank, twin, straight)

    return event


def a_thread_that_evaluates(way: type[Way], rank: int, _: Path) -> Any:
    disturbed, straight = two(way)
    is_over, errors = threading.Event(), list[BaseException]()

    def evaluate() -> None:
        try:
            while not is_over.is_set():
                disturbed.evaluate(disturbed.batch(rank, 7))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        for step in range(4):
            step_alike(rank, step, disturbed, straight)
    finally:
        is_over.set()
        thread.join()
        TorchDDP._active_ddp_module = None  # torch 2.13 puts back what a thread has found, also if that is over
    assert not errors, errors
    return go_on(rank, disturbed, straight)


EVENTS: dict[str, Event] = {
    "a failure at each point": a_failure_at_each_point,
    "a failure in the first step": a_failure_in_the_first_step,
    "a checkpoint after a failure": a_checkpoint_after_a_failure,
    "an error of all ranks in forward": an_error_of_all_ranks("forward"),
    "an error of all ranks in backward": an_error_of_all_ranks("middle"),
    "an error in the update": an_error_in_the_update,
    "accumulation": accumulation,
    "a gradient that is not finite": a_gradient_that_is_not_finite,
    "unused leaves": unused_leaves,
    "frozen leaves": frozen_leaves,
    "memory formats": memory_formats,
    "another pipeline": another_pipeline,
    "an update in inference mode": an_update_in_inference_mode,
    "states of other steps": states_of_other_steps,
    "reset": reset,
    "a checkpoint": a_checkpoint,
    "a checkpoint of another way in": a_checkpoint_of_another_way_in,
    "weights that are written": weights_that_are_written,
    "weights that are swapped and back": weights_that_are_swapped_and_back,
    "hooks of a step": hooks_of_a_step,
    "the optimizer's own methods": the_optimizers_own_methods,
    "deepcopy": a_copy(copy.deepcopy),
    "pickle": a_copy(lambda training: pickle.loads(pickle.dumps(training))),
    "a thread that evaluates": a_thread_that_evaluates,
    "a dead wire": a_dead_wire,
}


def run_row(rank: int, name: str, folder: str) -> dict[str, Any]:
    """Return what a training has after each event that is not refused."""
    way, found = ON_CPU[name], dict[str, Any]()
    for i, event in enumerate(EVENTS):
        cell, of_cell = way.cells.get(event), Path(folder) / str(i)
        if isinstance(cell, Absent):
            continue
        of_cell.mkdir(exist_ok=True)
        try:
            with nullcontext() if cell is None else pytest.raises(Exception, match=cell.text):
                found[event] = EVENTS[event](way, rank, of_cell)
        except BaseException as error:
            error.add_note(f"in the cell of {name!r} and {event!r}")
            raise
    return found


class Unplanned(WAYS["module"]):
    """The class with a pipeline that cannot be lowered: all of it runs where the step ends."""

    text, plain = "error_feedback(fp16(allreduce, check=True))", "fp16(allreduce, check=True)"
    counted = "error_feedback(warmup(fp16(allreduce, check=True), steps=5))"
    points = (Point(Vote, "cast"),)
    cells = WAYS["module"].cells | {"a gradient that is not finite": Refuses("largest float16")}


ON_CPU = {**WAYS, "unplanned": Unplanned}
ROWS = [pytest.param(name, marks=[pytest.mark.thorough] if name in MORE else []) for name in ON_CPU]


@pytest.mark.parametrize("name", ROWS)
def test_each_event_leaves_a_way_in_as_it_was_or_is_refused(gloo: Any, tmp_path: Path, name: str) -> None:
    gloo(ON_CPU[name].ranks, run_row, name, str(tmp_path))


# Other numbers of ranks, whose mean is the same: all have the same data, and one rank alone encodes nothing


def go_on_alike(rank: int, name: str, folder: str, loads: bool) -> list[Any]:
    training = WAYS[name](WAYS[name].plain)
    for step in range(0 if loads else 2):
        training.step(training.batch(0, step))
    (training.load if loads else training.save)(Path(folder))
    for step in range(2, 4):
        training.step(training.batch(0, step))
    training.end()
    return bits(training.leaves)


@pytest.mark.parametrize("n", [1, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", RESHARDED)
def test_another_number_of_ranks_loads_a_checkpoint(gloo: Any, tmp_path: Path, name: str, n: int) -> None:
    want = gloo(WAYS[name].ranks, go_on_alike, name, str(tmp_path), False)[0]
    assert gloo(n, go_on_alike, name, str(tmp_path), True) == [want] * n


# Failures at random points


def fail_at_random(rank: int, name: str, seed: int, steps: int) -> None:
    """Each rank draws the same: whether a step fails, where, and on which rank."""
    draws, way = random.Random(seed), ON_CPU[name]
    disturbed, straight = two(way)
    found = places(rank, disturbed)
    assert found == places(rank, straight)
    for step in range(steps):
        assert disturbed.is_finite(), f"training has diverged before step {step}"
        if found and draws.random() < 0.5:
            fail(rank, disturbed, 10_000 + step, draws.choice(found), who=draws.randrange(way.ranks))
        step_alike(rank, step, disturbed, straight)
    for each in (disturbed, straight):
        each.end()


@pytest.mark.thorough
@pytest.mark.timeout(120 + 2 * STEPS)
@pytest.mark.parametrize("name", ON_CPU)
def test_failures_at_random_points_leave_no_trace(gloo: Any, name: str) -> None:
    """In FNDDP_TEST_STEPS steps, as FNDDP_TEST_SEED says: another number tries other points."""
    seed = int(os.environ.get("FNDDP_TEST_SEED", "0"))
    print(f"FNDDP_TEST_SEED={seed}")
    gloo(ON_CPU[name].ranks, fail_at_random, name, seed, STEPS, timeout=120 + 2 * STEPS)


@on_ranks(2)
def test_a_gradient_beyond_a_checked_wire_and_an_error_after_it_leave_no_trace(rank: int) -> None:
    disturbed, straight = two(Unplanned)
    held = disturbed.all
    with pytest.raises(FloatingPointError, match="largest float16"):
        disturbed.step(disturbed.batch(rank, 1, factor=1e9 if rank == 1 else 1.0))
    assert disturbed.all == held
    fail_somewhere(rank, disturbed)
    go_on(rank, disturbed, straight)


# After the vote


@pytest.mark.parametrize("name", ENDINGS)
@on_ranks(2)
def test_an_interrupt_after_the_vote_lets_the_rank_refuse(rank: int, name: str) -> None:
    """All ranks have agreed, and this one has not applied the result."""
    training = two(WAYS[name])[0]
    owner, method = ENDINGS[name]
    is_mine = rank == 1
    with pytest.raises(Interrupt) if is_mine else nullcontext(), interrupted(owner, method, 0 if is_mine else -1):
        training.step(training.batch(rank, 1))
    if rank == 1:
        with pytest.raises(RuntimeError, match="an earlier step failed on this rank"):
            training.step(training.batch(rank, 2))


@on_ranks(2)
def test_a_step_of_replicas_that_cannot_begin_at_a_gradient_raises(rank: int) -> None:
    """A backward that does not begin at the model's outputs, where the step would: its first gradient begins it."""
    training, within = two(WAYS["compress_replicas"])[0], list[Any]()
    training.model.first.register_forward_hook(lambda _, __, output: within.append(output))
    training.model.zero_grad()
    training.model(training.batch(rank, 1))
    within[-1].square().mean().backward()
    assert training.model.first.weight.grad is not None
    with pytest.raises(CollectiveError, match="the peer is gone"), training.dead_wire(rank):
        training.step(training.batch(rank, 2))
    training.model.zero_grad()
    training.model(training.batch(rank, 3))
    with pytest.raises(RuntimeError, match="an earlier step failed on this rank"):
        within[-1].square().mean().backward()


@pytest.mark.parametrize("name", ["module", "register", "own", "diloco"])
@on_ranks(2)
def test_another_process_group_than_at_set_up_is_an_error(rank: int, name: str) -> None:
    training, is_class = two(WAYS[name])[0], name == "module"
    late, saved = training.model(training.batch(rank, 1)), training.model.state_dict()
    acts: list[Callable[[], Any]] = [
        lambda: training.step(training.batch(rank, 1)),
        lambda: training.set_sync("two_shot"),
        lambda: training.model.load_state_dict(saved, assign=True),
    ]
    if is_class:
        group = dist.new_group()
        named = DistributedDataParallel(training.net(), process_group=group)
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError, match="but it now runs without a process group"):
            named(training.batch(rank, 1))
    again = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    if is_class:
        training.evaluate(training.batch(rank, 1))
    alone = WAYS[name]() if is_class else None
    other = partial(dist.init_process_group, "gloo", rank=rank, world_size=2, store=again)
    fix = "(wrap the module again|register the pipeline|attach it again)"
    for set_up in (lambda: None, other):
        set_up()
        for act in acts if is_class else acts[:1]:
            with pytest.raises(RuntimeError, match=rf"in the process group .* of 2 ranks, but it now runs .*{fix}"):
                act()
    if alone is not None:
        with pytest.raises(RuntimeError, match="wrapped without a process group, but it now runs in .* of 2 ranks"):
            alone.step(alone.batch(rank, 1))
    if name != "diloco":  # whose backward is torch's
        with pytest.raises(RuntimeError, match="of 2 ranks, but it now runs in"):
            late.backward()
