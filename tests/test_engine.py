"""Plans, memory and failures that outlive steps, and when steps send, on a wire where all ranks send the same.

Last, steps over a wire whose ranks come and go: what a step that is none leaves, and when ranks are in step again.
"""

import logging
import re
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fnddp
from fnddp import DistributedDataParallel, StepFailedError, Sync, allgather, allreduce, error_feedback, fp16
from fnddp.core import tree
from fnddp.laws import bits
from fnddp.run import engine as engines
from fnddp.run import step as steps
from fnddp.wire.protocol import CollectiveError, Elastic
from tests.models import grads_of
from tests.ways import failing
from tests.wires import AloneWire, LostWork, ReadyWork, engine_for

GRADS = {"a": torch.ones(4), "b": torch.full((4,), 2.0), "c": torch.full((4,), 3.0)}
COMPRESSED = fnddp.parse("error_feedback(powersgd(bf16(allreduce), rank=1))")
OUT_OF_STEP = r"an earlier step failed on this rank \(.*desynchronized"


class Products(nn.Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, names: str, x: float = 1.0) -> Tensor:
        """Gradients come in the reverse order of `names`."""
        total = torch.zeros(())
        for name in names:
            total = total + x * self.get_parameter(name).sum()
        return total


def wrapped(sync: Sync = allreduce, wire: AloneWire | None = None, **options: Any) -> DistributedDataParallel:
    module = Products({"a": (4,), "b": (4,), "c": (4,)})
    return DistributedDataParallel(module, sync=sync, wire=wire or AloneWire(), **options)


def test_a_state_is_made_for_the_ranks_of_the_wire():
    sync = fnddp.parse("sign(two_shot(server_memory=True))")
    model, step = wrapped(sync, AloneWire(3)), fnddp.jit(sync, wire=AloneWire(3))
    for _ in range(2):
        model("abc").backward()
        model.reset_sync()
    step(GRADS, step.init(GRADS))
    assert model.sync_state.residual["a"].shape == (2,)  # of 4 elements on 3 ranks


# What steps keep


def plans_of(sync: Sync, calls: list[tuple[dict[str, Tensor], Any]]) -> list[Any]:
    step, plans = fnddp.jit(sync, wire=AloneWire()), []
    for grads, state in calls:
        step(grads, state)
        plans.append(step.plan)
    return plans


def test_the_plan_of_the_oldest_phase_goes(monkeypatch):
    """That each phase has one plan is in test_plan."""
    monkeypatch.setattr(engines, "MAX_PHASES", 2)
    sync = fnddp.parse("switch({0: allreduce, 1: bf16(allreduce), 2: fp16(allreduce)})")
    state = sync.init(GRADS)
    plans = plans_of(sync, [(GRADS, state._replace(step=step)) for step in (0, 1, 0, 2, 0)])
    assert plans[2] is plans[0] is not plans[4]


def test_plans_are_those_of_leaves_of_such_shapes_and_the_oldest_goes(monkeypatch):
    monkeypatch.setattr(engines, "MAX_PHASES", 2)
    one, other, wide = {"w": torch.ones(1)}, {"w": torch.ones(2)}, {"w": torch.ones(1, dtype=torch.float64)}
    plans = plans_of(allreduce, [(each, ()) for each in (one, other, one, wide, one, other)])  # one again and again
    assert plans[0] is plans[2] is plans[4]
    assert len({id(plan) for plan in plans}) == 4


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_a_slow_lowering_is_logged(monkeypatch, caplog, seconds):
    monkeypatch.setattr(engines, "SLOW_SECONDS", seconds)
    with caplog.at_level(logging.WARNING, "fnddp"):
        fnddp.jit(allreduce, wire=AloneWire())(GRADS, ())
    text = r"made a plan of allreduce for 3 gradients in ([\d.]+) s; "
    found = [re.match(text, message) for message in caplog.messages]
    assert [float(each[1]) < 60 for each in found if each] == [True] * (seconds == 0)


# When it goes on after a failure


class LosingWire(AloneWire):
    loses = ""

    def start(self, *given: Any, **options: Any) -> ReadyWork:
        work = super().start(*given, **options)
        return LostWork(self.loses) if self.loses in ("collective", "silently") else work

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, ReadyWork]:
        votes, work = super().vote(flags, group)
        return votes, LostWork() if self.loses == "vote" else work


