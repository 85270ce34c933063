"""An engine by itself, on a wire where all ranks hand over the same: what it keeps, what it learns, who goes first."""

import gc
import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fnddp import all_reduce, allgather, allreduce, error_feedback, every, fp16, none, powersgd
from fnddp.core.sync import Sync
from fnddp.ir.program import LeafSpec
from fnddp.laws import bits
from fnddp.plan.draft import Donation
from fnddp.plan.lower import lower
from fnddp.run import engine as engines
from fnddp.run import planned
from fnddp.run.engine import Engine, Engines
from fnddp.run.inbox import Inbox
from fnddp.run.memory import Memory
from fnddp.wire.protocol import CollectiveError
from tests.wires import AloneWire, LostWork, ReadyWork

NAMES = ("a", "b", "c")


def leaves(value: float = 1.0) -> dict[str, Tensor]:
    return {path: torch.full((4,), value * (1 + i)) for i, path in enumerate(NAMES)}


def make(sync: Sync = allreduce, wire: AloneWire | None = None, **options: Any) -> Engine:
    specs = {path: LeafSpec.of(leaf) for path, leaf in leaves().items()}
    given = {"donation": Donation(), "learns_order": False, **options}
    return Engine(sync, specs, state=sync.init(leaves()), wire=wire or AloneWire(), **given)


def step(engine: Engine, order: str = "cba", value: float = 1.0, **options: Any) -> dict[str, list[float]]:
    engine.begin(**options)
    for path in order:
        engine.step.feed(path, leaves(value)[path])
    return {path: mean.tolist() for path, mean in engine.step.finish().mean.items()}


WHOLE = {path: leaf.tolist() for path, leaf in leaves().items()}


# What it keeps


def test_a_step_is_counted_when_it_begins_and_when_it_has_ended():
    engine = make()
    assert (engine.begun, engine.steps, engine.failed_steps, engine.is_open) == (0, 0, 0, False)
    assert (engine.plan, engine.step.missing, engine.step.has_sent) == (None, frozenset(), False)
    engine.begin()
    assert (engine.begun, engine.steps, engine.is_open, engine.step.missing) == (1, 0, True, frozenset(NAMES))
    engine.step.feed("c", leaves()["c"])
    assert (engine.step.missing, engine.step.has_sent) == (frozenset("ab"), False)
    engine.step.feed_all({path: leaves()[path] for path in "ba"})
    assert (engine.step.missing, engine.step.has_sent) == (frozenset(), True)
    engine.step.finish()
    assert (engine.begun, engine.steps, engine.failed_steps, engine.is_open) == (1, 1, 0, False)
    engine.begin()
    assert not engine.step.has_sent
    engine.fail(ZeroDivisionError())
    engine.fail(ZeroDivisionError())  # no step is open
    assert (engine.begun, engine.steps, engine.failed_steps, engine.is_open) == (2, 1, 1, False)
    assert step(engine) == WHOLE


def test_a_plan_for_each_phase_is_made_once_and_the_oldest_goes(monkeypatch):
    plans = []
    engine = make(error_feedback(powersgd(allreduce, min_compression_rate=0, refresh=3, alternate=True)))
    for _ in range(6):
        step(engine)
        plans.append(engine.plan)
    assert len({id(plan) for plan in plans}) == 3
    assert all(plans[i] is plans[i + 3] for i in range(3))
    monkeypatch.setattr(engines, "MAX_PHASES", 2)
    few = make(error_feedback(powersgd(allreduce, min_compression_rate=0, refresh=3, alternate=True)))
    for _ in range(4):
        step(few)
        assert len(few._prepared) <= 2


def test_a_plan_is_made_before_the_first_step_on_request():
    engine = make(every(2, allreduce))
    plan = engine.prepare()
    step(engine)
    assert engine.plan is plan
    step(engine)
    assert engine.plan is not plan  # the other phase's


def test_the_state_is_the_users():
    sync = error_feedback(fp16(allreduce))
    engine = make(sync, donation=Donation("yes", state=True))
    start = engine.state
    before = bits(start)
    step(engine, value=1 / 3)
    assert bits(start) == before
    after = engine.state
    held = bits(after)
    assert held != before
    engine.begin()
    assert bits(engine.state) == held
    with pytest.raises(RuntimeError, match="the state cannot be set while a step is open"):
        engine.state = start
    engine.run(leaves(1 / 3))
    assert bits(after) == held
    engine.state = start
    step(engine, value=1 / 3)
    assert bits(engine.state) == held
    with pytest.raises(ValueError, match="got nothing; load a saved one"):
        engine.state = ()
    assert bits(engine.hand_over()) == held


