"""Kinds of backward through a wrapped module that are not one forward and one backward: nothing stays a rank's own.

Everywhere a weight w of ranks 0 and 1 has the gradients 1 and 2, so the mean is 1.5.
"""

import copy
import gc
import threading
import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fnddp
from fnddp import DistributedDataParallel as DDP
from fnddp import StepFailedError, allreduce, error_feedback, fp16
from fnddp.adapters import backward
from fnddp.adapters.checkpoint import combined, shares
from fnddp.laws import bits, gather
from fnddp.run.vote import Vote
from tests.models import Parts
from tests.ranks import on_ranks
from tests.ways import Interrupt, failing, interrupted

MEAN = 1.5


class Weight(nn.Module):
    def __init__(self, wrap: Any = None) -> None:
        super().__init__()
        self.w, self.unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
        self.wrap = wrap or (lambda y: y)

    def forward(self, x: Tensor, both: bool = False) -> Any:
        self.last = self.w * x + (self.unused * x if both else 0)
        return self.wrap(self.last)


class TwoLayers(nn.Module):
    """Backward may fail when the second weight has its gradient, and the first one has not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        y = self.first * x
        if fails:
            y.register_hook(raises)
        return self.second * y


def opaque(y: Tensor) -> Any:
    """Nothing that a search for tensors looks into."""
    return lambda: y


class Checkpointed(nn.Module):
    """Three weights, of which the last two are in reentrant checkpoints; what it returns hides its output."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(())) for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        self.last = x * self.weights[0]
        for w in self.weights[1:]:
            self.last = checkpoint(lambda y, w=w: w * y, self.last, use_reentrant=True)
        return opaque(self.last)


def raises(_: Tensor) -> None:
    raise ArithmeticError("here")


def x_of(rank: int) -> Tensor:
    return torch.tensor(1.0 + rank)


def require_mean(model: DDP, rank: int) -> None:
    model.zero_grad()
    model(x_of(rank)).backward()
    assert {p.grad.item() for p in model.parameters() if p.grad is not None} == {MEAN}


def fail(model: DDP, rank: int) -> None:
    """Run a backward of `TwoLayers` that fails on rank 1."""
    loss = model(x_of(rank), rank == 1)
    with pytest.raises(ArithmeticError if rank == 1 else StepFailedError):
        loss.backward()


@on_ranks(2)
def test_a_step_is_all_of_a_backward_whose_first_gradients_are_in_reentrant_checkpoints(rank: int) -> None:
    model = DDP(Checkpointed(), sync=fnddp.weighted(allreduce))
    for _ in range(2):
        model.zero_grad()
        model(x_of(rank))
        with model.weight(1 + 2 * rank):
            model.module.last.backward()
        assert [p.grad.item() for p in model.parameters()] == [1.75] * 3
    assert model.sync_stats()["steps"] == 2


@on_ranks(2)
def test_first_gradients_in_a_backward_that_a_hook_calls_are_an_error_on_all_ranks(rank: int) -> None:
    model = DDP(Weight(opaque))
    y = x_of(rank).requires_grad_() * 1
    if rank == 0:
        y.register_hook(lambda _: model.module.last.backward())
    model(x_of(rank))
    with pytest.raises(RuntimeError if rank == 0 else StepFailedError, match="call backward outside of hooks"):
        (y if rank == 0 else model.module.last).backward()
    model.zero_grad()
    model(x_of(rank))
    model.module.last.backward()
    assert model.module.w.grad.item() == MEAN


def train(model: DDP, rank: int, steps: int = 3) -> None:
    """Plain steps, after which gradients take the short way."""
    for _ in range(steps):
        model(x_of(rank)).backward()
        model.zero_grad()


@on_ranks(2)
def test_a_sum_counts_gradients_that_bypass_the_outputs_once(rank: int) -> None:
    """The first gradient of such a backward is accumulated before its step begins, and is not one from before it."""
    model = DDP(Weight(), sync=fnddp.all_reduce(op="sum"))
    train(model, rank)
    model(x_of(rank))
    (model.module.w * x_of(rank)).backward()
    assert model.module.w.grad.item() == 2 * MEAN


