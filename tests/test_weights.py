"""Weighted means: a weight that a rank gives is used, or is an error on all ranks; and the next step is right."""

import math
import random
from contextlib import ExitStack, nullcontext, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import fnddp
from fnddp import CollectiveError, DistributedDataParallel, StepFailedError, allreduce, fp16
from fnddp.simulation.ranks import run_threads
from fnddp.wire.c10d import C10d
from fnddp.wire.weights import scale_of
from tests.ranks import on_ranks

HALF = 1e-3  # of float16 on the wire
PIPELINES = ["allreduce", "fp16(allreduce, check=True)"]  # with a plan, and without one
INVALID: list[tuple[Any, str]] = [  # and what errors call it
    *(("a", "'a'"), ("3", "'3'"), (None, "None"), (float("nan"), "nan"), (float("inf"), "inf"), (-1, "-1"), (1j, "1j")),
    *((10**400, "10000"), (10**5000, "a int"), ([3], r"\[3\]"), (torch.tensor(-1.0), r"tensor\(-1\.\)")),
    *((torch.ones(2), r"tensor\(\[1\., 1\.\]\)"), (torch.tensor(1j), r"tensor\(0\.\+1\.j\)")),
]


def wrapped(text: str = "allreduce", **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(1, 1, bias=False), sync=fnddp.parse(text), **options)


def loss(model: nn.Module, rank: int) -> Tensor:
    """Its gradient is `rank + 1`."""
    return model(torch.full((1, 1), rank + 1.0)).sum()


def grad(model: nn.Module) -> float:
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    return parameter.grad.item()


def weighted(n: int) -> float:
    """The mean of `rank + 1` where a rank's weight is `rank + 1` too."""
    return sum((rank + 1) ** 2 for rank in range(n)) / sum(rank + 1 for rank in range(n))


def require_steps(model: DistributedDataParallel, rank: int) -> None:
    n = torch.distributed.get_world_size()
    model.zero_grad()
    loss(model, rank).backward()
    assert grad(model) == pytest.approx((n + 1) / 2, rel=HALF)
    model.zero_grad()
    with model.weight(rank + 1):
        loss(model, rank).backward()
    assert grad(model) == pytest.approx(weighted(n), rel=HALF)


@on_ranks(2, 3)
def test_a_block_is_for_each_step_that_begins_or_whose_forward_runs_in_it(rank: int) -> None:
    n = torch.distributed.get_world_size()
    model = wrapped()
    with model.weight(rank + 1):
        first, second = loss(model, rank), 10 * loss(model, rank)
    first.backward()
    assert grad(model) == pytest.approx(weighted(n))
    model.zero_grad()
    loss(model, rank).backward()
    assert grad(model) == pytest.approx((n + 1) / 2)
    model.zero_grad()
    second.backward()
    assert grad(model) == pytest.approx(10 * weighted(n))
    model.zero_grad()
    with model.weight(rank + 1):
        loss(model, rank).backward()
        model.zero_grad()
        loss(model, rank).backward()
    assert grad(model) == pytest.approx(weighted(n))
    model.zero_grad()
    made = loss(model, rank) + loss(model, rank)
    with model.weight(rank + 1):  # the backward's own is for all forwards outside of blocks
        made.backward()
    assert grad(model) == pytest.approx(2 * weighted(n))
    require_steps(model, rank)


@on_ranks(2)
def test_a_block_may_hold_what_no_sync_accumulates_and_forwards_without_gradients(rank: int) -> None:
    model = wrapped()
    with model.weight(rank + 1):
        with model.no_sync():
            loss(model, rank).backward()
        loss(model, rank).backward()
    assert grad(model) == pytest.approx(2 * weighted(2))
    with torch.no_grad(), model.weight(rank + 1):
        loss(model, rank)
    require_steps(model, rank)


@on_ranks(2)
def test_a_weight_goes_on_with_another_pipeline(rank: int) -> None:
    model = wrapped()
    with model.weight(rank + 1):
        model.sync = fp16(allreduce)
        loss(model, rank).backward()
    assert grad(model) == pytest.approx(weighted(2), rel=HALF)
    model.zero_grad()
    with model.weight(rank + 1):
        made = loss(model, rank)
    model.sync = allreduce
    made.backward()
    assert grad(model) == pytest.approx(weighted(2))
    require_steps(model, rank)