def test_engines_are_those_of_leaves_and_a_state_of_such_shapes(monkeypatch):
    monkeypatch.setattr(engines, "MAX_PHASES", 2)
    of = Engines(allreduce, donation=Donation(), learns_order=False, wire=AloneWire())
    one, other, third = ({"w": torch.ones(size)} for size in (1, 2, 3))
    first = of.of(one, ())
    assert of.last is first
    second = of.of(other, ())
    assert second is not first
    assert of.of({"w": torch.zeros(1)}, ()) is first  # and so it is not the oldest any more
    assert of.of({"w": torch.ones(1, dtype=torch.float64)}, ()) is not first
    assert of.of(one, ()) is first
    assert of.of(other, ()) is not second
    assert of.of(third, {"v": torch.ones(1)}) is not of.of(third, {"v": torch.ones(2)})
    assert of.of(third, {"v": 1}) is of.of(third, {"v": 2})  # a counter
    assert of.of(third, {"v": 1}) is not of.of(third, {"u": 1})


# When it goes on


class LosingWire(AloneWire):
    """Loses collectives, or votes, of some steps."""

    loses = ""

    def start(self, *given: Any, **options: Any) -> ReadyWork:
        work = super().start(*given, **options)
        return LostWork() if "collective" in self.loses else work

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, ReadyWork]:
        told, work = super().vote(flags, group)
        return told, LostWork() if "vote" in self.loses else work


@pytest.mark.parametrize(
    ("sync", "loses"), [(allreduce, "collective"), (allreduce, "vote"), (fp16(allreduce, check=True), "vote")], ids=str
)
def test_a_rank_that_may_be_out_of_step_goes_no_further(sync, loses):
    wire = LosingWire()
    engine = make(sync, wire)
    step(engine)
    wire.loses = loses
    engine.begin()
    with pytest.raises(CollectiveError, match=r"connection closed.*Another rank has failed, left, or not called"):
        engine.run(leaves())
    assert (engine.is_open, engine.steps, engine.failed_steps) == (False, 1, 1)
    wire.loses = ""
    for go_on in (engine.start, engine.refuse_after_failure):
        with pytest.raises(RuntimeError, match=r"an earlier step failed on this rank \(CollectiveError: .*out of step"):
            go_on()


def test_a_failure_of_which_others_are_told_is_over_with_the_step():
    wire = LosingWire()
    engine = make(wire=wire, bucket_caps=(1,))
    engine.begin()
    engine.step.feed("c", leaves()["c"])
    wire.log.clear()
    engine.fail(ZeroDivisionError())  # and sends zeros where others wait for it
    assert wire.log[:3] == ["all_reduce 1", "all_reduce 2", "vote"]
    assert step(engine) == WHOLE
    engine.begin()
    wire.loses = "vote"
    engine.fail(ZeroDivisionError())
    with pytest.raises(RuntimeError, match="out of step"):
        engine.begin()


def test_weights_that_nobody_tells_end_the_step():
    wire = LosingWire()
    engine = make(wire=wire)
    step(engine, weight=2.0)
    wire.loses = "vote"
    engine.begin(weight=2.0)
    wire.loses = ""
    with pytest.raises(CollectiveError, match=r"could not exchange their weights: connection closed\. Another rank"):
        engine.run(leaves())
    with pytest.raises(RuntimeError, match="out of step"):
        engine.begin()