@pytest.mark.parametrize(
    ("sync", "loses"),
    [(allreduce, "collective"), (allreduce, "silently"), (allreduce, "vote"), (fp16(allreduce, check=True), "vote")],
    ids=str,
)
def test_after_a_failed_collective_the_engine_refuses_steps(sync, loses):
    wire = LosingWire()
    step = fnddp.jit(sync, wire=wire)
    for _ in range(2):
        step(GRADS, ())
    wire.loses = loses
    lost = "returned False" if loses == "silently" else "connection closed.*Another rank"
    with pytest.raises(CollectiveError, match=lost):
        step(GRADS, ())
    wire.loses = ""
    with pytest.raises(RuntimeError, match=OUT_OF_STEP):
        step(GRADS, ())


@pytest.mark.parametrize(
    ("sync", "group"), [(allreduce, None), (fnddp.all_reduce(group="7"), "7"), (fnddp.none, None)], ids=str
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_after_an_error_while_tracing_only_a_rank_alone_goes_on(monkeypatch, sync, group, ranks):
    wire = AloneWire()
    monkeypatch.setattr(wire, "size", lambda asked: ranks if asked == group else 1)
    step = fnddp.jit(sync, wire=wire)
    with failing(type(sync), "exchange", error=ZeroDivisionError()), pytest.raises(ZeroDivisionError):
        step(GRADS, ())
    if ranks == 1:
        step(GRADS, ())
    else:
        with pytest.raises(RuntimeError, match=r"\(ZeroDivisionError: .*desynchronized"):
            step(GRADS, ())


# What is sent when


class SlowWire(AloneWire):
    is_done = True

    def start(self, *given: Any, **options: Any) -> ReadyWork:
        work = super().start(*given, **options)
        work.is_completed = lambda: self.is_done  # type: ignore[method-assign]
        return work


def test_a_second_round_leaves_while_gradients_are_still_made(monkeypatch):
    """That of the matrix, whose gradient comes first; then come a bucket of some vectors, and one of all others."""
    monkeypatch.setattr(steps, "POLL_SECONDS", 0)
    vectors = [f"v{i}" for i in range(100)]
    wire = SlowWire()
    module = Products(dict.fromkeys(vectors, (4,)) | {"w": (6, 5)})
    sync = fnddp.parse("partition({'w': powersgd(allreduce, min_compression_rate=0), '*': allreduce})")
    model = DistributedDataParallel(module, sync=sync, wire=wire, bucket_cap_mb_list=[1e-5, 1e-4, 25])
    for _ in range(2):  # the first one learns the order
        model([*vectors, "w"]).backward()
        model.zero_grad()
    sent: list[list[str]] = []
    is_done_then = [False, True]
    module.v90.register_hook(lambda _: setattr(wire, "is_done", is_done_then.pop(0)))
    module.v0.register_hook(lambda _: sent.append(list(wire.log)))
    for _ in range(2):
        model.zero_grad()
        wire.log.clear()
        wire.is_done = False
        model([*vectors, "w"]).backward()
        assert wire.log == [*[f"all_reduce {i}" for i in range(4)], "vote"]
    assert sent == [wire.log[:2], wire.log[:3]]


def test_the_order_of_the_first_step_is_the_one_of_later_ones():
    model = wrapped(bucket_cap_mb=1e-5)
    for names in ("cb", "bac"):
        model.zero_grad()
        model(names).backward()
    assert list(model.plan.buckets) == ["b", "c", "a"]
    assert model.module.a.grad.tolist() == [1.0] * 4
    plan = model.plan
    model("abc").backward()
    assert model.plan is plan


def test_models_that_share_a_wire_send_where_their_steps_end_in_the_order_in_which_they_were_wrapped():
    wire = AloneWire()
    first, then = wrapped(allreduce, wire), wrapped(allgather, wire)
    for one, other in ((first, then), (first, then), (then, first)):  # the first backward learns orders
        wire.log.clear()
        (other("abc") + one("abc")).backward()
    assert wire.log == ["all_reduce 0", "vote", "all_gather 0", "vote"]


# What it computes in


@pytest.mark.parametrize(
    ("text", "is_free"), [("allreduce", True), ("fp16(allreduce)", True), ("error_feedback(fp16(allreduce))", False)]
)
def test_a_small_gradient_is_free_when_it_has_arrived(text: str, is_free: bool):
    """It is copied to what is sent, while it is in the cache, if that is all that a plan does with it."""
    sync = fnddp.parse(text)
    engine = engine_for(sync, GRADS, state=sync.init(GRADS), wire=AloneWire())
    engine.begin()
    engine.run(GRADS)
    step, grads = engine.begin(), {path: leaf.clone() for path, leaf in GRADS.items()}
    references = [weakref.ref(each) for each in grads.values()]
    with torch.no_grad():
        for path in list(grads)[:-1]:
            step.feed(path, grads.pop(path))
        assert [each() is None for each in references] == [is_free, is_free, False]
        step.feed(*grads.popitem())
        mean = step.finish().mean
    assert bits(mean) == bits(GRADS)


@pytest.mark.parametrize("text", ["allreduce", "powersgd(allreduce, min_compression_rate=0)"])
def test_a_mean_that_the_caller_holds_is_not_written_over(text):
    step, held = fnddp.jit(fnddp.parse(text), wire=AloneWire()), []
    grads = {"w": torch.ones(6, 5)}
    state = step.init(grads)

    def where(*, holds: bool) -> int:
        nonlocal state
        mean, state = step(grads, state)
        part = mean["w"][1:]
        held.extend([part] * holds)
        return part.untyped_storage().data_ptr()

    first, second = where(holds=True), where(holds=True)
    assert first != second
    del held[0]
    assert where(holds=True) == first  # a caller that holds each mean for a step needs two
    assert where(holds=False) not in (first, second)


class Held:
    def __init__(self) -> None:
        self.kept = []

    def keep(self, memory):
        self.kept.append((memory, np.array(np.from_dlpack(memory))))
        return memory

    def require_unchanged(self, count: int) -> None:
        assert len(self.kept) == count
        assert all(np.array_equal(np.from_dlpack(memory), before) for memory, before in self.kept)


# What becomes of a gradient in the backward of a function of the user's.
GIVEN = {
    "numpy's": lambda grad, held: torch.from_numpy(held.keep(grad.numpy().copy())),
    "a buffer of Python's": lambda grad, held: torch.frombuffer(
        held.keep(np.frombuffer(bytearray(grad.numpy().tobytes()), np.float32)), dtype=torch.float32
    ).view(grad.shape),
    "given away by DLPack": lambda grad, held: torch.from_dlpack(held.keep(np.from_dlpack(grad.clone()))),
    "a tensor": lambda grad, held: held.keep(grad.clone()),
}


class Gives(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, give, held):
        ctx.give, ctx.held = give, held
        return w.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.give(grad, ctx.held), None, None


def products(params: dict[str, Tensor], x: Tensor, name: str, held: Held) -> Tensor:
    return (Gives.apply(params["w"], GIVEN[name], held) * x).sum()


def held_model() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(16, 16, bias=False), sync=COMPRESSED, wire=AloneWire())