@pytest.mark.parametrize("sync", [allreduce, error_feedback(fp16(allreduce))])
@on_ranks(2)
def test_a_backward_that_accumulates_nothing_is_no_step_and_returns_this_ranks_own(rank: int, sync: Any) -> None:
    """As with torch's class: an evaluation of rank 0 alone, gradients of inputs, two of a last layer in a training."""
    model = DDP(Weight(), sync=sync)
    own = model.module
    for step in range(4):
        x = x_of(rank).requires_grad_()
        for _ in range(3 if rank == 0 else 1):  # ranks need not do the same
            assert torch.autograd.grad(model(x), own.w)[0].item() == 1 + rank
            assert torch.autograd.grad(model(x), x)[0] == own.w
        loss = model(x)
        asked = torch.autograd.grad(loss, own.w, retain_graph=True)[0]
        model.zero_grad()
        (loss * asked / (1 + rank)).backward()
        assert own.w.grad.item() == MEAN
        assert model.sync_stats()["steps"] == step + 1


@on_ranks(2)
def test_gradients_through_tensors_that_stand_for_parameters_go_where_autograd_accumulates(rank: int) -> None:
    """An inner step of MAML on the wrapped module; only the outer backward accumulates, so it alone is a step."""

    def outer(net: nn.Module, call: Any, prefix: str) -> Tensor:
        (inner,) = torch.autograd.grad(call(x_of(rank)).square(), net.w, create_graph=True)
        return torch.func.functional_call(call, {f"{prefix}w": net.w - 0.1 * inner}, (x_of(rank),)).square()

    plain, model = Weight(), DDP(Weight())
    outer(plain, plain, "").backward()
    want = fnddp.allreduce({"w": plain.w.grad}, ())[0]["w"]
    outer(model.module, model, "module.").backward()
    torch.testing.assert_close(model.module.w.grad, want)
    assert model.sync_stats()["steps"] == 1
    stand_in = torch.ones((), requires_grad=True)
    torch.func.functional_call(model, {"module.w": stand_in}, (x_of(rank),)).backward()
    assert stand_in.grad == 1 + rank
    require_mean(model, rank)


@on_ranks(2)
def test_frozen_parameters_make_no_step_of_a_backward_through_their_module(rank: int) -> None:
    """A critic in the step of its generator: there is nothing to synchronize, so nothing is sent."""
    generator, critic = DDP(Weight()), DDP(Weight())
    critic.requires_grad_(False)
    for step in range(2):
        generator.zero_grad()
        critic(generator(x_of(rank))).backward()
        assert generator.module.w.grad.item() == MEAN
        assert [m.sync_stats()["steps"] for m in (generator, critic)] == [step + 1, 0]


@on_ranks(2)
def test_a_thread_may_evaluate_while_another_one_trains(rank: int) -> None:
    """A step belongs to the backward that has begun it: forwards without gradients leave it alone, others are named."""
    model, seen = DDP(TwoLayers()), []

    def evaluate(_: Tensor) -> None:
        model.sync_checkpoint().state_dict()
        with torch.no_grad():
            model(x_of(rank))
        with pytest.raises(RuntimeError, match="a backward of this model is running in another thread"):
            model(x_of(rank))
        with pytest.raises(RuntimeError, match="a backward of this model is running in another thread"):
            model.sync_state = model.sync_state
        seen.append(rank)

    def in_a_thread(grad: Tensor) -> None:
        thread = threading.Thread(target=evaluate, args=(grad,))
        thread.start()
        thread.join()

    for _ in range(3):
        model.zero_grad()
        loss = model(x_of(rank))
        hook = model.module.first.register_hook(in_a_thread) if rank == 1 else None
        loss.backward()
        assert [p.grad.item() for p in model.parameters()] == [MEAN, MEAN]
        if hook is not None:
            hook.remove()
    assert seen == [rank] * 3 * rank


@on_ranks(2)
def test_later_hooks_never_see_an_unsynchronized_gradient(rank: int) -> None:
    model, seen = DDP(Weight()), []
    train(model, rank)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    model(x_of(rank), both=True).backward()
    assert seen == [None, None]
    assert [p.grad.item() for p in model.parameters()] == [MEAN, MEAN]