@pytest.mark.parametrize(("sync", "group"), [(allreduce, None), (all_reduce(group="7"), "7"), (none, None)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_cannot_begin_may_have_begun_on_others(monkeypatch, sync, group, ranks):
    wire = AloneWire()
    monkeypatch.setattr(wire, "size", lambda asked: ranks if asked == group else 1)
    engine = make(sync, wire)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_lower", lambda *_, **__: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.begin()
    assert not engine.is_open
    if ranks == 1:
        engine.begin()
    else:
        with pytest.raises(RuntimeError, match=r"\(ZeroDivisionError: .*out of step"):
            engine.begin()


def test_who_is_refused_from_now_on_is_refused():
    engine = make()
    engine.refuse_from_now_on(ZeroDivisionError("buffers"))
    with pytest.raises(RuntimeError, match=r"\(ZeroDivisionError: buffers\)"):
        engine.begin()


class SlowWork(ReadyWork):
    def __init__(self, wire: "SlowWire") -> None:
        self.wire = wire

    def is_completed(self) -> bool:
        return self.wire.is_done


class SlowWire(AloneWire):
    is_done = False

    def start(self, *given: Any, **options: Any) -> ReadyWork:
        super().start(*given, **options)
        return SlowWork(self)


def test_a_second_round_leaves_when_somebody_looks_now_and_then(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(planned, "perf_counter", lambda: clock[0])
    wire, grads = SlowWire(), {"w": torch.ones(6, 5)}
    sync = powersgd(allreduce, min_compression_rate=0)
    specs = {"w": LeafSpec.of(grads["w"])}
    options = {"state": sync.init(grads), "donation": Donation(), "learns_order": False, "wire": wire}
    engine = Engine(sync, specs, **options)
    engine.step.poll()  # no step is open
    engine.begin()
    engine.step.poll()
    engine.step.feed("w", grads["w"])
    assert engine.is_polled
    for look in (engine.poll, engine.poll_now_and_then):
        clock[0] += 1
        look()
        assert wire.log == ["all_reduce 0"]
    wire.is_done = True
    engine.step.poll()  # somebody has looked a moment ago
    assert wire.log == ["all_reduce 0"]
    clock[0] += planned.POLL_SECONDS
    engine.step.poll()
    assert wire.log == ["all_reduce 0", "all_reduce 1"]
    clock[0] += 1
    engine.step.poll()  # nothing is left but to commit
    wire.is_done = False
    torch.testing.assert_close(engine.step.finish().mean, grads)
    assert not make().is_polled
    once = make()
    step(once)
    assert not once.is_polled  # what one round needs is no collective's


def test_who_cannot_wait_for_somebody_to_look_carries_on():
    wire, grads = SlowWire(), {"w": torch.ones(6, 5), "v": torch.ones(6, 5)}
    sync = powersgd(allreduce, min_compression_rate=0)
    specs = {path: LeafSpec.of(leaf) for path, leaf in grads.items()}
    options = {"state": sync.init(grads), "donation": Donation(), "learns_order": False, "bucket_caps": (1,)}
    engine = Engine(sync, specs, wire=wire, **options)
    engine.begin()
    engine.step.feed("v", grads["v"])
    assert wire.log == ["all_reduce 0"]
    engine.step.advance(block=True)  # with what is there
    assert wire.log == ["all_reduce 0"]
    engine.step.feed("w", grads["w"])
    engine.step.advance(block=True)
    assert engine.plan is not None
    assert wire.log == [f"all_reduce {i}" for i in range(len(engine.plan.collectives))]
    torch.testing.assert_close(engine.step.finish().mean, grads)


# What it learns


def test_an_order_that_is_as_expected_needs_no_other_plan():
    engine = make(learns_order=True)
    step(engine, "cba")
    plan = engine.plan
    step(engine, "acb")  # learnt is that of the first step
    assert engine.plan is plan
    assert plan is not None
    assert list(plan.buckets) == ["c", "b", "a"]


@pytest.mark.parametrize("learns", [True, False])
def test_the_order_of_the_first_step_is_the_one_of_later_ones(learns):
    engine = make(learns_order=learns, bucket_caps=(1,))
    for order in ("bc", "cab"):
        assert step(engine, order) == {**WHOLE, **({"a": [0.0] * 4} if order == "bc" else {})}
    assert engine.plan is not None
    assert [c.payloads[0].label for c in engine.plan.collectives] == (["b", "c", "a"] if learns else ["c", "b", "a"])


@pytest.mark.parametrize("drops", [True, False])
def test_leaves_unused_in_the_first_step_are_left_out_where_it_may(drops):
    engine = make(learns_order=True, drops_unused=drops)
    step(engine, "ba")
    first = engine.plan
    step(engine, "ba")
    assert first is not None
    assert engine.plan is not None
    assert (first.wire_bytes, engine.plan.wire_bytes) == (48, 32 if drops else 48)
    assert drops or step(engine) == WHOLE


@pytest.mark.parametrize("checks", [True, False])
def test_who_is_asked_about_unused_leaves_may_end_the_step(checks):
    asked = []

    def check(unused: frozenset[str]) -> None:
        asked.append(unused)
        if unused:
            raise LookupError(f"{sorted(unused)}")

    engine = make(check_unused=check if checks else None)
    if checks:
        with pytest.raises(LookupError, match=r"\['a'\]"):
            step(engine, "cb")
        assert (engine.is_open, engine.steps, engine.failed_steps) == (False, 0, 1)
    else:
        step(engine, "cb")
    assert step(engine) == WHOLE
    assert asked == ([{"a"}, frozenset()] if checks else [])


def test_a_step_without_gradients_is_none_where_it_may_be():
    engine = make(skips_unused=True, check_unused=lambda unused: pytest.fail(f"{unused}"))
    engine.begin(weight=2.0)
    assert engine.step.finish() == ({}, frozenset(NAMES))
    assert (engine.steps, engine.failed_steps, engine.is_open) == (0, 0, False)
    assert make().start() is None
    without = make()
    without.start()
    assert without.finish().unused == frozenset(NAMES)
    assert without.steps == 1


# What it is given


@pytest.mark.parametrize("donation", [Donation("yes"), Donation("at_end"), Donation()])
@pytest.mark.parametrize("at_once", [True, False])
def test_gradients_to_keep_are_not_written_over(donation, at_once):
    engine = make(error_feedback(fp16(allreduce)), donation=donation)
    grads = leaves(1 / 3)
    before = bits(grads)
    for _ in range(2):
        engine.begin()
        if at_once:
            engine.step.feed_all(grads, keep=True)
        else:
            for path, grad in grads.items():
                engine.step.feed(path, grad, keep=True)
        engine.step.finish()
    assert bits(grads) == before


@pytest.mark.parametrize("at_once", [True, False])
def test_gradients_that_are_handed_over_are_written_over(at_once):
    """Or a step would need other memory for them."""
    engine = make(error_feedback(fp16(allreduce)), donation=Donation("yes"))
    grads = leaves(1 / 3)
    engine.begin()
    if at_once:
        engine.step.feed_all(grads)
    else:
        for path, grad in grads.items():
            engine.step.feed(path, grad)
    engine.step.finish()
    assert all(not torch.equal(grad, leaves(1 / 3)[path]) for path, grad in grads.items())


@pytest.mark.parametrize("keep", [True, False])
def test_scaled_gradients_stay_what_they_are(keep):
    engine = make(error_feedback(fp16(allreduce)), donation=Donation("yes"))
    grads = leaves()
    engine.begin(scale=0.5)
    assert engine.inbox is None  # which would take them as they are
    engine.step.feed_all(grads, keep=keep)
    mean = engine.step.finish().mean
    assert {path: (2 * leaf).tolist() for path, leaf in mean.items()} == WHOLE
    assert bits(grads) == bits(leaves())
    assert step(engine) == WHOLE


def test_a_weight_is_for_a_step():
    engine = make()
    assert step(engine, weight=3.0) == WHOLE  # as all ranks: the mean is the mean
    assert step(engine) == WHOLE
    with pytest.raises(ValueError, match="all of 2 ranks gave 0"):
        step(engine, weight=0.0)
    assert (engine.failed_steps, engine.is_open) == (1, False)
    engine.fail_next(ZeroDivisionError())
    assert (engine.failed_steps, engine.is_open) == (2, False)
    assert step(engine) == WHOLE


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_a_slow_lowering_is_told_of(monkeypatch, caplog, seconds):
    monkeypatch.setattr(engines, "SLOW_SECONDS", seconds)
    with caplog.at_level(logging.WARNING, "fnddp"):
        step(make())
    told = [re.match(r"lowered allreduce for 3 leaves in ([\d.]+) s, ", message) for message in caplog.messages]
    assert [float(each[1]) < 60 for each in told if each] == [True] * (seconds == 0)


# Who goes first


def pair(first: Sync = allreduce, then: Sync = allgather) -> tuple[AloneWire, Engine, Engine]:
    wire = AloneWire()
    return wire, make(first, wire), make(then, wire)


def test_a_step_that_began_later_sends_nothing_before_the_other_is_over():
    wire, first, then = pair()
    first.start()
    then.start()
    then.feed_all(leaves())
    then.catch_up()
    assert not then.has_sent
    first.feed_all(leaves())
    assert wire.log == ["all_reduce 0"]
    first.finish()
    then.finish()
    assert wire.log == ["all_reduce 0", "vote", "all_gather 0", "vote"]
    wire.log.clear()
    then.start()  # it is the first now
    first.start()
    then.feed_all(leaves())
    assert wire.log == ["all_gather 0"]
    then.finish()
    first.run(leaves())


def test_a_step_that_ends_first_carries_on_the_one_in_front():
    wire, first, then = pair()
    first.start()
    then.start()
    first.inbox.put(0, leaves()["a"])  # what nobody has looked at
    first.inbox.put(1, leaves()["b"])
    first.inbox.put(2, leaves()["c"])
    then.feed_all(leaves())
    then.finish()
    assert wire.log == ["all_reduce 0", "all_gather 0", "vote"]
    first.finish()


def test_engines_on_other_wires_do_not_wait():
    first, then = make(), make()
    first.start()
    then.start()
    assert step_of(then) == WHOLE
    assert step_of(first) == WHOLE


def step_of(engine: Engine) -> dict[str, list[float]]:
    return {path: mean.tolist() for path, mean in engine.run(leaves()).mean.items()}


def test_who_waits_for_a_step_that_fails_fails_with_it():
    _, first, then = pair()
    first.start()
    then.start()
    first.fail(ZeroDivisionError())
    assert (first.is_open, then.is_open) == (False, False)
    assert step(first) == step(then) == WHOLE
    first.start()
    then.start()
    then.fail(ZeroDivisionError())
    assert (first.is_open, then.is_open) == (False, False)
    assert step(first) == step(then) == WHOLE


def test_who_waited_and_is_gone_is_not_missed():
    _, first, then = pair()
    first.start()
    then.start()
    del then
    gc.collect()
    first.fail(ZeroDivisionError())
    assert step(first) == WHOLE


# What it computes in


def test_of_buffers_that_somebody_holds_there_is_another():
    (collective,) = lower(allreduce, leaves(), world_size=2).collectives
    memory = Memory()
    first = memory.take(collective, views_apart=False)
    assert memory.take(collective, views_apart=False) is first
    held = first.receive[1:]
    second = memory.take(collective, views_apart=False)
    assert second is not first
    del held
    held = second.receive[1:]
    assert memory.take(collective, views_apart=False) is first  # who holds each mean for a step needs two
    holds = [held, first.receive[1:]]
    assert memory.take(collective, views_apart=False) not in (first, second)
    holds.clear()
    del held
    assert memory.take(collective, views_apart=False) is second  # and no more than two are kept
    memory.clear()
    assert memory.take(collective, views_apart=False) not in (first, second)


def test_of_means_that_somebody_holds_there_is_another():
    memory, leaf = Memory(), LeafSpec.of(torch.empty(3, 2, dtype=torch.float64))
    new = memory.take_mean("a", leaf)
    assert (new.shape, new.dtype, new.device) == (leaf.shape, leaf.dtype, leaf.device)
    given = [torch.ones(3, 2) for _ in range(3)]
    where = [each.data_ptr() for each in given]
    for each in given:
        memory.give_mean("a", each)
    held = given[2][1:]
    del each
    assert memory.take_mean("a", leaf) is given[1]
    assert memory.take_mean("a", leaf).data_ptr() not in where  # the last one is held, and the first one forgotten
    del held
    assert memory.take_mean("a", leaf) is given[2]
    assert memory.take_mean("b", leaf).data_ptr() not in where


# What hooks write to


def test_an_inbox_says_when_it_is_time_to_look():
    inbox = Inbox([0, 0, 1], [2, 1], None, is_polled=False)
    assert not inbox.is_open
    inbox.open()
    grads = [torch.tensor(float(i)) for i in range(3)]
    assert [inbox.put(0, grads[0]), inbox.put(1, grads[1]), inbox.put(2, grads[2])] == [False, True, True]
    assert [position for position, _ in inbox.noted] == [0, 1, 2]
    inbox.uncount(2)
    assert inbox.lacking == [0, 1]
    inbox.close()
    assert (inbox.is_open, inbox.noted, inbox.lacking) == (False, [], [])
    inbox.open()
    assert inbox.lacking == [2, 1]


@pytest.mark.parametrize("polled", [True, False])
def test_an_inbox_of_many_leaves_asks_for_a_look_now_and_then(polled):
    inbox = Inbox([0] * 100, [101], None, is_polled=polled)
    for _ in range(2):
        inbox.open()
        looks = [i for i in range(100) if inbox.count(i)]
        assert looks == ([31, 63, 95] if polled else [])