@pytest.mark.parametrize("name", GIVEN)
def test_a_gradient_that_a_custom_function_holds_is_not_written_over(name):
    held, model, w = Held(), held_model(), {"w": torch.ones(16, 16)}
    model.module.forward = lambda x: products({"w": model.module.weight}, x, name, held)
    step, state = fnddp.value_and_grad(products, COMPRESSED, wire=AloneWire()), COMPRESSED.init(w)
    for number in range(3):
        model.zero_grad()
        model(torch.randn(16, 16)).backward()
        held.require_unchanged(2 * number + 1)
        _, _, state = step(w, state, torch.randn(16, 16), name, held)
        held.require_unchanged(2 * number + 2)


@pytest.mark.parametrize("give", [torch.Tensor.numpy, np.from_dlpack, torch.Tensor.contiguous])
def test_a_gradient_that_a_users_hook_holds_is_not_written_over(give):
    held, model = Held(), nn.Linear(16, 16, bias=False)

    def hook(w: Tensor) -> None:
        held.keep(give(w.grad))

    model.weight.register_post_accumulate_grad_hook(hook)
    model = DistributedDataParallel(model, sync=COMPRESSED, wire=AloneWire())
    for number in range(3):
        model.zero_grad()
        model(torch.randn(16, 16)).sum().backward()
        held.require_unchanged(number + 1)


