"""Sharded optimizers: on every rank the weights are those of torch's optimizer, whoever updates them.

References are torch's optimizers on every rank with the exact mean, and torch's ZeroRedundancyOptimizer.
"""

import copy
import pickle
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import CollectiveError, Owners, RankMismatchError, StepFailedError, to_all, to_owners
from fnddp.integrations.checkpoint import async_save, load, save
from fnddp.integrations.fsdp import own_matrices
from fnddp.laws import bits, gather
from fnddp.reducers.halves import with_halves
from tests.models import Parts, alike, assert_equal_on_ranks, stacks
from tests.ranks import on_ranks
from tests.rings import one_of
from tests.sharded import meshes
from tests.ways import local

EXACT = {"gradients": "two_shot", "weights": "allgather"}
FEW_BITS = {"gradients": "error_feedback(quantize(two_shot, bits=4))", "weights": "ef21(quantize(allgather, bits=4))"}
HOPS = pytest.mark.parametrize("hops", [EXACT, FEW_BITS], ids=["exact", "4 bits"])


class Net(nn.Module):
    """An embedding that is large enough to be cut, matrices of several shapes, and a part that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1040, 16)  # 16,640 elements
        self.layers = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 8))
        self.other = nn.Linear(16, 8)

    def forward(self, tokens: Tensor, uses_other: bool = False) -> Tensor:
        x = self.embed(tokens)
        return self.layers(x) + (self.other(x) if uses_other else 0)


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    groups = [{"params": rest[:1], "weight_decay": 0.0}, {"params": rest[1:], "lr": 1e-2}]
    return [torch.optim.Muon(matrices, lr=2e-2), torch.optim.AdamW(groups, lr=3e-3)]


def batch(rank: int, step: int) -> Tensor:
    return torch.randint(0, 1040, (12,), generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(output: Tensor) -> Tensor:
    return (output - torch.linspace(-1, 1, 8)).square().mean()


class Owned:
    """A model, the optimizers that are sharded, and steps of both."""

    def __init__(self, hops: dict[str, str] | None, *, trains_all: bool = True, **options: Any) -> None:
        self.net = net()
        self.net.layers[0].requires_grad_(trains_all)
        self.optimizers = optimizers(self.net)
        self.model: Any = None if hops is None else fnddp.own(self.net, self.optimizers, **hops, **options)
        self.more = nn.Parameter(torch.ones(3))  # which every rank has, and no optimizer

    @property
    def graded(self) -> list[nn.Parameter]:
        return [p for p in (*self.net.parameters(), self.more) if p.grad is not None]

    def backward(self, rank: int, step: int, uses_other: bool = False) -> None:
        loss_of(self.model(batch(rank, step), uses_other)).backward()

    def update(self) -> None:
        for each in self.optimizers:
            each.step()
            each.zero_grad()

    def step(self, rank: int, step: int, uses_other: bool = False) -> None:
        self.backward(rank, step, uses_other)
        self.update()


class Everywhere(Owned):
    """The same on every rank: torch's optimizers with the exact mean."""

    def __init__(self, **options: Any) -> None:
        super().__init__(None, **options)
        self.model = fnddp.DistributedDataParallel(self.net, sync="two_shot")


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def require_equal(model: nn.Module, want: nn.Module) -> None:
    expected = weights(want)
    differ = [name for name, p in weights(model).items() if not torch.equal(p, expected[name])]
    assert not differ, differ


def state_size(optimizers: list[torch.optim.Optimizer]) -> int:
    of = [each.state.values() for each in optimizers]
    return sum(v.numel() for states in of for state in states for v in state.values() if v.numel() > 1)


@on_ranks(2, 3, 4)
def test_weights_are_those_of_the_optimizers_on_every_rank(rank: int):
    """With clipping by the norm of all leaves, schedules, groups and decay, in bits; and a rank holds its share."""
    owned, every = Owned(EXACT), Everywhere()
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for each in (owned, every) for o in each.optimizers]
    for step in range(5):
        for each in (owned, every):
            loss_of(each.model(batch(rank, step), step > 2)).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in every.net.parameters() if p.grad is not None])
        total = torch.nn.utils.clip_grad_norm_(owned.net.parameters(), 0.1)
        torch.testing.assert_close(total, norm, rtol=2e-7, atol=0)  # that of rows to rounding
        torch.nn.utils.clip_grads_with_norm_(every.net.parameters(), 0.1, total)
        for each in (owned, every):
            each.update()
        for schedule in schedules:
            schedule.step()
        require_equal(owned.net, every.net)
    sizes = gather(state_size(owned.optimizers))
    assert sum(sizes) == state_size(every.optimizers)
    assert max(sizes) < 0.6 * sum(sizes) if len(sizes) == 2 else max(sizes) < 0.5 * sum(sizes)
    assert all(p.grad is None for p in owned.net.parameters())


@on_ranks(2)
def test_adamw_is_torchs_zero_redundancy_optimizer(rank: int):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, which it imports
        from torch.distributed.optim import ZeroRedundancyOptimizer
    theirs, ours = net(), net()
    ddp = TorchDDP(theirs, find_unused_parameters=True)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-2)
    adamw = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    model = fnddp.own(ours, adamw)
    for step in range(3):
        for each, optimizer in ((ddp, zero), (model, adamw)):
            optimizer.zero_grad()
            loss_of(each(batch(rank, step), True)).backward()
            optimizer.step()
    require_equal(ours, theirs)


