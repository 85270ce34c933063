"""Outer steps on a model: attached to its optimizer, over any wire, under way while ranks train."""

import copy
import json
import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import allreduce, outer
from fnddp.laws import bits, gather
from fnddp.run.vote import StepFailedError
from fnddp.simulation.ranks import run_threads
from fnddp.tree import Leaves
from fnddp.wire.c10d import C10d
from fnddp.wire.control import all_gather_object
from fnddp.wire.kinds import Work
from tests.ranks import on_ranks
from tests.test_outer import agree
from tests.ways import Trap, failing

SGD, ADAMW = partial(torch.optim.SGD, lr=0.1), partial(torch.optim.AdamW, lr=0.01)
STREAMING = "streaming_diloco(quantize(two_shot, bits=4), every=4, fragments=2, delay=3, alpha=0.5)"


def make_model(seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)  # threads share torch's own
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=generator)).square().mean().backward()
        optimizer.step()


def parameters(model: nn.Module) -> Leaves:
    return {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}


def attached_model(
    step: outer.Outer | str, make: Callable[..., torch.optim.Optimizer] = SGD, seed: int = 0, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, outer.Attached]:
    model = make_model(seed)
    optimizer = make(model.parameters())
    step = outer.parse(step) if isinstance(step, str) else step
    return model, optimizer, outer.attach(model, optimizer, step, **options)


class Function:
    """A training that calls the outer step as a function after each local one."""

    def __init__(self, text: str, make: Callable[..., torch.optim.Optimizer] = SGD) -> None:
        self.outer, self.model = outer.parse(text), make_model()
        self.optimizer, self.state = make(self.model.parameters()), self.outer.init(parameters(self.model))

    def train(self, rank: int, call: int, *, exchanges: bool = True) -> None:
        train(self.model, self.optimizer, rank, range(call, call + 1))
        if exchanges:
            params, self.state = self.outer(parameters(self.model), self.state)
            self.model.load_state_dict(params)


@pytest.mark.parametrize("text", ["diloco(allreduce, every=3)", "local_sgd(every=2, sync=two_shot)", STREAMING])
@on_ranks(2, threads=True)
def test_attached_is_the_function_after_each_step(rank: int, text: str):
    model, optimizer, attached = attached_model(text, ADAMW)
    function = Function(text, ADAMW)
    for call in range(9):
        train(model, optimizer, rank, range(call, call + 1))
        function.train(rank, call)
        assert bits(parameters(model)) == bits(parameters(function.model)), call
        assert bits(attached.state) == bits(function.state)


@pytest.mark.thorough
@on_ranks(1)
def test_a_compiled_optimizer_leaves_the_outer_step_alone(rank: int):
    runs = [attached_model("diloco(allreduce, every=2)") for _ in range(2)]
    optimizer = runs[1][1]
    optimizer.step = torch.compile(optimizer.step)  # pyright: ignore[reportAttributeAccessIssue]
    for model, optimizer, _ in runs:
        train(model, optimizer, rank, range(3))
    for p, q in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)  # the optimizer's own step is compiled