def test_a_state_in_memory_of_numpy_is_copied():
    held, model = Held(), held_model()
    model.sync_state = tree.map_tensors(lambda part: torch.from_numpy(held.keep(part.numpy().copy())), model.sync_state)
    for _ in range(3):
        model(torch.randn(16, 16)).sum().backward()
        held.require_unchanged(2)


# Ranks that come and go


class Restless(LosingWire, Elastic):
    epoch = 0
    lost: Exception | None = None
    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.reported: list[Exception] = []

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, ReadyWork]:
        told, work = super().vote(flags, group)
        told[1, 0] = told[1, 0] or float(self.fails)
        return told, work

    def report(self, error: Exception) -> None:
        self.reported.append(error)


X = torch.ones(3, 4)


def linear(wire: Restless, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(4, 2), wire=wire, **options)


@pytest.mark.parametrize(("fails", "loses"), [(True, ""), (False, "vote")])
def test_a_failed_step_on_an_elastic_wire_restores_gradients_and_state(fails, loses):
    wire = Restless()
    model = linear(wire, sync=error_feedback(fp16(allreduce)))
    model(X).sum().backward()
    model.zero_grad()
    with model.no_sync():
        model(X).sum().backward()
    held = model.module.bias.grad
    before = bits([grads_of(model), model.sync_state])
    wire.fails, wire.loses = fails, loses
    model(X).sum().backward()  # does not raise: whoever is left goes on
    assert [type(error) for error in wire.reported] == [StepFailedError if fails else CollectiveError]
    assert bits([grads_of(model), model.sync_state]) == before
    assert model.module.bias.grad is held
    wire.fails, wire.loses = False, ""
    wire.epoch += 1
    model(X).sum().backward()  # and what was accumulated is synchronized now
    assert model.module.bias.grad.tolist() == [6.0, 6.0]
    assert len(wire.reported) == 1


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_step_that_is_rejected_after_its_end_is_undone(is_committed):
    model = linear(Restless())
    with model.no_sync():
        model(X).sum().backward()
    before = bits(grads_of(model))
    model(X).sum().backward()
    after = bits(grads_of(model))
    assert after != before
    model._steps.settle_on(is_committed)
    assert bits(grads_of(model)) == (after if is_committed else before)
    assert model._steps.unsynchronized == (set() if is_committed else {"weight", "bias"})
    model._steps.settle_on(False)  # it has been settled
    assert bits(grads_of(model)) == (after if is_committed else before)


def test_a_desynchronized_rank_goes_on_in_the_next_epoch():
    wire, leaves = Restless(), {path: torch.ones(3) for path in "ab"}
    engine = engine_for(allreduce, leaves, learns_order=True, bucket_caps=(1,), wire=wire)
    wire.loses = "vote"
    engine.begin(())
    with pytest.raises(CollectiveError):
        engine.run(leaves)
    wire.loses = ""
    with pytest.raises(RuntimeError, match="desynchronized"):
        engine.begin()
    wire.epoch += 1
    engine.begin()
    for path in "ab":
        engine.step.feed(path, leaves[path])
    assert engine.step.finish().mean["a"].tolist() == [1, 1, 1]
    assert engine.plan is not None
    assert list(engine.plan.buckets) == ["b", "a"]  # a newcomer has not seen in which order they came


def test_leaves_on_two_devices_are_refused_by_name() -> None:
    leaves = {"a": torch.ones(2), "b": torch.ones(2, device="meta")}
    with pytest.raises(ValueError, match=r"leaf 'b' is on meta, and leaf 'a' on cpu, .* move them, or give"):
        fnddp.jit(allreduce, wire=AloneWire())(leaves, ())


def test_a_group_without_a_backend_for_the_leaves_is_refused() -> None:
    dist.init_process_group("cuda:fake", rank=0, world_size=2, store=FakeStore())
    with pytest.raises(ValueError, match=r"has no backend for leaves on cpu, only cuda:fake; move them, or make"):
        DistributedDataParallel(nn.Linear(2, 2), init_sync=False)