@on_ranks(3)
def test_few_bits_on_both_hops_train_all_ranks_alike(rank: int):
    owned, every = Owned(FEW_BITS), Everywhere()
    for step in range(6):
        owned.step(rank, step)
        every.step(rank, step)
        assert_equal_on_ranks(weights(owned.net))
    losses = [loss_of(each.net(batch(9, 9))).item() for each in (owned, every)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


@on_ranks(2)
def test_ranks_with_other_numbers_of_tokens_give_weights(rank: int):
    owned, every = Owned({**EXACT, "gradients": "weighted(two_shot)"}), Everywhere()
    every.model.sync = "weighted(two_shot)"
    for each in (owned, every):
        with each.model.weight(3 - 2 * rank):
            loss_of(each.model(batch(rank, 0))).backward()
        each.update()
    require_equal(owned.net, every.net)


@on_ranks(3)
@HOPS
def test_a_loss_scaler_hears_of_leaves_that_a_rank_does_not_own(rank: int, hops: dict[str, str]):
    """Optimizers with fewer leaves than ranks, on ranks whose own ones are not used, with and without `unscale_`.

    Each rank sees the gradients of what it owns alone; an overflow elsewhere must count, before any rank steps.
    """
    model = net()
    bias = [model.layers[0].bias]
    rest = [p for p in model.parameters() if p is not bias[0]]
    made = [torch.optim.SGD(bias, lr=0.1, momentum=0.9), torch.optim.SGD(rest, lr=0.1)]
    owned = fnddp.own(model, made, **hops)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        before, overflows = weights(model), step in (1, 4)
        with owned.no_sync():
            scaler.scale(loss_of(owned(batch(rank, step)))).backward()
        loss = loss_of(owned(batch(rank, step)))
        scaler.scale(loss * (torch.inf if overflows and rank == 1 else 1.0)).backward()
        if step > 1:
            for each in made:
                scaler.unscale_(each)
            owned.clip_grad_norm_(1.0)
        for each in made:
            scaler.step(each)
            each.zero_grad(set_to_none=step > 1)
        owned.zero_grad(set_to_none=step > 1)
        scaler.update()
        assert (bits(weights(model)) == bits(before)) == overflows
        assert_equal_on_ranks(weights(model))
    assert scaler.get_scale() == 256.0
    saved = owned.optimizer_state_dict()
    assert [len(group["params"]) for group in saved["param_groups"]] == [1, len(rest)]
    assert list(saved["state"]) == ["layers.0.bias"]
    owned.load_optimizer_state_dict(saved)
    assert state_size(made) == (48 if owned.owners.owner("layers.0.bias") == rank else 0)


@pytest.mark.parametrize("sent", ["allgather", "ef21(quantize(allgather))"])
@pytest.mark.parametrize(("dtype", "lr"), [(torch.bfloat16, 1e-3), (torch.float16, 1e-4)])
@on_ranks(2)
def test_weights_in_float32_at_their_owner_alone(rank: int, dtype: torch.dtype, lr: float, sent: str):
    """Steps that the model's dtype rounds away add up at the owner, and the model is its weights, rounded.

    Also with a loss scaler, which refuses gradients in float16; and a state that the optimizer loads stays in float32.
    """
    model, reference = nn.Linear(64, 64), nn.Linear(64, 64)
    for each in (model, reference):
        nn.init.constant_(each.weight, 1.0)
        nn.init.constant_(each.bias, 1.0)
    sgd, theirs = (torch.optim.SGD(each.parameters(), lr, momentum=0.3) for each in (model.to(dtype), reference))
    owned = fnddp.own(model, sgd, weights=sent, master_dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for _ in range(8):
        scaler.scale(owned(torch.ones(1, 64, dtype=dtype)).sum()).backward()
        reference(torch.ones(1, 64)).sum().backward()
        scaler.step(sgd)
        scaler.update()
        theirs.step()
        sgd.load_state_dict(copy.deepcopy(sgd.state_dict()))
        for each in (sgd, theirs):
            each.zero_grad()
    assert all(state["momentum_buffer"].dtype == torch.float32 for state in sgd.state.values())
    assert torch.equal(model.weight, reference.weight.to(dtype))
    assert model.weight[0, 0] < 1  # each step alone is less than half of the spacing of the model's dtype


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
@on_ranks(2)
def test_what_has_only_one_ranks_state_is_not_copied(rank: int, copied: Any):
    owned = Owned(EXACT)
    for each in (owned.model, *owned.optimizers):
        with pytest.raises(TypeError, match="own: .*cop.* or pickle.* call own"):
            copied(each)


@on_ranks(2)
def test_weights_and_states_of_all_leaves_are_in_the_master_dtype(rank: int):
    """Also if a leaf of the model has it already, in a state from before `own`, and for complex leaves."""
    leaves = {"narrow": torch.bfloat16, "wide": torch.float32, "pairs": torch.complex64}
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(4, dtype=dtype)) for name, dtype in leaves.items()})
    owned = fnddp.own(model, torch.optim.Adagrad(model.parameters()), master_dtype=torch.float32)
    saved = owned.optimizer_state_dict()
    dtypes = {name: torch.complex64 if name == "pairs" else torch.float32 for name in leaves}
    assert {name: value.dtype for name, value in saved["weights"].items()} == dtypes
    assert {name: state["sum"].dtype for name, state in saved["state"].items()} == dtypes


