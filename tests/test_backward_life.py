"""The life of a backward as a table: what each event does in each state, on this rank and on the other one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fnddp
from fnddp import StepFailedError
from fnddp.adapters.backward import UNFINISHED, Backward
from fnddp.laws import bits
from fnddp.plan.draft import Donation
from fnddp.simulation.ranks import run_threads
from fnddp.wire.c10d import C10d
from fnddp.wire.protocol import CollectiveError
from tests.wires import engine_for

LEAVES = {"a": torch.zeros(3), "b": torch.zeros(2)}


class Mortal(C10d):
    is_dead = False

    def vote(self, flags: Tensor, group: str | None) -> Any:
        if self.is_dead:
            raise RuntimeError("the peer is gone")
        return super().vote(flags, group)


class Rank:
    """One rank with its backward, which counts what it undoes, and has a gradient for each leaf."""

    def __init__(self, rank: int) -> None:
        self.rank, self.undone, self.late, self.wire = rank, 0, False, Mortal()
        sync = fnddp.parse("error_feedback(fp16(allreduce))")
        options: Any = {"donation": Donation(gradients="at_end", state=True), "groups": [None], "wire": self.wire}
        self.engine = engine_for(sync, LEAVES, state=sync.init(LEAVES), **options)
        self.backward = Backward(self.engine, undo=self.undo)

    def undo(self) -> None:
        self.undone += 1

    def take_late(self) -> None:
        for name in ("b", "a") if self.late else ():
            if name in self.backward.step.missing:
                self.put(name)

    def put(self, name: str) -> None:
        self.backward.step.feed(name, LEAVES[name] + 1.0 + self.rank)

    def fail(self) -> None:
        raise ZeroDivisionError(f"of rank {self.rank}")

    # States

    def open(self) -> None:
        self.backward.begin()
        self.backward.attempt(lambda: self.put("b"))

    def fail_here(self) -> None:
        self.open()
        self.backward.attempt(self.fail)

    def abandon(self) -> None:
        def begin(_: Tensor) -> None:
            self.open()
            self.backward.end_with_autograds(lambda: None)
            raise FloatingPointError

        x = torch.ones((), requires_grad=True)
        x.register_hook(begin)
        with pytest.raises(FloatingPointError):
            (2 * x).backward()

    # Events

    def gradient(self) -> None:
        if not self.backward.is_running():
            self.backward.begin()
        self.backward.attempt(lambda: self.put("a"))

    def gradient_at_the_end(self) -> None:
        self.late = True

    def own_error(self) -> None:
        self.backward.keep(OverflowError(f"of rank {self.rank}"))  # the first error is the one to raise

    def dead_wire(self) -> None:
        self.wire.is_dead = True


def nothing(_: Rank) -> None:
    pass


# What this rank and the other one do to be in a state, and what the other one does at an event.
STATES: dict[str, tuple[Callable[[Rank], None], Callable[[Rank], None]]] = {
    "idle": (nothing, nothing),
    "open": (Rank.open, Rank.open),
    "failed here": (Rank.fail_here, Rank.open),
    "failed there": (Rank.open, Rank.fail_here),
    "abandoned": (Rank.abandon, Rank.open),
}
EVENTS: dict[str, tuple[Callable[[Rank], None], Callable[[Rank], None]]] = {
    "gradient": (Rank.gradient, Rank.gradient),
    "late gradient": (Rank.gradient_at_the_end, Rank.gradient_at_the_end),
    "own error": (Rank.own_error, nothing),
    "peer's error": (nothing, Rank.own_error),
    "dead wire": (Rank.dead_wire, Rank.dead_wire),
    "next forward": (lambda me: me.backward.require_idle(), nothing),
    "end": (nothing, nothing),
}
OWN, LATER, TOLD, DEAD = ZeroDivisionError, OverflowError, StepFailedError, CollectiveError
DONE, OVER = "means", "no step is left"

# How the step ends here and there, if both ranks then end it: at first as a rule, then at the events that differ.
ENDINGS: dict[str, tuple[tuple[Any, Any], dict[str, tuple[Any, Any]]]] = {
    "idle": ((OVER, OVER), {"gradient": (DONE, DONE), "own error": (LATER, OVER), "peer's error": (OVER, LATER)}),
    "open": (
        (DONE, DONE),
        {
            "own error": (LATER, TOLD),
            "peer's error": (TOLD, LATER),
            "dead wire": (DEAD, DEAD),
            "next forward": (OVER, TOLD),
        },
    ),
    "failed here": (
        (OWN, TOLD),
        {"peer's error": (OWN, LATER), "dead wire": (OWN, DEAD), "next forward": (OVER, TOLD)},
    ),
    "failed there": (
        (TOLD, OWN),
        {"own error": (LATER, OWN), "dead wire": (DEAD, OWN), "next forward": (OVER, OWN)},
    ),
}
TABLE = {(state, event): row.get(event, rule) for state, (rule, row) in ENDINGS.items() for event in EVENTS}
TABLE |= {("abandoned", "next forward"): (OVER, TOLD), ("abandoned", "gradient"): (DONE, DONE)}


def ended(rank: Rank) -> Any:
    if rank.backward.step is None and rank.backward.failure is None:
        return OVER
    try:
        rank.backward.end(rank.take_late)
    except Exception as error:
        return type(error)
    return DONE


def check(rank: int, state: str, event: str) -> None:
    me = Rank(rank)
    before = bits(me.engine.state)
    STATES[state][rank](me)
    EVENTS[event][rank](me)
    if (state, event) == ("abandoned", "gradient"):  # which begins the next step; the other rank's has failed
        assert me.engine.failed_steps == 1 - rank
        if rank == 1:
            assert ended(me) is TOLD
            me.gradient()
    outcome = ended(me)
    assert outcome == TABLE[state, event][rank]
    assert me.backward.step is None
    assert me.backward.failure is None
    has_failed = state != "idle" and (me.engine.failed_steps > 0)
    assert me.undone == (1 if has_failed or outcome in (OWN, LATER) else 0)
    if event == "dead wire" and state != "idle":
        with pytest.raises(RuntimeError, match="desynchronized"):
            me.backward.begin()
        return
    if outcome != DONE:
        assert bits(me.engine.state) == before
    me.wire.is_dead = me.late = False
    me.backward.require_idle()
    me.backward.begin()
    for name in ("b", "a"):
        me.put(name)
    mean = me.backward.end().mean
    assert [mean[name].unique().tolist() for name in LEAVES] == [[1.5], [1.5]]


@pytest.mark.parametrize(("state", "event"), TABLE)
def test_each_event_in_each_state(state: str, event: str) -> None:
    run_threads(2, check, state, event)


@pytest.mark.parametrize("handles", [False, True])
def test_what_a_peer_is_told_of_a_backward_that_was_broken_off(handles: bool) -> None:
    """Also of the error, where the step ends in its handler."""

    def told(rank: int) -> None:
        me = Rank(rank)
        STATES["abandoned"][rank](me)
        if rank == 1:
            cause = ": ValueError: bad batch" if handles else r"\. State and parameters are unchanged on all ranks"
            with pytest.raises(StepFailedError, match=f"rank 0 failed with RuntimeError: {UNFINISHED}{cause}"):
                me.backward.end()
        elif handles:
            try:
                raise ValueError("bad batch")
            except ValueError:
                me.backward.require_idle()
        else:
            me.backward.require_idle()

    run_threads(2, told)