@pytest.mark.parametrize("steps", [0, 3])
@on_ranks(2)
def test_what_a_later_hook_of_the_users_makes_of_a_gradient_is_synchronized(rank: int, steps: int) -> None:
    model = DDP(Weight())
    model.module.w.register_hook(lambda grad: grad**2)
    train(model, rank, steps)
    model(x_of(rank)).backward()
    assert model.module.w.grad.item() == 2.5


@pytest.mark.parametrize(("accumulates", "loss_uses"), [(False, False), (True, False), (False, True)])
@on_ranks(2)
def test_a_failed_step_leaves_gradients_where_they_were_and_none_that_nobody_has_taken(
    rank: int, accumulates: bool, loss_uses: bool
) -> None:
    model, flat = DDP(TwoLayers()), torch.zeros(2)
    own = model.module

    def loss_of(fails: bool) -> Tensor:
        return model(x_of(rank), fails) + (0 * own.first if loss_uses else 0)

    for _ in range(2):
        model.zero_grad()
        loss_of(False).backward()
        assert own.first.grad.item() == own.second.grad.item() == MEAN
    own.first.grad, own.second.grad = (flat[0], flat[1]) if accumulates else (None, None)
    loss = loss_of(rank == 1)
    with pytest.raises(ArithmeticError if rank == 1 else StepFailedError):
        loss.backward()
    loss = loss_of(False)  # which ends the step of a backward that broke off
    if accumulates:
        flat.zero_()
        loss.backward()
        assert own.first.grad.data_ptr() == flat.data_ptr()
        assert flat.tolist() == [MEAN, MEAN]
    else:
        assert [p.grad for p in model.parameters()] == [None, None]


GO_ON: dict[str, Any] = {
    "read": lambda model, _: model.sync_state,
    "save": lambda model, _: model.sync_checkpoint(),
    "state_dict": lambda model, _: model.state_dict(sync_state=True),
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "another model": lambda _, other: other(x_of(1)),
    "a compiled model": lambda model, _: torch.compile(model, backend="eager")(x_of(1)),
}


@pytest.mark.parametrize("how", GO_ON)
@on_ranks(2)
def test_a_rank_that_has_caught_an_error_reports_it_when_it_saves_or_calls_a_model(rank: int, how: str) -> None:
    model, other = DDP(TwoLayers()), DDP(TwoLayers())
    fail(model, rank)
    if rank == 1:
        GO_ON[how](model, other)
    for each in (other, model):
        each(x_of(rank)).backward()
        assert [p.grad.item() for p in each.parameters()] == [MEAN, MEAN]


@pytest.mark.parametrize("calls_last", [False, True])
@on_ranks(2)
def test_errors_of_two_backwards_are_reported_in_their_order(rank: int, calls_last: bool) -> None:
    models = [DDP(TwoLayers()) for _ in range(6)]  # more than two, for an order of a set to be another one
    for loss in [model(x_of(rank), rank == 1) for model in models]:
        with pytest.raises(ArithmeticError if rank == 1 else StepFailedError):
            loss.backward()
    for model in reversed(models) if calls_last else models:
        model(x_of(rank)).backward()
        assert [p.grad.item() for p in model.parameters()] == [MEAN, MEAN]


@on_ranks(2)
def test_a_rank_that_saves_the_state_of_a_hook_reports_its_error(rank: int) -> None:
    ddp = nn.parallel.DistributedDataParallel(TwoLayers(), bucket_cap_mb=1e-6)
    handle = fnddp.register(ddp, "error_feedback(fp16(allreduce))")
    ddp(x_of(rank)).backward()  # after it DDP has a bucket for each parameter
    ddp.zero_grad()
    fail(ddp, rank)
    handle.sync_checkpoint()