@on_ranks(2)
@pytest.mark.parametrize("sizes", [(16, 16), (16, 24)], ids=["messages of one size", "of two sizes"])
def test_ranks_that_step_optimizers_in_another_order_are_told_before_anything_changes(
    rank: int, sizes: tuple[int, int]
):
    model = nn.Sequential(nn.Linear(16, sizes[0], bias=False), nn.Linear(16, sizes[1], bias=False))
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    wrapped = fnddp.own(model, [first, second], **FEW_BITS)
    for step in range(3):
        wrapped(torch.full((2, 16), rank + 1.0)).square().mean().backward()
        before = bits(weights(model))
        if step == 1:
            with pytest.raises(RankMismatchError, match=f"steps SGD, optimizer {rank} of 2, and another rank another"):
                (second if rank else first).step()
            assert bits(weights(model)) == before
        first.step()
        second.step()
        wrapped.zero_grad()
        assert_equal_on_ranks(weights(model))
        assert bits(weights(model)) != before


@on_ranks(2)
def test_an_error_of_a_hook_behind_a_step_is_that_of_its_rank(rank: int):
    """The step is over."""
    owned = Owned(EXACT)
    muon, adamw = owned.optimizers
    loss_of(owned.model(batch(rank, 1))).backward()
    if rank == 1:
        muon.register_step_post_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) if rank == 1 else nullcontext():
        muon.step()
    adamw.step()
    assert_equal_on_ranks(weights(owned.net))


@on_ranks(2)
def test_sparse_gradients_go_to_optimizers_that_need_them(rank: int):
    torch.manual_seed(0)
    model = nn.Embedding(40, 3, sparse=True)
    reference = copy.deepcopy(model)
    adam, other = (torch.optim.SparseAdam(each.parameters(), lr=0.1) for each in (model, reference))
    wrapped, every = fnddp.own(model, adam), fnddp.DistributedDataParallel(reference, sync="two_shot")
    for step in range(3):
        for each, optimizer in ((wrapped, adam), (every, other)):
            each(torch.arange(3) + rank + step).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    require_equal(model, reference)


def require_same_gradients(rank: int, owned: Owned, every: Owned) -> None:
    for name, p in every.net.named_parameters():
        mine: Any = owned.net.get_parameter(name).grad
        assert (mine is None) == (p.grad is None), name
        if p.grad is not None:
            for order in (2.0, 1.0, torch.inf):
                torch.testing.assert_close(mine.norm(order), p.grad.norm(order))
            own = owned.model.owners.own(name, p.grad, rank)
            assert mine.part is None or torch.allclose(mine.part, own, rtol=1e-5, atol=1e-7), name
    totals = [torch.nn.utils.get_total_norm([p.grad for p in each.graded], foreach=True) for each in (owned, every)]
    torch.testing.assert_close(*totals)
    torch.testing.assert_close(owned.more.grad, every.more.grad)


CHANGES: list[Callable[[Owned], Any]] = [
    lambda each: each.net.zero_grad(set_to_none=False),
    lambda each: each.optimizers[0].zero_grad(set_to_none=False),
    lambda each: [p.grad.mul_(0.5) for p in each.graded],
    lambda each: torch._amp_foreach_non_finite_check_and_unscale_(  # as GradScaler does
        [p.grad for p in each.graded], torch.zeros(1), torch.full((1,), 0.5)
    ),
]
ADDITIONS: list[Callable[[Owned], Any]] = [lambda each: [p.grad.add_(0.1 * p.detach()) for p in each.graded]]
CLIPS: list[Callable[[Owned], Any]] = [  # which read all of a gradient; the last one to rounding
    lambda each: torch._foreach_zero_([p.grad for p in each.graded]),
    lambda each: torch.nn.utils.clip_grad_value_(each.graded, 1e-3),
    lambda each: torch.nn.utils.clip_grad_value_(each.graded, 1e-3, foreach=True),
    lambda each: torch.nn.utils.clip_grad_norm_(each.graded, 0.1, torch.inf, foreach=True),
    lambda each: torch.nn.utils.clip_grad_norm_(each.graded, 0.1),
]


def fail_in_backward(rank: int, owned: Owned, step: int, who: int) -> None:
    output, is_mine = owned.model(batch(rank, step)), rank == who
    handle = owned.net.layers[0].weight.register_hook(lambda grad: 1 / 0 if is_mine else grad)
    with pytest.raises(ZeroDivisionError if is_mine else StepFailedError):
        loss_of(output).backward()
    handle.remove()
    owned.model._steps.settle()