@on_ranks(2)
def test_a_backward_that_reaches_no_parameter_leaves_the_weight_to_the_one_that_does(rank: int) -> None:
    model = wrapped()
    with torch.no_grad():
        model.module.weight.fill_(1.0)
    x = torch.ones(1, 1, requires_grad=True)
    with model.weight(rank + 1):
        made = model(x * (rank + 1))
    (slope,) = torch.autograd.grad(made.sum(), x, create_graph=True)  # (rank + 1) times the parameter
    slope.backward()
    assert grad(model) == pytest.approx(weighted(2))
    require_steps(model, rank)


@pytest.mark.parametrize("alone", [False, True])
@on_ranks(2)
def test_parts_that_are_wrapped_have_a_weight_of_their_own(rank: int, alone: bool) -> None:
    part = wrapped(process_group=torch.distributed.new_group())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 1, bias=False), part))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    with (
        pytest.raises((RuntimeError, StepFailedError), match="give each its weight first"),
        nullcontext() if alone and rank == 1 else model.weight(1.0),
    ):
        loss(model, rank).backward()
    model.zero_grad()
    for _ in range(2):
        with part.weight(rank + 1), model.weight(rank + 1):
            loss(model, rank).backward()
        assert [p.grad.item() for p in model.parameters()] == [pytest.approx(weighted(2))] * 2
        model.zero_grad()


TWO: dict[str, tuple[int | None, int | None]] = {  # the weights of the forwards of a backward
    "two": (3, 5),
    "one, then another": (None, 3),
    "one, then none": (3, None),
}


def misused(model: DistributedDataParallel, rank: int, misuse: str) -> None:
    if misuse in TWO:
        made = []
        for weight in TWO[misuse]:
            with nullcontext() if weight is None else model.weight(weight):
                made.append(loss(model, rank))
        sum(made).backward()
        return
    with model.weight(rank + 1):
        if misuse == "no_sync":
            with model.no_sync():
                loss(model, rank).backward()
        elif misuse == "no_grad":
            with torch.no_grad():
                loss(model, rank)
        elif misuse == "nested":
            with model.weight(7):
                loss(model, rank).backward()
        elif misuse == "raises":
            loss(model, rank)
            raise ZeroDivisionError("no data")
        elif misuse == "raises in backward":
            made = loss(model, rank)
            made.register_hook(lambda _: 1 / 0)
            made.backward()


def raises(of_this_rank: bool, error: type[Exception], match: str, told: str = "") -> Any:
    """The error of this rank, or of rank 1 as this one is told of it."""
    return pytest.raises(error, match=match) if of_this_rank else pytest.raises(StepFailedError, match=told or match)


def used_without(text: str = "allreduce") -> DistributedDataParallel:
    """A model whose steps had no weights, so that the first one that has them begins without an exchange of them."""
    model = wrapped(text)
    loss(model, torch.distributed.get_rank()).backward()
    model.zero_grad()
    return model


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("misuse", ["no_sync", "nothing", "no_grad", "nested", "raises", "raises in backward", *TWO])
@on_ranks(2)
def test_a_weight_that_is_misused_is_an_error_on_all_ranks(rank: int, misuse: str, alone: bool) -> None:
    error, match = {
        "nested": (RuntimeError, f"the weight 7 is given within a block of the weight {rank + 1}"),
        "raises": (ZeroDivisionError, "no data"),
        "raises in backward": (ZeroDivisionError, ""),
        **dict.fromkeys(TWO, (RuntimeError, "a backward was given the weights? ")),
    }.get(misuse, (RuntimeError, f"the weight {rank + 1} was given for nothing"))
    told = "rank 1 failed with (RuntimeError: .*weight|ZeroDivisionError|RuntimeError: its backward did not finish)"
    # With an exchange of weights, all ranks would compare those of their first gradients, which differ in `TWO`.
    models = [] if misuse in TWO else [wrapped()] * 2
    for model in [*models, used_without()]:
        before, does = model.sync_stats()["failed_steps"], rank == 1 or not alone
        with raises(does, error, match, told), model.weight(3) if misuse in TWO and not does else nullcontext():
            misused(model, rank, misuse) if does else loss(model, rank).backward()
        assert model.sync_stats()["failed_steps"] == before + 1
        require_steps(model, rank)