@pytest.mark.parametrize("text", ["weighted(allreduce)", "fp16(allreduce, check=True)"])
@on_ranks(2)
def test_a_step_that_fails_at_its_end_fails_the_others_of_its_backward(rank: int, text: str) -> None:
    first, last = DDP(TwoLayers(), sync="error_feedback(bf16(allreduce))"), DDP(Weight(), sync=text)

    def step(fails: bool) -> None:
        first.zero_grad(), last.zero_grad()
        loss = last(first(x_of(rank) / 3)) * (1e6 if fails and "fp16" in text else 1)
        with nullcontext() if "fp16" in text or (fails and rank == 0) else last.weight(1.0):
            loss.backward()

    step(False)
    before = bits(first.sync_state)
    with pytest.raises((ValueError, StepFailedError, FloatingPointError)):
        step(True)
    assert bits(first.sync_state) == before
    assert [p.grad for p in first.parameters()] == [None, None]
    step(False)
    assert first.sync_stats()["failed_steps"] == 1


@on_ranks(2)
def test_an_interrupt_before_several_steps_end_fails_all_of_them(rank: int) -> None:
    models = [DDP(TwoLayers()), DDP(TwoLayers())]
    stops = interrupted(backward, "in_order") if rank == 1 else nullcontext()
    with pytest.raises(Interrupt if rank == 1 else StepFailedError), stops:
        models[1](models[0](x_of(rank))).backward()
    for model in models:
        model(x_of(rank)).backward()
        assert [p.grad.item() for p in model.parameters()] == [MEAN, MEAN]
        assert model.sync_stats()["failed_steps"] == 1


@pytest.mark.parametrize("all_drop", [False, True])
@on_ranks(2)
def test_what_no_sync_has_accumulated_is_synchronized_by_a_backward_that_reaches_no_parameter(
    rank: int, all_drop: bool
) -> None:
    model = DDP(Weight())
    model.module.forward = lambda x, drops: 1 * x if drops else x + model.module.w * x  # type: ignore[method-assign]
    x = x_of(rank).requires_grad_()
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            model(x, drops=False).backward()
        (of_x,) = torch.autograd.grad(model(2 * x, drops=rank == 0), x)  # is no step, and leaves them where they are
        assert of_x.item() == 2 * (1 if rank == 0 else 2)
        assert model.module.w.grad.item() == 1 + rank
        model(x, drops=all_drop or rank == 0).backward()
        assert model.module.w.grad.item() == (MEAN if all_drop else MEAN + 1)


@on_ranks(2)
def test_backward_with_a_graph(rank: int) -> None:
    model = DDP(Weight())
    loss = model(x_of(rank)) ** 2  # gradient 2 w x^2, mean 5; derivative of its square 2 * 5 * 2 x^2, mean 50
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about create_graph, once in a process
        loss.backward(create_graph=True)
    grad = model.module.w.grad
    assert grad.requires_grad
    assert grad.item() == 5.0
    model.module.w.grad = None
    grad.square().backward()
    assert model.module.w.grad.item() == 50.0


@on_ranks(2)
def test_a_module_that_returns_a_parameter(rank: int) -> None:
    model = DDP(Weight())
    model.module.forward = lambda x: (model.module.w, model.module.w * x)  # type: ignore[method-assign]
    for _ in range(3):
        model.zero_grad()
        model(x_of(rank))[1].backward()
        assert model.module.w.grad.item() == MEAN
    model.zero_grad()
    with model.no_sync():
        model(x_of(rank))[1].backward()
    assert model.module.w.grad.item() == 1 + rank


@on_ranks(2)
def test_sparse_gradients_are_sparse_on_all_ranks(rank: int) -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(4, 2, sparse=True), "linear": nn.Linear(2, 1)})
    module.forward = lambda i, embeds: module["linear"](module["embed"](i) if embeds else torch.ones(1, 2)).sum()
    model = DDP(module)
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([1]), embeds=rank == 0).backward()
        assert module["embed"].weight.grad.is_sparse


def test_complex_residuals_are_shared_out():
    values = {0: torch.tensor([1 + 0j]), 1: torch.tensor([3 + 0j])}
    assert combined(values, shares(0, 1, 2)).tolist() == [2 + 0j]