@pytest.mark.parametrize("seed", one_of(2, range(4)))
@on_ranks(2, pytest.param(3, marks=pytest.mark.thorough))
def test_the_models_gradients_stand_for_those_of_owners(rank: int, seed: int):
    """Norms, clipping, scaling and clearing in any order reach them, as if every rank had the mean.

    Also in lists with gradients that every rank has, with what is added and not synchronized yet, and after a backward
    that fails.
    """
    draws, is_exact = random.Random(seed), seed < 2
    owned, every = Owned(EXACT, cut=seed in (0, 3)), Everywhere()
    both = owned, every

    def backward(step: int) -> None:
        uses_other = draws.random() < 0.5
        for each in both:
            each.backward(rank, step, uses_other)

    def change(kinds: list[Callable[[Owned], Any]]) -> None:
        kind = draws.choice(kinds)
        for each in both:
            kind(each)

    for step in range(0, 40, 4):
        for each in both:
            each.more.grad = torch.ones(3)
        backward(step)
        require_same_gradients(rank, *both)
        for _ in range(draws.randrange(3)):
            owned.net.layers[4].bias.grad.norm()  # gathered with those of all leaves, which a change makes stale
            change([*CHANGES, *CLIPS[: -1 if is_exact else None]])
            require_same_gradients(rank, *both)
        if not is_exact and draws.random() < 0.5:
            with owned.model.no_sync(), every.model.no_sync():
                backward(step + 1)
            for _ in range(draws.randrange(3)):
                change([*CHANGES, *ADDITIONS])
            backward(step + 2)
            require_same_gradients(rank, *both)
        if draws.random() < 0.5:
            fail_in_backward(rank, owned, step + 3, draws.randrange(2))
            require_same_gradients(rank, *both)
        if is_exact or draws.random() < 0.7:  # sums of means are those of DDP to rounding
            for each in both:
                each.update()
            if is_exact:
                require_equal(owned.net, every.net)
            for name, p in owned.net.named_parameters():  # Muon computes in bfloat16
                torch.testing.assert_close(p, every.net.get_parameter(name), rtol=0, atol=1e-3, msg=name)
            owned.net.load_state_dict(every.net.state_dict())


@on_ranks(2)
def test_what_the_models_gradients_cannot_do_is_named(rank: int):
    owned = Owned(EXACT)
    owned.backward(rank, 0, True)
    weight = owned.net.layers[0].weight
    assert weight.grad is not None
    wrong: list[tuple[str, Callable[[Any], Any]]] = [
        ("add", lambda grad: grad + 1),
        ("add_", lambda grad: grad.add_(weight.detach(), alpha=0.1)),
        ("add_", lambda grad: grad.add_(0.1)),
        ("add_", lambda grad: grad.add_(torch.ones(()))),
    ]
    for op, use in wrong:
        with pytest.raises(RuntimeError, match=rf"aten.{op}.Tensor cannot use that of 'layers.0.weight'.*p.grad.part"):
            use(weight.grad)
    with pytest.raises(RuntimeError, match=r"_foreach_add_.*cannot use that of 'embed.weight'"):
        torch._foreach_add_([p.grad for p in owned.net.parameters() if p.grad is not None], 1.0)
    with mock.patch.object(owned.model, "_gather_norms", wraps=owned.model._gather_norms) as gathering:
        theirs = [p for each in owned.optimizers for group in each.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1e-3)  # still there
    assert gathering.call_count == 1  # for all leaves
    assert norm > 0
    torch.testing.assert_close(owned.model.clip_grad_norm_(1.0), torch.tensor(1e-3))
    with owned.model.no_sync():
        owned.backward(rank, 21, True)
    with pytest.raises(RuntimeError, match=r"clamp_.* reads the gradient of 'layers.0.weight'.*no_sync"):
        weight.grad.clamp_(-1e-3, 1e-3)
    with pytest.raises(RuntimeError, match=r"linalg_vector_norm.* reads the gradient of .*no_sync"):
        torch.nn.utils.clip_grad_norm_(owned.net.parameters(), 1.0)  # it left that part out
    owned.net.zero_grad()
    before = weights(owned.net)
    owned.update()
    assert bits(weights(owned.net)) == bits(before)  # nothing to step with


@on_ranks(2)
def test_the_models_gradients_where_other_parts_meet_them(rank: int):
    """Two models in one backward, each clipped by itself, on groups of their own; a scaler; a checkpoint in between."""
    group = dist.new_group([0, 1])
    pairs = [(Owned(EXACT), Everywhere()), (Owned(EXACT, process_group=group), Everywhere())]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(5):
        for each in zip(*pairs, strict=True):  # both that are owned, then both that are not
            losses = [loss_of(one.model(batch(rank, 10 * i + step))) for i, one in enumerate(each)]
            factor = torch.inf if step == 1 and rank == 1 else 1.0
            scaler.scale(sum(losses) * factor).backward()
        for pair in pairs:
            if step == 2:  # loaded between backward and step
                before = weights(pair[1].net)
                for each in pair:
                    each.net.load_state_dict({name: p * 0.5 for name, p in before.items()})
            norms: list[Tensor] = []
            for each in pair:
                for optimizer in each.optimizers:
                    scaler.unscale_(optimizer)
                norms.append(torch.nn.utils.clip_grad_norm_(each.net.parameters(), 0.1))
                for optimizer in each.optimizers:
                    scaler.step(optimizer)
                    optimizer.zero_grad()
            assert norms[0].isfinite() == (step != 1)
            if step != 1:
                torch.testing.assert_close(*norms)
        scaler.update()
        for owned, every in pairs:
            for name, p in owned.net.named_parameters():
                torch.testing.assert_close(p, every.net.get_parameter(name), msg=f"{name}, step {step}")
    assert scaler.get_scale() == 4.0