@pytest.mark.parametrize("text", PIPELINES)
@on_ranks(2)
def test_a_weight_that_is_none_or_that_one_rank_alone_gives_is_an_error_on_all(rank: int, text: str) -> None:
    nobody = object()
    for given, others, match in [
        (3, nobody, "rank 1 gave 3, and .*rank 0 gave none"),
        *((bad, 1, f"must be a number, finite and not negative, but rank 1 gave {shown}") for bad, shown in INVALID),
    ]:
        fresh, step, weight = wrapped(text), fnddp.jit(fnddp.parse(text)), given if rank else others
        for model in (fresh, fresh, used_without(text)):
            model.zero_grad()
            with pytest.raises(ValueError, match=match), nullcontext() if weight is nobody else model.weight(weight):
                loss(model, rank).backward()
            require_steps(model, rank)
            if given is None:  # jit takes that for no weight
                continue
            grads = {"w": torch.full((2,), rank + 1.0)}
            for run in (step, step.sync) if others is not nobody else (step,):
                with pytest.raises(ValueError, match=match):
                    run(grads, (), weight=None if weight is nobody else weight)
                mean, _ = run(grads, (), weight=torch.tensor([rank + 1]))
                assert mean["w"].tolist() == pytest.approx([weighted(2)] * 2, rel=HALF)
                if run is step:
                    assert run(grads, ())[0]["w"].tolist() == pytest.approx([1.5] * 2, rel=HALF)


@pytest.mark.parametrize("alone", [True, False])
@on_ranks(2)
def test_a_pipeline_that_knows_no_weights_fails_the_step_on_all_ranks(rank: int, alone: bool) -> None:
    model, does = wrapped("all_reduce(op='sum')"), rank == 1 or not alone
    error, match = ValueError, "takes a sum, which knows no weights" if does else "rank 1 gave 1, and rank 0 gave none"
    with pytest.raises(error, match=match), model.weight(1) if does else nullcontext():
        loss(model, rank).backward()
    model.zero_grad()
    loss(model, rank).backward()
    assert grad(model) == 3


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("is_caught_within", [False, True])
@pytest.mark.parametrize("has_one_backward", [False, True])
@pytest.mark.parametrize("has_own_groups", [False, True])
@on_ranks(2)
def test_an_error_in_the_weight_blocks_of_two_models_fails_the_steps_of_both_on_all_ranks(
    rank: int, has_own_groups: bool, has_one_backward: bool, is_caught_within: bool, alone: bool
) -> None:
    """Which of the two other ranks run first, this rank does not know."""
    groups = [torch.distributed.new_group() if has_own_groups else None for _ in range(2)]
    models = [
        DistributedDataParallel(nn.Linear(n, 1, bias=False), process_group=g)
        for n, g in zip((1, 2), groups, strict=True)
    ]
    inputs = [torch.full((1, n), rank + 1.0) for n in (1, 2)]
    for step in range(6):
        fails = step in (0, 2, 4)
        does = fails and (rank == 1 or not alone)
        error = ZeroDivisionError if does else StepFailedError
        order = models if step < 3 else models[::-1]
        for model in models:
            model.zero_grad()
        with pytest.raises(error, match="no data") if fails else nullcontext(), models[0].weight(rank + 1):
            with suppress(ZeroDivisionError) if is_caught_within else nullcontext(), models[1].weight(rank + 1):
                if does:
                    raise ZeroDivisionError("no data")
                losses = {model: model(inputs[models.index(model)]).sum() for model in order}
                for loss in [sum(losses.values())] if has_one_backward else losses.values():
                    loss.backward()
            if does:
                raise ZeroDivisionError("no data")
        if not fails:
            for model in models:
                torch.testing.assert_close(model.module.weight.grad, torch.full_like(model.module.weight, weighted(2)))