@on_ranks(2)
def test_gradients_of_another_dtype_than_their_parameters(rank: int) -> None:
    module = Weight()
    module.w.grad_dtype = torch.float64
    model = DDP(module, sync=error_feedback(fp16(allreduce)))
    model(x_of(rank)).backward()
    assert module.w.grad.dtype == model.sync_state.residual["w"].dtype == torch.float64
    assert module.w.grad == MEAN


@pytest.mark.parametrize("what", ["parameters", "gradients"])
@on_ranks(2)
def test_a_dtype_changed_after_wrapping_is_an_error(rank: int, what: str) -> None:
    model = DDP(Weight())
    if what == "parameters":
        model.double()
    else:
        model.module.w.grad_dtype = torch.float64
    with pytest.raises(ValueError, match=r"'w' was float32\[\] on cpu .* is now float64\[\] on cpu; wrap the module"):
        model(x_of(rank)).backward()


@on_ranks(2)
def test_compiled_autograd_is_refused(rank: int) -> None:
    model = DDP(Weight())
    loss = model(x_of(rank))
    with (
        torch._dynamo.compiled_autograd._enable(lambda graph: graph),
        pytest.raises(RuntimeError, match="cannot be synchronized in a backward that compiled autograd runs"),
    ):
        loss.backward()
    require_mean(model, rank)


@on_ranks(2)
def test_a_retained_graph_is_synchronized_each_time(rank: int) -> None:
    model = DDP(Weight(lambda y: 1 * y))
    loss = model(x_of(rank))
    for times in (1, 2):
        loss.backward(retain_graph=True)
        assert model.module.w.grad.item() == times * MEAN
    model.zero_grad()
    model.module.last.backward()  # is each rank's own
    assert model.module.w.grad == x_of(rank)


# The world changes


@on_ranks(2)
def test_a_rank_that_loads_by_assignment_keeps_the_order_learnt_in_the_last_step(rank: int) -> None:
    torch.manual_seed(0)
    model = DDP(nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}), bucket_cap_mb=1e-4)
    model.module.forward = lambda x: model.module["a"](model.module["b"](x))  # not in the order of registration
    for step in range(2):
        model.zero_grad()
        model(torch.full((2, 8), 1.0 + rank)).sum().backward()
        if rank == step == 0:
            model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    assert len(set(map(tuple, gather(list(model.plan.buckets))))) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_wrapper_that_is_gone_is_freed_with_the_step_that_broke_off(fails: bool) -> None:
    model = DDP(TwoLayers(), sync=error_feedback(fp16(allreduce)))
    for each in (False, False, fails):
        model.zero_grad()
        model.module.kept = model(torch.ones(()), each)  # by the module
        with pytest.raises(ArithmeticError) if each else nullcontext():
            model.module.kept.backward()
    refs = [weakref.ref(each) for each in (model, model.module, model.module.first, model._steps.engine)]
    del model
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


def test_an_interrupt_while_others_are_notified_ends_the_step() -> None:
    model = DDP(TwoLayers())
    with pytest.raises(ArithmeticError):
        model(torch.ones(()), True).backward()
    with failing(Vote, "explain", error=KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        model(torch.ones(()))
    model.sync_state = model.sync_state


@pytest.mark.parametrize("text", ["error_feedback(every(2, allreduce))", "error_feedback(random_k(allreduce, k=1))"])
@on_ranks(2)
def test_what_is_sent_again_of_a_leaf_that_no_rank_uses_counts_once(rank: int, text: str) -> None:
    """The mean of an earlier backward, that a later one of the same step has put into the memory."""
    model = fnddp.DistributedDataParallel(Parts(), sync=text)
    p = model.module.a.weight
    gradients, given = torch.zeros_like(p), torch.zeros_like(p)
    for uses in (["ab"], ["ab", "b"], ["ab"], ["b"], ["ab", "b", "b"]):
        model.zero_grad()
        for use in uses:
            model(torch.ones(1, 16), use=use).sum().backward()
            gradients += "a" in use
        given += 0 if p.grad is None else p.grad
    left = fnddp.state_dict(model.sync_state)["local/residual.a.weight"]
    torch.testing.assert_close(given + left, gradients)