@on_ranks(2)
@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("closure", TypeError, "got a closure"),
        ("closure on one rank", TypeError, "got a closure"),
        ("only no_sync", RuntimeError, "is not synchronized: its backward ran within no_sync"),
        ("last no_sync", RuntimeError, "is not synchronized: its backward ran within no_sync"),
        ("new parameter", RuntimeError, "has no owner"),
        ("join", TypeError, "weight\\(0\\)"),
        ("create_graph", RuntimeError, "create_graph=True has none"),
        ("assign", RuntimeError, "were replaced after the module was wrapped"),
    ],
)
def test_what_owners_cannot_do_is_refused_on_all_ranks(rank: int, case: str, error: type[Exception], text: str):
    owned = Owned(EXACT)
    adamw = owned.optimizers[1]
    if case not in ("only no_sync", "create_graph", "assign"):
        loss_of(owned.model(batch(rank, 0))).backward()
    if "no_sync" in case:
        with owned.model.no_sync():
            loss_of(owned.model(batch(rank, 0))).backward()
    if case == "new parameter":
        adamw.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    def act() -> Any:
        if case == "assign":
            owned.net.load_state_dict(weights(owned.net), assign=True)
            return loss_of(owned.model(batch(rank, 0))).backward()
        if case == "join":
            return owned.model.join()
        if case == "create_graph":
            return loss_of(owned.model(batch(rank, 0))).backward(create_graph=True)
        return adamw.step(lambda: torch.ones(())) if "closure" in case and (rank or "one" not in case) else adamw.step()

    with pytest.raises((error, StepFailedError), match=f"{text}|failed on another rank") as raised:
        act()
    assert case == "closure on one rank" or isinstance(raised.value, error)


@on_ranks(2)
def test_models_and_optimizers_that_do_not_fit_are_refused_on_all_ranks(rank: int):
    other, model = nn.Linear(2, 2), net()
    muon, adamw = optimizers(model)
    bad: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        (TorchDDP(model), [muon, adamw], {}, TypeError, "reduced twice"),
        (fnddp.DistributedDataParallel(net()), [adamw], {}, TypeError, "reduced twice"),
        (model, adamw, {}, ValueError, "'layers.0.weight' is in no optimizer"),
        (model, [muon, adamw, torch.optim.SGD(other.parameters())], {}, ValueError, "not the model's"),
        (model, [muon, adamw, torch.optim.SGD([model.embed.weight])], {}, ValueError, "in two optimizers"),
        (model, [], {}, ValueError, "no optimizer"),
        (model, torch.optim.AdamW, {}, TypeError, "expected an optimizer, such as .*, got <class"),
        (other, torch.optim.LBFGS(other.parameters()), {}, TypeError, "closure"),
        (model, [muon, adamw], {"gradients": "allreduce"}, TypeError, "use two_shot"),
        (model, [muon, adamw], {"gradients": "ef21(quantize(two_shot))"}, TypeError, "because of ef21"),
        (model, [muon, adamw], {"gradients": "bf16(two_shot, check=True)"}, TypeError, "leave out check=True"),
        (model, [muon, adamw], {"weights": "bf16(allgather, check=True)"}, TypeError, "leave out check=True"),
        (model, [muon, adamw], {"gradients": "auto"}, TypeError, "name a pipeline"),
        (model, [muon, adamw], {"weights": "quantize(two_shot)"}, TypeError, "use allgather"),
        (model, [muon, adamw], {"weights": "ef21(allgather)"}, TypeError, "differences"),
        (model, [muon, adamw], {"cost": lambda *_: float("nan")}, ValueError, "cost of 'layers.0.weight' .* got nan"),
        (model, [muon, adamw], {"cost": lambda *_: "x"}, ValueError, "cost of 'layers.0.weight' .* got 'x'"),
        (model, [muon, adamw], {"cost": lambda *_: -1}, ValueError, "cost of 'layers.0.weight' is -1; return"),
        (model, [muon, adamw], {"master_dtype": torch.int8}, TypeError, "master_dtype must be .*, got torch.int8"),
    ]
    for wrong, of, hops, error, text in bad:
        with pytest.raises(error, match=text):
            fnddp.own(wrong, of, **hops)
    for options in ({"weight_decay": rank}, {"lr": 0.1 + rank}):
        with pytest.raises(fnddp.RankMismatchError, match="AdamW.*rank 0.*rank 1"):
            fnddp.own(other, torch.optim.AdamW(other.parameters(), **options))
    order = [muon, adamw] if rank else [adamw, muon]
    with pytest.raises(fnddp.RankMismatchError, match="ranks disagree about"):
        fnddp.own(model, order)
    owned = fnddp.own(model, [muon, adamw])  # after all of these
    for wrong, error, text in (("auto", TypeError, "name a pipeline"), ("two", ValueError, "two")):
        with pytest.raises(error if rank else fnddp.RankMismatchError, match=text):
            owned.sync = wrong if rank else "two_shot"
    loss_of(owned(batch(rank, 0))).backward()
    muon.step()


