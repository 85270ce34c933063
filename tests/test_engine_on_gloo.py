"""Runners and the engine on gloo processes: late, missing and wrong gradients, ranks that fail, hang or die."""

import gc
import linecache
import random
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import fnddp
from fnddp import LoweringError, StepFailedError, allreduce, error_feedback, fp16, from_hook, lower, partition
from fnddp.core.sync import groups_of
from fnddp.laws import DONATIONS, bits, engine_step, gather, make_engine
from fnddp.plan.draft import Donation
from fnddp.simulation.ranks import run_threads
from fnddp.wire.protocol import CollectiveError
from tests.pipelines import EXAMPLES, grads
from tests.ranks import on_ranks
from tests.test_passes import Applied
from tests.ways import Trap

COMPRESSED = EXAMPLES["error_feedback"]
STEPS = 7


model_grads = partial(grads, "model")


def large_grads(rank: int, step: int = 0) -> dict[str, Tensor]:
    """Large enough for messages instead of gloo's collectives: the ring that adds float16, and direct ones.

    Multiples of 3 and 4 ranks, of a few bits: every order of summation gives the same.
    """
    generator = torch.Generator().manual_seed(100 * step + rank)
    shapes = {"small": (5,), "large": (363, 364), "larger": (140000,), "odd": (131073,)}
    return {
        path: torch.randint(-8, 9, shape, generator=generator).to(torch.float32) * 12 for path, shape in shapes.items()
    }


def missing_on(rank: int, step: int, paths: list[str]) -> set[str]:
    """The leaves that do not arrive on `rank`: known to all ranks, so that they know what to expect."""
    draw = random.Random(f"{rank} {step}")
    if step == 2:
        return set(paths)  # on all ranks
    never = set(paths[:1]) if step == 4 else set()
    return never | {path for path in paths if draw.random() < 0.3}


def check_chaos(rank: int, text: str, make_grads: Any, donation: Donation) -> None:
    """Gradients are late or never come, and in some steps a rank fails when it has some of them."""
    sync, n = fnddp.parse(text), dist.get_world_size()
    engine = make_engine(sync, make_grads(rank), donation, learns_order=True)
    state, expected = sync.init(make_grads(rank)), sync.init(make_grads(rank))
    draw = random.Random(rank)
    for step in range(STEPS):
        mine, culprit = make_grads(rank, step), {0: 1, 3: 0, 5: n - 1}.get(step)  # with none, three and all of its own
        copies, before = {path: grad.clone() for path, grad in mine.items()}, bits(state)
        missing = missing_on(rank, step, list(mine))
        if culprit is None:  # before the engine's collectives are under way: those of a group must not mix
            zeroed = {path: torch.zeros_like(g) if path in missing else g for path, g in mine.items()}
            mean, expected = sync(zeroed, expected)
        engine.begin(state)
        for path in draw.sample(list(mine), min(step, len(mine)) if culprit == rank else len(mine)):
            time.sleep(draw.random() * (0.02 if rank == step % n else 0.001))  # one is much slower
            if path not in missing:
                engine.step.feed(path, copies[path])
            engine.step.advance()
        if culprit is None:
            done = engine.step.finish()
            state = engine.state
            everywhere = [missing_on(r, step, list(mine)) for r in range(n)]
            assert done.unused == set.intersection(*everywhere)
            assert bits(done.mean) == bits(mean), f"step {step}"
            assert bits(state) == bits(expected), f"step {step}"
        elif rank == culprit:
            engine.fail(Trap(f"out of luck in step {step}"))
        else:
            with pytest.raises(StepFailedError, match=f"rank {culprit} failed with .*Trap: out of luck in") as caught:
                engine.step.finish()
            engine.fail(caught.value)  # as adapters do: the step is over, and nothing happens
            assert bits(copies) == bits(mine) or donation.gradients != "at_end"
        assert bits(state) == before or culprit is None
        assert not engine.is_open