@pytest.mark.parametrize("has_own_groups", [False, True])
@pytest.mark.parametrize("blocks", [(0, 1), (1, 0), (1,)])
@on_ranks(2)
def test_an_error_in_the_first_of_two_backwards_within_weight_blocks_leaves_no_rank_waiting(
    rank: int, blocks: tuple[int, ...], has_own_groups: bool
) -> None:
    """Its step is open, and other ranks end it before that of the second backward, which this rank leaves out."""
    groups = [torch.distributed.new_group() if has_own_groups else None for _ in range(2)]
    models = [DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group) for group in groups]

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError("no data")

    for step in range(4):
        hook = models[0].module.weight.register_hook(fail) if step == 1 and rank == 0 else None
        for model in models:
            model.zero_grad()
        error = ZeroDivisionError if rank == 0 else StepFailedError
        with pytest.raises(error, match="no data") if step == 1 else nullcontext(), ExitStack() as stack:
            for block in blocks:
                stack.enter_context(models[block].weight(rank + 1))
            for made in [loss(model, rank) for model in models]:
                made.backward()
        if hook is not None:
            hook.remove()
        if step != 1:
            assert [grad(m) for m in models] == [pytest.approx(weighted(2) if i in blocks else 1.5) for i in (0, 1)]


@on_ranks(2)
def test_an_error_in_the_first_weight_blocks_after_steps_without_ends_the_run_where_models_share_a_group(rank: int):
    """The other ranks may be in the step of either model, whose messages differ."""
    group = torch.distributed.new_group(timeout=timedelta(seconds=3))
    models = [DistributedDataParallel(nn.Linear(n, 1, bias=False), process_group=group) for n in (1, 2)]

    def step(raises: bool = False) -> None:
        for model in reversed(models):
            if raises:
                raise ZeroDivisionError("no data")
            model(torch.ones(1, model.module.in_features)).sum().backward()

    step()
    error = (ZeroDivisionError, "no data") if rank else (CollectiveError, "another rank|Another rank")
    with pytest.raises(error[0], match=error[1]), models[0].weight(1), models[1].weight(1):
        step(raises=rank == 1)
    with pytest.raises(RuntimeError, match="ranks may be desynchronized"):
        step()


@pytest.mark.parametrize("misuse", ["part without a weight", "nothing", "raises"])
@on_ranks(2)
def test_an_error_in_the_weight_blocks_of_a_module_and_its_part_is_one_on_all_ranks(rank: int, misuse: str) -> None:
    part = wrapped()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 1, bias=False), part))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    told = "give each its weight first|was given for nothing|no data"
    for step in range(5):
        fails = step in (0, 2)
        does = rank == 1 and fails
        model.zero_grad()
        with ExitStack() as stack:
            if fails:
                stack.enter_context(
                    pytest.raises((RuntimeError, ZeroDivisionError) if does else StepFailedError, match=told)
                )
            if not (does and misuse == "part without a weight"):
                stack.enter_context(part.weight(rank + 1))
            stack.enter_context(model.weight(rank + 1))
            if does and misuse == "raises":
                raise ZeroDivisionError("no data")
            if not does:
                loss(model, rank).backward()
        if not fails:
            assert [p.grad.item() for p in model.parameters()] == [pytest.approx(weighted(2))] * 2


class Voting(C10d):
    votes = 0

    def vote(self, flags: Tensor, group: str | None) -> Any:
        self.votes += 1
        return super().vote(flags, group)


@on_ranks(2)
def test_steps_without_weights_send_nothing_more_after_the_first(rank: int) -> None:
    wire = Voting()
    model = wrapped(wire=wire)
    votes: list[int] = []
    for weight in (None, None, rank + 1, rank + 1, None):
        before = wire.votes
        model.zero_grad()
        with nullcontext() if weight is None else model.weight(weight):
            loss(model, rank).backward()
        assert grad(model) == pytest.approx(1.5 if weight is None else weighted(2))
        votes.append(wire.votes - before)
    assert votes == [2, 1, 3, 2, 2]  # the first asks whether ranks give any, the third whether all do


@on_ranks(2, 3)
def test_weights_whose_sum_is_no_float_count(rank: int) -> None:
    n = torch.distributed.get_world_size()
    model, grads = wrapped(), {"w": torch.full((2,), rank + 1.0)}
    for huge in (1e308, 1.7e308):
        model.zero_grad()
        with model.weight(huge):
            loss(model, rank).backward()
        assert grad(model) == pytest.approx((n + 1) / 2)
        for run in (allreduce, fnddp.jit(allreduce), torch.compile(allreduce, backend="eager")):
            mean, _ = run(grads, (), weight=torch.tensor(huge, dtype=torch.float64))
            assert mean["w"].tolist() == pytest.approx([(n + 1) / 2] * 2)