@on_ranks(2)
def test_a_step_that_a_rank_leaves_out_is_a_named_error(rank: int):
    owned = Owned(EXACT, process_group=dist.new_group(timeout=timedelta(seconds=3)))
    loss_of(owned.model(batch(rank, 0))).backward()
    owned.optimizers[0].step()
    if rank == 0:
        with pytest.raises(CollectiveError, match="own: this rank steps AdamW, optimizer 1 of 2, and not all others"):
            owned.optimizers[1].step()


@pytest.mark.parametrize("trains_all", [True, False])
@on_ranks(2)
def test_a_state_loads_into_optimizers_without_owners_and_back(rank: int, trains_all: bool):
    owned, again, direct = (Owned(EXACT, trains_all=trains_all) for _ in range(3))
    every = Everywhere(trains_all=trains_all)
    for step in range(2):
        owned.step(rank, step, True)
    saved = owned.model.optimizer_state_dict()
    for each in (every, again, direct):
        each.net.load_state_dict(owned.net.state_dict())
    set_optimizer_state_dict(every.net, every.optimizers, {k: saved[k] for k in ("state", "param_groups")})
    again.model.load_optimizer_state_dict(get_optimizer_state_dict(every.net, every.optimizers))
    owned.model.load_optimizer_state_dict(saved)
    for mine, whole in zip(direct.optimizers, every.optimizers, strict=True):
        mine.load_state_dict(whole.state_dict())
    assert sum(gather(state_size(direct.optimizers))) == state_size(every.optimizers)
    every.step(rank, 2, True)
    for each in (owned, again, direct):
        each.step(rank, 2, True)
        require_equal(each.net, every.net)


@on_ranks(2, 3)
def test_what_a_residual_sends_of_an_unused_leaf_is_a_gradient_on_all_ranks(rank: int):
    """Also where its owner alone has got something: norms are the same, and loss scalers find a gradient.

    A frozen leaf gets nothing.
    """
    owned = Owned({"gradients": "error_feedback(quantize(two_shot, bits=4))"})
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    before = weights(owned.net.other)
    for step in range(2):
        scaler.scale(loss_of(owned.model(batch(rank, step), step == 0))).backward()
        for each in owned.optimizers:
            scaler.unscale_(each)
        total = torch.nn.utils.clip_grad_norm_(owned.net.parameters(), 0.1)
        everyone = gather((total.item(), [p.grad is None for p in owned.net.parameters()]))
        assert everyone[1:] == everyone[:-1]
        for each in owned.optimizers:
            scaler.step(each)
        scaler.update()
        after = weights(owned.net.other)
        assert any((after[name] != p).any() for name, p in before.items())
        before = after
        owned.net.zero_grad()
        for each in owned.optimizers:
            each.zero_grad()
    assert_equal_on_ranks(weights(owned.net))
    owned.net.other.requires_grad_(False)
    owned.step(rank, 2)
    assert bits(weights(owned.net.other)) == bits(before)


@pytest.mark.parametrize("is_behind", [False, True])
@on_ranks(2)
def test_a_compiled_model_is_saved(rank: int, is_behind: bool, tmp_path: Path):
    owned, again = Owned(EXACT), Owned(EXACT)
    owned.step(rank, 0, True)
    saves = async_save if is_behind else save
    saving = saves(tmp_path, torch.compile(owned.model), owned.optimizers)
    if saving is not None:
        saving.result()
    with pytest.raises(ValueError, match=r"all its optimizers \(Muon, AdamW\) or none, got Muon"):
        save(tmp_path, owned.model, owned.optimizers[0])
    load(tmp_path, torch.compile(again.model), again.optimizers)
    for each in (owned, again):
        each.step(rank, 1, True)
    require_equal(again.net, owned.net)


@pytest.mark.thorough
@on_ranks(1)
def test_a_compiler_leaves_steps_alone(rank: int):
    """It would trace plans and collectives for minutes."""
    owned, every = Owned(EXACT), Everywhere()
    for optimizer in owned.optimizers:
        optimizer.step = torch.compile(optimizer.step)  # pyright: ignore[reportAttributeAccessIssue]
    for step in range(2):
        for each in (owned, every):
            each.step(rank, step)
    require_equal(owned.net, every.net)


@pytest.mark.parametrize("shards", [False, True])
@on_ranks(1, 2, 3)
def test_an_optimizer_may_stack_the_gradients_of_a_group(rank: int, shards: bool):
    """Its groups have what a rank owns alone in a step, and between steps all that they had, for schedules.

    What it computes is torch's SGD, which runs on shards, too.
    """
    owned, every = alike(), alike()
    for each in (owned, every) if shards else ():
        fully_shard(each, mesh=meshes(dist.get_world_size(), names="shard"))
    mine, reference = stacks(owned), torch.optim.SGD(every.parameters(), lr=0.1, momentum=0.9)
    models: list[nn.Module] = [owned, every]
    if shards:
        own_matrices(owned, mine)
    else:
        models = [fnddp.own(owned, mine), fnddp.DistributedDataParallel(every, sync="two_shot")]
    for step in range(3):
        for model, optimizer in zip(models, (mine, reference), strict=True):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * rank + step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, want in zip(owned.parameters(), every.parameters(), strict=True):
        assert torch.equal(local(p), local(want))
    assert [len(group["params"]) for group in mine.param_groups] == [5, 1]