@pytest.mark.parametrize("text", ["allreduce", COMPRESSED, "error_feedback(fp16(allreduce, check=True))"])
@pytest.mark.parametrize("donation", DONATIONS, ids=str)
def test_late_and_missing_gradients_and_ranks_that_fail(text, donation):
    run_threads(2, check_chaos, text, model_grads, donation)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("n", "text"), [(3, "error_feedback(quantize(two_shot))"), (4, "error_feedback(fp16(allreduce))")]
)
def test_late_and_missing_gradients_and_ranks_that_fail_in_messages(gloo, n, text):
    gloo(n, check_chaos, text, large_grads, DONATIONS[n - 2])


@pytest.mark.thorough
@on_ranks(3)
def test_all_ranks_get_the_same_bits_through_a_ring(rank: int) -> None:
    sync = fnddp.parse("powersgd(fp16(allreduce), rank=2, min_compression_rate=1)")
    engine, state = make_engine(sync, large_grads(rank)), sync.init(large_grads(rank))
    for step in range(3):
        random_grads = {path: torch.randn(grad.shape) for path, grad in large_grads(rank, step).items()}
        with fnddp.WireCounter() as counter:
            done = engine_step(engine, state, random_grads, random.Random(rank))
        assert engine.plan is not None  # in which a ring is one collective
        assert (counter.wire_bytes, counter.collectives) == (engine.plan.wire_bytes, len(engine.plan.collectives))
        state = engine.state
        everyone = gather((bits(done.mean["large"]), bits(done.mean["odd"][:100]), bits(state)))
        assert all(other == everyone[0] for other in everyone)


# Wrong gradients


BAD_FEEDS = [
    ("fc.waight", lambda g: g["fc.weight"], r"gradient 'fc.waight' is not among the plan's leaves"),
    ("fc.weight", lambda g: g["fc.weight"].t(), r"gradient 'fc.weight' is float32\[20, 12\] on cpu, but the plan was"),
    ("fc.weight", lambda g: g["fc.weight"].double(), r"gradient 'fc.weight' is float64\[12, 20\] on cpu, but the plan"),
    ("fc.bias", lambda g: g["fc.bias"], r"gradient 'fc.bias' has already arrived in this step"),
]


@pytest.mark.parametrize("text", [COMPRESSED, "fp16(allreduce, check=True)"])
def test_wrong_gradients_are_named_and_change_nothing(text):
    sync, mine = fnddp.parse(text), model_grads(0)
    engine = make_engine(sync, mine)
    mean, state = sync(mine, sync.init(mine))
    engine.begin(sync.init(mine))
    engine.step.feed("fc.bias", mine["fc.bias"].clone())
    for path, grad_of, message in BAD_FEEDS:
        with pytest.raises(ValueError, match=message):
            engine.step.feed(path, grad_of(mine))
    for path in ("conv.weight", "fc.weight", "out.weight"):
        engine.step.feed(path, mine[path].clone())
    assert bits(engine.step.finish().mean) == bits(mean)
    assert bits(engine.state) == bits(state)


# A rank that fails