def test_scales_are_those_of_the_definition_to_the_bit():
    generator = random.Random(0)
    for _ in range(2000):
        weights = [generator.choice([generator.random(), generator.randrange(1, 10**6)]) for _ in range(5)]
        assert scale_of(weights[0], weights) == 5 * weights[0] / math.fsum(weights)


def test_a_simulation_names_ranks_without_a_valid_weight():
    simulated = fnddp.simulate(allreduce, 2)
    grads = {"w": torch.tensor([[1.0], [2.0]])}
    with pytest.raises(ValueError, match="must be a number, finite and not negative, but rank 1 gave 'a'"):
        simulated(grads, (), weight=[1, "a"])
    mean, _ = simulated(grads, (), weight=[1e308, 1e308])
    assert mean["w"].tolist() == [1.5]


@on_ranks(2, threads=True)
def test_weights_that_are_all_0_are_an_error_on_all_ranks(rank: int):
    grads = {"w": torch.full((3,), float(rank + 1))}
    for run in (allreduce, fnddp.jit(allreduce)):
        with pytest.raises(ValueError, match="all of 2 ranks gave 0"):
            run(grads, (), weight=0.0)
        mean, _ = run(grads, (), weight=float(rank))
        assert mean["w"].tolist() == [2.0] * 3  # the next step works


@pytest.mark.parametrize(
    ("text", "grads", "match"),
    [
        ("allreduce", {"w": torch.ones(2), "count": torch.tensor([1])}, "leaf 'count' is torch.int64"),
        ("allreduce", {"flag": torch.tensor([True])}, "leaf 'flag' is torch.bool"),
        ("all_reduce(op='max')", {"w": torch.ones(2)}, "takes a max"),
        ("all_reduce(op='sum')", {"w": torch.ones(2)}, "takes a sum"),
        (
            "partition({'a': allreduce, '*': all_reduce(group='7')})",
            {"a": torch.ones(1), "b": torch.ones(1)},
            "several",
        ),
    ],
)
def test_weights_without_a_mean_are_refused(text, grads, match):
    sync = fnddp.parse(text)
    with pytest.raises(ValueError, match=match):
        sync(grads, sync.init(grads), weight=2.0)
    if "7" not in text:
        with pytest.raises(ValueError, match=match):
            fnddp.jit(sync)(grads, sync.init(grads), weight=2.0)


EXPERTS = "error_feedback(partition({'expert': none, '*': fp16(allreduce)}))"


def check_experts(rank: int) -> None:
    weights = [1.0, 3.0]
    mine = {"expert": torch.full((2,), rank + 1.0), "shared": torch.full((2,), rank + 1.0)}
    sync = fnddp.parse(EXPERTS)
    state = sync.init(mine)
    for run in (sync, fnddp.jit(sync)):
        for _ in range(2):  # jit asks for weights in the first step, and exchanges them at once in the second
            mean, _ = run(mine, state, weight=weights[rank])
            assert mean["shared"].tolist() == [1.75, 1.75]
            assert mean["expert"].tolist() == [rank + 1.0, rank + 1.0]
        mean, _ = run(mine, state, weight=1.0 - rank)
        assert mean["expert"].tolist() == [rank + 1.0, rank + 1.0]


def test_a_weight_leaves_gradients_alone_that_are_not_reduced():
    run_threads(2, check_experts)


@on_ranks(2)
def test_weights_over_a_group_that_a_hook_does_not_name_are_refused(rank):
    groups = [torch.distributed.new_group([0]), torch.distributed.new_group([1])]
    hook = fnddp.from_hook(allreduce_hook, groups[rank])
    with pytest.raises(ValueError, match="from_hook.* does not say over which process group"):
        hook({"w": torch.ones(2)}, (), weight=1.0 + rank)
    model = fnddp.DistributedDataParallel(nn.Linear(8, 4), sync=hook)
    with pytest.raises(ValueError, match="does not say over which process group"), model.weight(1 + rank):
        model(torch.ones(1, 8)).sum().backward()
    model.zero_grad()
    model(torch.ones(1, 8)).sum().backward()  # the next step works