def test_owners_are_balanced_by_cost_and_shown():
    leaves = {f"{i}": torch.empty(size, 4, device="meta") for i, size in enumerate([9, 8, 7, 6, 5, 4, 3, 2])}
    owners = Owners.of(leaves, 3)
    assert Owners.of(dict(reversed(leaves.items())), 3) == owners  # as on a rank whose dict has another order
    assert max(owners.load) / (sum(owners.load) / 3) < 1.1
    alike = Owners.of({str(i): torch.empty(4, device="meta") for i in range(6)}, 3)
    assert [alike.owner(str(i)) for i in reversed(range(6))] == [0, 1, 2, 0, 1, 2]  # as backward reaches them
    model = nn.Linear(200, 100)
    owned = fnddp.own(model, torch.optim.AdamW(model.parameters()))
    owned(torch.ones(1, 200)).sum().backward()
    assert owned.show_owners().splitlines() == [
        "AdamW: 2 leaves over 1 rank",
        "  rank 0: 2 whole leaves and rows of 0, 20,100 elements, load 2.01e+04 (100.0%)",
        "gradients: 0 wire bytes of a rank",
        "weights of AdamW: 0 wire bytes of a rank",
    ]


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + step)
    shapes = {"a": (33, 17), "b": (5,), "c": (), "d": (40, 6), "e": (3, 2, 2)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@on_ranks(3)
def test_halves_in_a_functional_loop(rank: int):
    """Gradients to a rank's own leaves, and what it made of them to all, with no module."""
    params = {name: p.clone() for name, p in gradients(9, 9).items()}
    owners = Owners.of(params, 3, cut={"d"})
    first, second = to_owners(owners=owners), to_all(owners=owners)
    own, _ = first(gradients(rank, 0), first.init(params))
    update = {name: -0.1 * grad for name, grad in own.items()}
    updates, _ = second(update, second.init(update))
    mean, _ = fnddp.two_shot(gradients(rank, 0), ())
    for name in params:
        assert torch.equal(updates[name], -0.1 * mean[name]), name
    with pytest.raises(ValueError, match="owners are for 3 ranks, but there are 2"):
        fnddp.lower(first, params, world_size=2)


def test_what_needs_one_mean_on_all_ranks_refuses_leaves_that_only_owners_have():
    half = fnddp.parse("error_feedback(quantize(to_owners(), bits=4))")
    assert not half.agrees
    assert with_halves(half, to_all()).agrees
    with pytest.raises(TypeError, match="gives ranks different means of some leaves"):
        fnddp.clip_by_global_norm(half, max_norm=1.0)


@pytest.mark.parametrize("text", ["two_shot", "sign(two_shot, chunk=24)", "topk(two_shot, ratio=0.3)"])
@on_ranks(3, threads=True)
def test_owners_have_what_allgather_gives_to_all(rank: int, text: str):
    """To the bit, with any codec; rows of a leaf what two_shot gives, but for its second hop."""
    params = gradients(9, 9)
    owners = Owners.of(params, 3, cut={"d"})
    half = with_halves(fnddp.parse(text), to_owners(owners=owners))
    whole = with_halves(fnddp.parse(text), fnddp.allgather)
    own, _ = half(gradients(rank, 0), half.init(params))
    mean, _ = whole(gradients(rank, 0), whole.init(params))
    for name, leaf in mean.items():
        if name != "d" or text == "two_shot":
            assert torch.equal(own[name], owners.own(name, leaf, rank)), name


COSTS = {"a.weight": 3.0, "b.weight": 2.9, "a.bias": 0.5, "b.bias": 0.4}
"""With which each of two ranks owns a part of each of these parts."""


@pytest.mark.parametrize("costs", [None, {**COSTS, "a.bias": 0.1, "b.bias": 0.2}, COSTS])
@pytest.mark.parametrize("saved_both", [False, True])
@on_ranks(2)
def test_what_no_step_has_used_has_no_state_in_a_checkpoint(
    rank: int, costs: dict[str, float] | None, saved_both: bool, tmp_path: Path
):
    """Nor has it one where a checkpoint is loaded: a step of length zero in its place would count, as Adam's first."""

    def made(offset: float) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        module = Parts()
        for p in module.parameters():
            p.data.add_(offset)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
        if costs is None:
            return module, fnddp.DistributedDataParallel(module, sync="two_shot"), optimizer
        return module, fnddp.own(module, optimizer, cost=lambda name, _: costs.get(name, 0.01)), optimizer

    def trained(model: Any, optimizer: torch.optim.Optimizer, begin: int, end: int, both: bool) -> None:
        for step in range(begin, end):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + rank)
            model(torch.randn(4, 16, generator=generator), "abc" if both else "a").square().mean().backward()
            optimizer.step()

    module, model, optimizer = made(0)
    trained(model, optimizer, 0, 2, saved_both)
    save(tmp_path, model, optimizer)
    trained(model, optimizer, 2, 4, True)
    for steps, both in ((0, False), (1, False), (1, True)):
        other, again, its = made(1)
        trained(again, its, 9, 9 + steps, both)
        load(tmp_path, again, its)
        trained(again, its, 2, 4, True)
        require_equal(other, module)