class Watched(C10d):
    """torch.distributed, which notes in which call of the outer step a message begins and is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.call, self.began, self.waited, self.votes = 0, list[int](), list[int](), list[int]()

    def start(self, *given: Any, **options: Any) -> Work:
        self.began.append(self.call)
        work = super().start(*given, **options)
        return SimpleNamespace(
            is_completed=work.is_completed, wait=lambda: (self.waited.append(self.call), work.wait())[1]
        )

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, Work]:
        self.votes.append(self.call)
        return super().vote(flags, group)


def watched(rank: int, text: str, calls: int) -> tuple[list[int], list[int], list[int]]:
    wire = Watched()
    model, optimizer, _ = attached_model(text, wire=wire)
    for log in (wire.began, wire.votes, wire.waited):  # of setting up
        log.clear()
    for call in range(1, calls + 1):
        wire.call = call
        train(model, optimizer, rank, range(call, call + 1))
    return wire.began, wire.waited, wire.votes


@pytest.mark.parametrize(
    "text", ["diloco(allreduce, every=4)", "streaming_diloco(allreduce, every=6, fragments=2, delay=2)"]
)
def test_a_message_travels_between_start_and_end_of_its_exchange_and_nothing_else_not_even_a_vote_after_the_first(
    text: str,
):
    plan = outer.lower(outer.parse(text), parameters(make_model()), world_size=2)
    starts = [each.starts for each in plan.exchanges for _ in each.plan.collectives]
    ends = [each.ends for each in plan.exchanges for _ in each.plan.collectives]
    for began, waited, votes in run_threads(2, watched, text, 9):
        assert began == [step for step in [*starts, *[step + plan.period for step in starts]] if step <= 9]
        assert waited == [end for end in [*ends, *[end + plan.period for end in ends]] if end <= 9]
        assert votes == sorted(set(waited))


@pytest.mark.parametrize("text", ["diloco(weighted(allreduce), every=3)", STREAMING])
@pytest.mark.parametrize("at", [4, 6])
@on_ranks(2, threads=True)
def test_resuming_is_exact(rank: int, text: str, at: int):
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, outer.Attached]:
        model, optimizer, attached = attached_model(text, ADAMW, seed)
        if attached.outer.takes_weight:
            optimizer.register_step_pre_hook(lambda *_: attached.count(1 + rank * attached.state.step))
        return model, optimizer, attached

    model, optimizer, attached = made(0)
    train(model, optimizer, rank, range(at))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), attached.state_dict()))
    train(model, optimizer, rank, range(at, 11))

    for used in (False, True):  # a new run, and one that is in the middle of another exchange
        resumed, again, other = made(5)
        train(resumed, again, rank, range(5 * used))
        of_model, of_optimizer, of_outer = copy.deepcopy(saved)  # which the optimizer would share
        resumed.load_state_dict(of_model)
        again.load_state_dict(of_optimizer)
        other.load_state_dict(of_outer)
        train(resumed, again, rank, range(at, 11))
        assert bits(parameters(resumed)) == bits(parameters(model))
        assert bits(other.state) == bits(attached.state)


def test_what_does_not_fit_is_refused():
    model = make_model()
    attached = outer.attach(model, None, outer.diloco(allreduce, every=2))
    with pytest.raises(ValueError, match="another pipeline or for other parameters"):
        attached.load_state_dict(fnddp.state_dict(outer.local_sgd(every=2).init(parameters(model))))
    with pytest.raises(ValueError, match="for this model"):
        attached.state = outer.local_sgd(every=2).init(parameters(model))
    attached.state = outer.diloco(allreduce, every=2).init(parameters(model))
    with pytest.raises(TypeError, match="optimizer is a list; pass the one that steps last"):
        outer.attach(model, [], outer.local_sgd(every=2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="pass the optimizer"):
        outer.attach(model, None, outer.des_loc({"params": outer.local_sgd(every=2)}))
    assert outer.attach(model, None, "local_sgd(every=2)").outer == outer.local_sgd(every=2)
    with pytest.raises(ValueError, match="no parameter of the model requires gradients"):
        outer.attach(model.requires_grad_(False), None, outer.local_sgd(every=2))
    model, optimizer, _ = attached_model("des_loc({'momentum_buffer': local_sgd(every=2)})")
    with pytest.raises(
        ValueError, match=r"has no state 'momentum_buffer' in the shape of parameter '0.weight', only \[\]"
    ):
        train(model, optimizer, 0, range(1))


@on_ranks(2)
def test_an_exchange_that_waits_for_one_that_fails_runs_where_it_ends(rank: int):
    text = "streaming_diloco(two_shot, every=4, fragments=2, delay=3)"
    model, optimizer, attached = attached_model(text)
    function = Function(text)
    for call in range(1, 13):
        fails = call == 2 and rank == 1  # where the first exchange starts; it ends in call 5
        raises = pytest.raises(Trap if rank == 1 else StepFailedError) if call == 5 else nullcontext()
        with raises, failing(C10d, "start") if fails else nullcontext():
            train(model, optimizer, rank, range(call, call + 1))
        function.train(rank, call, exchanges=call != 5)
        assert bits(parameters(model)) == bits(parameters(function.model)), call
    attached.detach()


@pytest.mark.parametrize("messages", range(4))
@on_ranks(2)
def test_an_exchange_that_ends_before_one_that_is_open_fails_alone(rank: int, messages: int):
    """Of two exchanges, each of two messages, one runs whole where it ends, before which the other has begun."""
    text = "streaming_diloco(two_shot, every=2, fragments=2, delay=1)"
    model, optimizer, attached = attached_model(text)
    function = Function(text)
    failed = dict[int, type[Exception]]()
    for call in range(1, 10):
        if call == 5:
            attached.load_state_dict(copy.deepcopy(attached.state_dict()))  # what was open runs where it ends
        try:
            with failing(C10d, "start", messages) if call == 5 and rank == 1 else nullcontext():
                train(model, optimizer, rank, range(call, call + 1))
        except (Trap, StepFailedError) as error:
            failed[call] = type(error)
        function.train(rank, call, exchanges=call not in failed)
        assert bits(parameters(model)) == bits(parameters(function.model)), call
    attached.detach()
    assert len(failed) == (messages >= 2)  # the first two are of the one that loading drops
    assert {*failed.values()} <= {Trap if rank == 1 else StepFailedError}
    assert gather([*failed]) == [[*failed]] * 2


@pytest.mark.parametrize("fails", [False, True])
@on_ranks(2)
def test_a_step_that_is_not_committed_leaves_everything_and_the_next_one_exchanges(rank: int, fails: bool):
    """Where the caller commits, it is no error that another rank has failed, but for that rank itself."""
    calls: list[str] = []
    answers = iter([False, True])

    def commit() -> bool:
        calls.append("commit")
        return next(answers)

    options: Any = {"prepare": lambda: calls.append("prepare"), "commit": commit}
    model, optimizer, attached = attached_model("diloco(allreduce, every=2)", **options)
    train(model, optimizer, rank, range(1))
    assert calls == []
    state, is_mine = bits(attached.state), fails and rank == 1
    with pytest.raises(Trap) if is_mine else nullcontext(), failing(C10d, "start") if is_mine else nullcontext():
        train(model, optimizer, rank, range(1, 2))
    assert calls == ["prepare", "commit"]
    assert bits(attached.state) == state
    assert not agree(parameters(model))
    train(model, optimizer, rank, range(2, 3))
    assert calls == ["prepare", "commit"] * 2
    assert agree(parameters(model))


@on_ranks(2, threads=True)
def test_the_step_goes_on_from_what_prepare_loads(rank: int):
    def prepare() -> None:
        everyone = gather((model.state_dict(), attached.replicated_state_dict()))
        if rank == 1:
            model.load_state_dict(everyone[0][0])
            attached.load_replicated_state_dict(everyone[0][1])

    step = "diloco(error_feedback(quantize(two_shot, bits=4)), every=2)"
    model, optimizer, attached = attached_model(step, seed=rank, init_sync=False, prepare=prepare)
    train(model, optimizer, rank, range(2))
    assert agree(parameters(model))
    assert agree(attached.state.anchor)


def test_commit_is_called_only_if_the_state_that_prepare_has_loaded_ends_an_exchange():
    calls: list[str] = []
    model, optimizer, attached = attached_model(
        "diloco(allreduce, every=2)",
        prepare=lambda: attached.load_state_dict(saved),
        commit=lambda: calls.append("commit") is None,
    )
    saved = attached.state_dict()
    train(model, optimizer, 0, range(2))
    assert calls == []
    assert attached.state.step == 1


@on_ranks(2, threads=True)
def test_ranks_that_disagree_are_told_so(rank: int):
    with pytest.raises(fnddp.RankMismatchError, match="ranks disagree about pipeline: rank 0: diloco"):
        outer.attach(make_model(), None, outer.diloco(allreduce, every=2 + rank))
    with pytest.raises(ValueError if rank == 1 else fnddp.RankMismatchError, match="cannot form 5 fragments"):
        outer.attach(make_model(), None, outer.streaming_diloco(allreduce, every=9, fragments=4 + rank))
    with pytest.raises(TypeError if rank == 1 else fnddp.RankMismatchError, match="TypeError.* got 3|^outer.* got 3"):
        outer.attach(make_model(), None, 3 if rank == 1 else outer.local_sgd(every=2))


@on_ranks(2, threads=True)
def test_moments_are_exchanged_at_their_own_periods(rank: int):
    step = outer.des_loc(
        {
            "params": outer.local_sgd(every=2),
            "exp_avg": outer.local_sgd(every=3),
            "exp_avg_sq": outer.local_sgd(every=6),
        }
    )
    model, optimizer, _ = attached_model(step, ADAMW)
    for call in range(1, 7):
        train(model, optimizer, rank, range(call, call + 1))
        for name, period in (("exp_avg", 3), ("exp_avg_sq", 6)):
            moments = [optimizer.state[p][name] for p in model.parameters()]
            assert agree(moments) == (call % period == 0), (call, name)
        assert (agree(parameters(model))) == (call % 2 == 0)


@pytest.mark.parametrize("how", ["unfrozen", "assigned"])
@on_ranks(2)
def test_what_one_rank_trains_later_is_an_error_on_all(rank: int, how: str):
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = SGD(model.parameters())
    outer.attach(model, optimizer, outer.local_sgd(every=1))
    train(model, optimizer, rank, range(1))
    if rank == 0:
        says = "rank 1 failed with RuntimeError: outer.attach: "
    elif how == "unfrozen":
        model[0].bias.requires_grad_(True)
        says = "outer.attach: 0.bias required no gradient.* call outer.attach again"
    else:
        says = r"outer.attach: \d.weight, \d.bias required no gradient.* call outer.attach again"
        model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
        model[0].requires_grad_(False)
    with pytest.raises(StepFailedError if rank == 0 else RuntimeError, match=says):
        train(model, optimizer, rank, range(1, 2))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["post_local_sgd", "hierarchical_local_sgd"])
@on_ranks(4)
def test_local_sgd_is_torchs(rank: int, kind: str):
    group, own = ([dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2] for _ in range(2))
    theirs, ours = make_model(), make_model()
    if kind == "post_local_sgd":
        theirs = TorchDDP(theirs)
        theirs.register_comm_hook(PostLocalSGDState(None, group, start_localSGD_iter=3), post_localSGD_hook)
        averager: Any = PeriodicModelAverager(period=2, warmup_steps=3)
        step: outer.Outer = outer.post_local_sgd(start=3, every=2, intra=fnddp.all_reduce(own))
        ours = fnddp.DistributedDataParallel(ours, sync=step.gradients)
    else:
        averager = HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]), warmup_steps=3)
        averager.step = 1  # it counts from 0: here it has stepped once before
        step = outer.hierarchical_local_sgd({2: fnddp.all_reduce(own), 4: allreduce}, start=2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5) for model in (theirs, ours)]
    outer.attach(ours, optimizers[1], step)
    for call in range(9):
        train(theirs, optimizers[0], rank, range(call, call + 1))
        averager.average_parameters(theirs.parameters())
        train(ours, optimizers[1], rank, range(call, call + 1))
        # Four ranks add in another order in buckets of another layout.
        torch.testing.assert_close(parameters(ours), parameters(theirs), rtol=1e-5, atol=1e-6)
        assert agree(parameters(ours)) == agree(parameters(theirs))


WEIGHTED = "streaming_diloco(weighted(allreduce), every=2, fragments=1, delay=1, lr=1, momentum=0)"


class Moved:
    """A model that ranks move by 4 and by 8: with weights 1 and 3 that is 7, to which its exchange must bring it."""

    def __init__(self, rank: int, text: str = WEIGHTED, **options: Any) -> None:
        self.model, self.by = make_model(), 4.0 * (rank + 1)
        self.attached = outer.attach(self.model, None, outer.parse(text), **options)
        self.start = parameters(self.model)

    def move(self) -> None:
        for p in self.model.parameters():
            p.data += self.by

    def require(self, by: float = 7.0) -> None:
        torch.testing.assert_close(parameters(self.model), {name: p + by for name, p in self.start.items()})


@on_ranks(2, threads=True)
def test_exchanges_are_weighted_by_the_tokens_since_the_last_one(rank: int):
    moved = Moved(rank, WEIGHTED.replace("delay=1", "delay=0"))
    for tokens, by in ((1 + 2 * rank, 7), (1 + 2 * rank, 14), (2, 20)):  # the last time with equal weights
        moved.attached.count(tokens)
        moved.move()
        moved.attached.step()
        moved.attached.count(0)
        moved.attached.step()
        moved.require(by)


@on_ranks(2, threads=True)
def test_an_exchange_that_is_repeated_has_the_tokens_from_its_beginning(rank: int):
    answers = iter([False, True])
    moved = Moved(rank, commit=lambda: next(answers))
    moved.move()
    for tokens in (1 + 2 * rank, 0, 0, 5 - 4 * rank):  # the last ones are counted after the difference was taken
        moved.attached.count(tokens)
        moved.attached.step()
    moved.require()
    unsent = moved.attached.unsent
    assert unsent is not None
    assert unsent["now"]["0"] == 5 - 4 * rank


@pytest.mark.parametrize("first", [(0, 0), (1, None)])  # all ranks count 0, or one does not count
@on_ranks(2, threads=True)
def test_an_exchange_that_its_weights_fail_is_repeated_with_the_tokens_until_then(
    rank: int, first: tuple[int | None, ...]
):
    moved, count = Moved(rank), first[rank]
    attached = moved.attached
    moved.move()
    if count is not None:
        attached.count(count)
    for call in range(4):
        with pytest.raises((StepFailedError, ValueError), match="weight: ") if call == 2 else nullcontext():
            attached.step()
        if call == 2:
            attached.count(9 if count else 1 + 2 * rank)  # 9: of a rank that repeats its weight
    moved.require()


@pytest.mark.parametrize("text", ["diloco(error_feedback(bf16(allreduce)), every=3)", STREAMING])
@on_ranks(2, threads=True)
def test_anchors_are_reset_to_the_first_ranks_parameters_in_the_middle_of_a_period(rank: int, text: str):
    model, optimizer, attached = attached_model(text)
    train(model, optimizer, rank, range(4))
    before = parameters(model)
    attached.reset_sync()
    assert bits(parameters(model)) == bits(before)
    assert bits(attached.state) == bits(attached.outer.init(gather(before)[0]))
    train(model, optimizer, rank, range(4, 10))
    assert agree(attached.state.anchor)
    attached.detach()


@pytest.mark.parametrize("delay", [0, 2])
@on_ranks(2, threads=True)
def test_a_rank_without_a_weight_fails_the_exchange_on_all_where_it_ends(rank: int, delay: int):
    text = f"streaming_diloco(weighted(error_feedback(bf16(allreduce))), every=3, fragments=1, delay={delay})"
    model, optimizer, attached = attached_model(text)
    if rank == 0:
        attached.count(3)
    train(model, optimizer, rank, range(2 + delay))
    state = bits(attached.state)
    says = "rank 1 failed with ValueError: weight: .*" if rank == 0 else "this rank gave none: 0 of the 1 ranks"
    with pytest.raises(StepFailedError if rank == 0 else ValueError, match=says):
        train(model, optimizer, rank, range(2 + delay, 3 + delay))
    assert bits(attached.state) == state
    attached.count(1)
    train(model, optimizer, rank, range(3 + delay, 4 + delay))
    assert agree(attached.state.anchor)
    assert not agree(attached.state.inner)
    attached.detach()


def test_tokens_are_refused_without_a_weighted_pipeline_and_given_by_attach_alone():
    _, _, attached = attached_model("diloco(allreduce, every=2)")
    with pytest.raises(TypeError, match=r"count: diloco\(allreduce, every=2\) takes no weight; put weighted"):
        attached.count(1)
    _, _, attached = attached_model("diloco(weighted(allreduce), every=2)")
    for tokens, error in ((math.nan, TypeError), (2.0, TypeError), (torch.ones(2).long(), TypeError), (-1, ValueError)):
        with pytest.raises(error, match="count: tokens must be "):
            attached.count(tokens)  # pyright: ignore[reportArgumentType]
    for tokens in (2, np.int64(3), (torch.arange(6) != 1).sum()):
        attached.count(tokens)
    assert json.dumps(attached.unsent) == '{"open": {}, "now": {"": 10}}'
    step = outer.parse("des_loc({'params': diloco(weighted(allreduce), every=2)})")
    assert step.takes_weight
    assert step.over("7").groups == ("7",)
    plan = outer.lower(step, {"params": {"w": torch.empty(4)}}, world_size=2)
    assert [each.plan.wire_bytes for each in plan.exchanges] == [8 + 16]
    for run in (partial(step, {"params": {}}, ()), partial(outer.simulate, step, 2)):
        with pytest.raises(TypeError, match="only outer.attach counts"):
            run()


@on_ranks(2, threads=True)
def test_one_that_rejoins_keeps_what_it_has_trained_and_one_that_joins_does_not(rank: int):
    model, _, attached = attached_model("diloco(error_feedback(bf16(allreduce)), every=3)", seed=0)
    optimizer = SGD(model.parameters())
    train(model, optimizer, rank, range(3))
    attached.step()
    before, theirs = copy.deepcopy((parameters(model), attached.state)), attached.replicated_state_dict()
    theirs = {key: each + 1 if isinstance(each, Tensor) else each for key, each in theirs.items()}
    attached.rejoin(theirs)
    for name, p in parameters(model).items():
        torch.testing.assert_close(p, before[0][name] + 1)
    assert bits(attached.state.inner) == bits(before[1].inner)
    attached.join(theirs)
    assert bits(parameters(model)) == bits(attached.state.anchor)
    assert not any(each.count_nonzero() for each in attached.state.inner.residual.values())


@on_ranks(3)
def test_a_group_of_some_ranks_waits_for_no_other(rank: int) -> None:
    trainers = dist.new_group([0, 2])
    for group in (trainers, DeviceMesh.from_group(trainers, "cpu")) if rank != 1 else ():
        model, optimizer, _ = attached_model("local_sgd(every=2)", group=group)
        train(model, optimizer, rank, range(2))
        first, second = all_gather_object(bits(parameters(model)), trainers.group_name)
        assert first == second