@on_ranks(4, threads=True)
def test_a_failure_is_known_in_all_groups(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    sync = partition({"fc*": fnddp.all_reduce(group=pairs[rank // 2].group_name), "*": allreduce})
    engine = make_engine(sync, model_grads(rank))
    for step in range(4):
        mean, state = sync(model_grads(rank, step), sync.init(model_grads(rank)))
        engine.begin(state)
        if step == 2 and rank == 3:
            engine.fail(Trap("in the second pair"))
            continue
        for path, grad in model_grads(rank, step).items():
            engine.step.feed(path, grad)
        if step == 2:
            with pytest.raises(StepFailedError, match="rank 3 failed with .*in the second pair"):
                engine.step.finish()
        else:
            assert bits(engine.step.finish().mean) == bits(mean)


# Ranks that hang or die


@pytest.mark.thorough
@on_ranks(2)
def test_a_missing_rank_is_an_error_after_the_timeout(rank: int) -> None:
    """In a ring of messages, which hears of it when the group's timeout is over. (Others are in test_failures.)"""
    group = dist.new_group(timeout=timedelta(seconds=3))
    engine = make_engine(fp16(allreduce).over(group), large_grads(rank))
    engine_step(engine, (), large_grads(rank), random.Random(rank))
    step, grads = engine.begin(()), list(large_grads(rank, 1).items())
    for path, grad in grads[: 2 if rank == 1 else None]:
        step.feed(path, grad)
    if rank == 0:
        with pytest.raises(CollectiveError, match="Another rank has failed, left, or not called backward") as caught:
            step.finish()
        engine.fail(caught.value)
        with pytest.raises(RuntimeError, match="an earlier step failed on this rank.*restart from a checkpoint"):
            engine.begin(())
    dist.barrier()  # on the default group: rank 1 waits here


# A pipeline that cannot be lowered


EAGER = error_feedback(fp16(allreduce, check=True))


@on_ranks(2, threads=True)
def test_which_ranks_a_pipeline_without_a_plan_reaches(rank: int) -> None:
    """Who cannot say which ranks it reaches asks none, and refuses to go on after an error."""
    hook = from_hook(allreduce_hook)
    assert EAGER.over("7").groups == {"7"}
    assert partition({"a": fnddp.all_reduce(group="7"), "*": EAGER}).groups == {"7", None}
    assert hook.groups is partition({"a": hook, "*": EAGER}).groups is None
    assert groups_of(partition({"a": hook, "*": EAGER})) == (None,)
    engine = make_engine(hook, model_grads(rank))
    engine.begin(())
    engine.fail(Trap("here"))
    with pytest.raises(RuntimeError, match="an earlier step failed on this rank .Trap: here"):
        engine.begin(())


@torch.library.custom_op("fnddp_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


def with_first_row(x: Tensor, row: Tensor) -> Tensor:
    result = 2 * x
    result[0] = row[0]
    return result


def doubled_in_a_list(x: Tensor) -> Tensor:
    result = x.clone()
    torch._foreach_mul_([result], 2)
    return result


def doubled_through_a_view(x: Tensor) -> Tensor:
    result = x.clone()
    view = result.view(-1)
    view *= 2
    return result


def squared_in_place(x: Tensor) -> Tensor:
    result = x.clone()
    result **= 2
    return result


def doubled_behind_a_view(x: Tensor) -> Tensor:
    result = x.clone()
    view = result.view(-1)
    result.mul_(2)
    return view.view(x.shape).clone()


FOREIGN = [  # and why they cannot be lowered
    (twice, "it runs code that needs tensors with values"),
    (torch.compile(lambda x: 2 * x, backend="eager"), "it runs code that needs tensors with values"),
    (lambda x: x * round(x.sum().item() * 2 / 7), "it reads the values of tensors"),
    (
        lambda x: x * torch.repeat_interleave(torch.tensor([2, 5]), torch.tensor([1, 0])),
        "it reads the values of tensors",
    ),
    (lambda x: with_first_row(x, 2 * x), "it writes with aten.copy_.default to memory"),
    (doubled_in_a_list, "it writes with aten._foreach_mul_.Scalar to memory"),
    (doubled_through_a_view, "it writes with aten.mul_.Tensor to memory"),
    (doubled_behind_a_view, "it writes with aten.mul_.Tensor to memory"),
    (lambda x: 2 * x + 0 * torch.randn(2, generator=torch.Generator().manual_seed(0)), "it captures a Generator"),
]


@pytest.mark.parametrize(("fn", "reason"), FOREIGN)
def test_what_cannot_be_traced_has_no_plan_and_runs(fn, reason):
    sync, grads = Applied(fn), {"w": torch.tensor([[1.0, 2.0], [0.0, 4.0]])}
    with pytest.raises(LoweringError, match=f"cannot be lowered: {reason}"):
        lower(sync, grads, world_size=2)
    step = fnddp.jit(sync)
    for _ in range(2):
        mean, _ = step(grads, ())
        assert step.plan is None
        assert torch.equal(mean["w"], 2 * grads["w"])


@pytest.mark.parametrize(
    "fn", [lambda x: x.clone().bernoulli_(), lambda x: x.half().floor_divide_(torch.ones(2)).float()]
)
def test_an_operation_in_place_with_other_defaults_or_dtypes_has_no_plan(fn):
    step, grads = fnddp.jit(Applied(fn)), {"w": torch.tensor([0.0, 1.0])}
    assert step(grads, ())[0]["w"].shape == (2,)
    assert step.plan is None


def test_a_power_in_place_has_a_plan():
    step = fnddp.jit(Applied(squared_in_place))
    assert step({"w": torch.tensor([2.0, 3.0])}, ())[0]["w"].tolist() == [4, 9]
    assert step.plan is not None


class Grown(Applied):
    """Multiplied by a number in the state: the sum of as many ones."""

    def init(self, grads: Any) -> Any:
        return 2

    def exchange(self, grads: Any, state: Any) -> fnddp.Exchange:
        grown = {path: leaf * torch.ones(state).sum() for path, leaf in grads.items()}
        return super().exchange(grown, ())._replace(state=state + 1)


def test_tensors_as_large_as_a_number_in_the_state_have_no_plan_and_run():
    sync, grads = Grown(), {"w": torch.tensor([1.0, 2.0])}
    with pytest.raises(
        LoweringError, match="cannot be lowered: it makes a tensor whose size depends on a number in the state"
    ):
        lower(sync, grads, world_size=2)
    step, state = fnddp.jit(sync), 2
    for factor in (2, 3):
        mean, state = step(grads, state)
        assert torch.equal(mean["w"], factor * grads["w"])


class Paced(Applied):
    """Multiplied by a function of a counter in the state."""

    first = 0

    def init(self, grads: Any) -> Any:
        return self.first

    def exchange(self, grads: Any, state: Any) -> fnddp.Exchange:
        paced = {path: leaf * self.before(state) for path, leaf in grads.items()}
        return fnddp.Exchange(paced, paced, state + 1)


@pytest.mark.parametrize(
    ("fn", "has_plan"),
    [
        (lambda n: 3 / (n + 1), True),
        (lambda n: (n + 1) ** -0.5, True),
        (lambda n: min(n, 2) / 4, True),
        (lambda n: round(n / 2), False),
    ],
)
def test_counters_are_numbers(fn, has_plan):
    sync, grads = Paced(fn), {"w": torch.tensor([1.0, 3.0])}
    step, state = fnddp.jit(sync), 0
    for count in range(4):
        mean, state = step(grads, state)
        assert torch.equal(mean["w"], fn(count) * grads["w"])
    assert (step.plan is not None) == has_plan


@pytest.mark.parametrize("first", [0.0, False])
def test_a_state_of_other_numbers_has_no_plan_and_runs(monkeypatch, first):
    monkeypatch.setattr(Paced, "first", first)
    step = fnddp.jit(Paced(lambda n: n + 1))
    assert step({"w": torch.ones(2)}, first)[1] == 1
    assert step.plan is None


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, NotImplementedError])
def test_the_errors_of_a_pipeline_are_its_own(kind):
    def fails(x: Tensor) -> Tensor:
        raise kind("mine")

    grads = {"w": torch.ones(2, 2)}
    for call in (lambda sync: lower(sync, grads, world_size=2), lambda sync: fnddp.jit(sync)(grads, ())):
        with pytest.raises(kind, match="mine") as caught:
            call(Applied(fails))
        assert caught.type is kind


def test_a_traceback_through_a_plan_shows_its_source_while_the_plan_lives():
    files = set(linecache.cache)
    engine = make_engine(fnddp.bf16(fnddp.allreduce), {"w": torch.ones(3)}, Donation(), learns_order=False)
    plan = engine.prepare()
    assert plan is not None
    for segment in plan.segments:
        code = segment.run.__code__
        assert linecache.getline(code.co_filename, 1).startswith("def run(")
        assert linecache.getline(code.co_filename, code.co_firstlineno + 1).strip()
    del engine, plan, segment, code
    gc.collect()
    assert {file for file in linecache.cache if file.startswith("<plan ")} <= files