class WithNothing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 3)
        self.none = nn.Parameter(torch.ones(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.none.sum()


@HOPS
@on_ranks(2)
def test_a_leaf_without_elements_has_a_state_as_without_owners(rank: int, hops: Any):
    module, other = WithNothing(), WithNothing()
    optimizer, plain = (torch.optim.AdamW(each.parameters()) for each in (module, other))
    model = fnddp.own(module, optimizer, **hops)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        saved = model.optimizer_state_dict()
        set_optimizer_state_dict(other, plain, {key: saved[key] for key in ("state", "param_groups")})
        model.load_optimizer_state_dict(saved)


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize(
    "file", ["first rank's", "of each rank", "of a run without owners", "of one rank that owns all"]
)
@on_ranks(2)
def test_a_state_that_was_loaded_before_own_is_that_of_the_rank_or_an_error(rank: int, file: str, cut: bool):
    """Indices of parameters are the same on all ranks, so that of another rank would train on."""
    first = Everywhere() if "without" in file else Owned(EXACT, cut=cut)
    if "owns all" in file:
        alone = [dist.new_group([r]) for r in range(2)][rank]
        first = Owned(EXACT, process_group=alone)
    for step in range(2):
        first.step(0 if "owns all" in file else rank, step, True)
    saved: list[Any] = [[each.state_dict() for each in first.optimizers]]
    if file == "first rank's":
        dist.broadcast_object_list(saved)
    again = Owned(None)
    again.net.load_state_dict(first.net.state_dict())
    for optimizer, state in zip(again.optimizers, copy.deepcopy(saved[0]), strict=True):
        optimizer.load_state_dict(state)
    if file == "first rank's":
        with pytest.raises((ValueError, RankMismatchError), match=r"own: this state of Muon is for the leaves '"):
            fnddp.own(again.net, again.optimizers, cut=cut)
        return
    again.model = fnddp.own(again.net, again.optimizers, cut=cut)
    if "owns all" in file:
        assert "owned" not in again.optimizers[0].param_groups[0]
        return
    for each in (first, again):
        each.step(rank, 2, True)
    require_equal(again.net, first.net)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Muon])
@on_ranks(2)
def test_an_optimizer_without_owners_fails_with_what_one_rank_owned(rank: int, kind: Any, tmp_path: Path):
    """It would begin anew what is missing."""
    made = [nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3))) for _ in range(2)]
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    first, second = (kind(each.parameters(), **options) for each in made)
    fnddp.own(made[0], first)(torch.ones(2, 6)).sum().backward()
    first.step()
    second.load_state_dict(first.state_dict())
    model = fnddp.DistributedDataParallel(made[1])
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="size|shape"):
        second.step()
    with pytest.raises(ValueError, match=r"has loaded one rank's part of a state of fnddp.own.*make a new optimizer"):
        save(tmp_path, model, second)


@on_ranks(2)
def test_a_state_of_other_shapes_is_an_error_before_it_is_used(rank: int):
    """torch compares none, so a step would fail, or broadcast."""
    model, other = nn.Linear(4, 3), nn.Linear(5, 3)
    mine, theirs = (torch.optim.AdamW(each.parameters()) for each in (model, other))
    other(torch.ones(2, 5)).sum().backward()
    theirs.step()
    mine.load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match=r"'exp_avg' of 'weight' in the state of AdamW is float32\[3, 5\].*\[3, 4\]"):
        fnddp.own(model, mine)
    mine.state.clear()
    owned = fnddp.own(model, mine)
    with pytest.raises(ValueError, match="'exp_avg' of 'weight'") if "weight" in owned.owned[0].own else nullcontext():
        mine.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("before", ["the class", "allgather", "ef21(qsgd(allgather))"])
@on_ranks(2)
def test_a_checkpoint_of_another_second_hop_begins_with_the_weights_of_the_model(
    rank: int, before: str, tmp_path: Path
):
    first = Everywhere() if before == "the class" else Owned({"gradients": "two_shot", "weights": before})
    hops = {"gradients": "two_shot", "weights": "ef21(quantize(allgather, bits=4))"}
    again, by_name = Owned(hops), Owned(hops)
    for step in range(2):
        first.step(rank, step, True)
    again.step(rank, 7, True)
    save(tmp_path, first.model, first.optimizers)
    load(tmp_path, again.model, again.optimizers)
    require_equal(again.net, first.net)
    by_name.net.load_state_dict(first.net.state_dict())
    if isinstance(first, Everywhere):
        saved = get_optimizer_state_dict(first.net, first.optimizers)
    else:
        saved = first.model.optimizer_state_dict()
    by_name.model.load_optimizer_state_dict(saved)
    if before == "ef21(qsgd(allgather))":  # which has weights of owners
        assert bits(again.model.optimizer_state_dict()["weights"]) == bits(saved["weights"])
    for each in (again, by_name):
        each.step(rank, 2, True)
    require_equal(again.net, by_name.net)
