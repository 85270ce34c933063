"""The table of ways in by events: after each event training is what it would be without it, to the bit, or refuses.

A row is all events of one way in, on ranks of the pool, one after the other. The error of a cell names it.
"""

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fnddp import CollectiveError, StepFailedError
from fnddp.wire.c10d import C10d
from tests.ways import WAYS, Absent, Interrupt, Refuses, Trap, Way, failing

Event = Callable[[type[Way], int], None]


def two(way: type[Way], **options: Any) -> tuple[Way, Way]:
    """Return two trainings that have taken a step, in which the order of gradients is learnt."""
    trainings = way(**options), way(**options)
    for each in trainings:
        each.step(each.batch(torch.distributed.get_rank(), 0))
    return trainings


def go_on(rank: int, one: Way, other: Way, *, at: int = 50) -> None:
    """Require that two trainings have the same bits now and after two further steps."""
    for step in range(at, at + 2):
        assert one.all == other.all, f"before step {step}"
        for each in (one, other):
            each.step(each.batch(rank, step))
    assert one.all == other.all


def fail(rank: int, training: Way, step: int, *, who: int, point: Any = None, **trap: str) -> None:
    """Run a step in which one rank fails; nothing has changed after it."""
    held, is_mine = training.all, rank == who
    raises: Any = nullcontext()
    if is_mine:
        raises = pytest.raises((Trap, Interrupt))
    elif training.tells:
        raises = pytest.raises(StepFailedError, match=f"rank {who} failed with")
    with raises, point if is_mine and point is not None else nullcontext():
        training.step(training.batch(rank, step, **(trap if is_mine else {})))
    assert training.all == held


def places(rank: int, way: type[Way], training: Way) -> list[tuple[str, Any]]:
    """Return all places in which a rank can fail in a step, with their names; takes a step of `training`."""
    found: list[tuple[str, Any]] = [(f"{trap}", trap) for trap in way.traps]
    counts = []
    for point in way.points:
        with failing(point.owner, point.name, -1) as calls:
            training.step(training.batch(rank, 90 + len(counts)))
        counts.append(len(calls) if point.calls is None else min(point.calls, len(calls)))
    for point, count in zip(way.points, counts, strict=True):
        assert count, f"{point} is never reached"
        found += [(f"{point}, call {call} of {count}", (point, call)) for call in range(count)]
    return found


def fail_at(rank: int, training: Way, step: int, place: Any, *, who: int) -> None:
    if isinstance(place, str):
        fail(rank, training, step, who=who, trap=place)
    else:
        point, call = place
        fail(rank, training, step, who=who, point=point.at(call))


# Events


def a_failure_at_each_point(way: type[Way], rank: int) -> None:
    disturbed, straight = two(way)
    found = places(rank, way, disturbed)
    assert found == places(rank, way, straight)
    for i, (name, place) in enumerate(found):
        try:
            fail_at(rank, disturbed, 100 + i, place, who=i % way.ranks)
            for each in (disturbed, straight):
                each.step(each.batch(rank, i))
            assert disturbed.all == straight.all
        except BaseException as error:
            error.add_note(f"at {name}")
            raise
    go_on(rank, disturbed, straight)


def an_error_of_all_ranks_in_forward(way: type[Way], rank: int) -> None:
    disturbed, straight = two(way)
    with pytest.raises(Trap):
        disturbed.step(disturbed.batch(rank, 9, trap="forward"))
    go_on(rank, disturbed, straight)


def an_error_of_all_ranks_in_backward(way: type[Way], rank: int) -> None:
    disturbed, straight = two(way)
    with pytest.raises(Trap):
        disturbed.step(disturbed.batch(rank, 9, trap="middle"))
    go_on(rank, disturbed, straight)


def a_dead_wire(way: type[Way], rank: int) -> None:
    training, _ = two(way)
    held = training.all
    with pytest.raises(CollectiveError, match="the peer is gone"):
        with failing(C10d, "vote", error=RuntimeError("the peer is gone")):
            training.step(training.batch(rank, 1))
    assert training.all == held
    training.step(training.batch(rank, 2))


def accumulation(way: type[Way], rank: int) -> None:
    disturbed, straight = two(way)
    for step in range(2):
        micro = [disturbed.batch(rank, 10 + step), disturbed.batch(rank, 20 + step)]
        disturbed.step(*micro)
        micro[0].xs += micro[1].xs
        straight.step(micro[0])
        assert disturbed.all == straight.all
    go_on(rank, disturbed, straight)


def a_gradient_that_is_not_finite(way: type[Way], rank: int) -> None:
    disturbed, straight = two(way)
    for step, factor in enumerate((float("nan"), float("inf"))):
        disturbed.step(disturbed.batch(rank, 10 + step, factor=factor if rank == step else 1.0))
        go_on(rank, disturbed, straight)


EVENTS: dict[str, Event] = {
    "a failure at each point": a_failure_at_each_point,
    "an error of all ranks in forward": an_error_of_all_ranks_in_forward,
    "an error of all ranks in backward": an_error_of_all_ranks_in_backward,
    "accumulation": accumulation,
    "a gradient that is not finite": a_gradient_that_is_not_finite,
    "a dead wire": a_dead_wire,
}


def run_row(rank: int, name: str, events: list[str]) -> None:
    way = WAYS[name]
    for event in events:
        cell = way.cells.get(event)
        if isinstance(cell, Absent):
            continue
        try:
            with nullcontext() if cell is None else pytest.raises(Exception, match=cell.text):
                EVENTS[event](way, rank)
        except BaseException as error:
            error.add_note(f"in the cell of {name!r} and {event!r}")
            raise


def events_of(name: str) -> list[str]:
    """Return the events of a row; those named in FNDDP_TEST_EVENTS, separated by commas, if it is set."""
    only = os.environ.get("FNDDP_TEST_EVENTS")
    return [event for event in EVENTS if only is None or event in only.split(",")]


@pytest.mark.parametrize("name", WAYS)
def test_each_event_leaves_a_way_in_as_it_was_or_is_refused(gloo: Any, name: str) -> None:
    gloo(WAYS[name].ranks, run_row, name, events_of(name))
