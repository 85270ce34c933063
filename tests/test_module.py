"""`fnddp.DistributedDataParallel` on gloo processes: torch's DDP in everything users rely on."""

import copy
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import CollectiveError, DistributedDataParallel, allreduce, error_feedback, fp16
from fnddp.laws import bits, gather
from fnddp.wire import control
from tests.ranks import on_ranks
from tests.test_register import COMPRESSED, batch, loss_of, make_model

SMALL = {"bucket_cap_mb": 0.01}


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach() for p in model.parameters()]


@on_ranks(2)
def test_parameters_and_buffers_are_those_of_the_first_rank(rank: int) -> None:
    module = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    module[2].requires_grad_(False)
    with torch.no_grad():
        for each in (*module.parameters(), module[1].running_mean):
            each.add_(rank)
    model = DistributedDataParallel(module)
    assert bits(model.state_dict()) == gather(bits(model.state_dict()))[0]
    loss_of(model(batch(rank, 0))).backward()
    model.eval()
    with torch.no_grad():
        model(batch(rank, 9))
    before = bits(model.state_dict())
    assert before == gather(before)[0]  # made equal in the first evaluation, not in what comes after it
    if rank == 0:
        model(batch(rank, 9))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("text", ["allreduce", COMPRESSED, "fp16(allreduce, check=True)"])
@on_ranks(2)
def test_autograd_grad_is_synchronized(rank: int, text: str, create_graph: bool) -> None:
    model = DistributedDataParallel(make_model(), sync=fnddp.parse(text), **SMALL)
    straight = DistributedDataParallel(make_model(), sync=fnddp.parse(text), **SMALL)
    for step in range(4):
        straight.zero_grad()
        loss_of(straight(batch(rank, step))).backward()
        state = model.sync_state if step == 2 else None  # held, or not
        x = batch(rank, step).requires_grad_()
        (of_x,) = torch.autograd.grad(loss_of(model(x)), x)
        plain = copy.deepcopy(model.module)
        x_alone = batch(rank, step).requires_grad_()
        assert bits(of_x) == bits(torch.autograd.grad(loss_of(plain(x_alone)), x_alone)[0])
        loss = loss_of(model(batch(rank, step)))
        means = torch.autograd.grad(loss, list(model.parameters()), create_graph=create_graph)
        assert bits([mean.detach() for mean in means]) == bits(grads_of(straight))
        assert bits(model.sync_state) == bits(straight.sync_state)
        assert grads_of(model) == [None] * len(means)
        del state


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)).double()


@on_ranks(2)
def test_double_backward(rank: int) -> None:
    """Through gradients of inputs, as in a gradient penalty, and through those of parameters, as in MAML."""
    module = mlp()
    model = DistributedDataParallel(copy.deepcopy(module))
    batches = [batch(r, 0).double() for r in range(dist.get_world_size())]

    def penalty(net: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (of_x,) = torch.autograd.grad(net(x).pow(2).sum(), x, create_graph=True)
        return of_x.pow(2).sum()

    penalty(model, batches[rank]).backward()
    torch.stack([penalty(module, x) for x in batches]).mean().backward()
    torch.testing.assert_close(grads_of(model), grads_of(module))

    for net in (model, module):
        net.zero_grad()
    used = [model.module[0].weight, model.module[2].weight]
    means = torch.autograd.grad(model(batches[rank]).pow(2).sum(), used, create_graph=True)
    sum(mean.pow(2).sum() for mean in means).backward()
    total = torch.stack([module(x).pow(2).sum() for x in batches]).mean()
    want = torch.autograd.grad(total, [module[0].weight, module[2].weight], create_graph=True)
    sum(mean.pow(2).sum() for mean in want).backward()
    torch.testing.assert_close(grads_of(model), grads_of(module))


@pytest.mark.parametrize("text", ["allreduce", COMPRESSED, "fp16(allreduce, check=True)"])
@on_ranks(2)
def test_functional_call_is_synchronized(rank: int, text: str) -> None:
    sync = fnddp.parse(text)
    model = DistributedDataParallel(mlp(), sync=sync)
    params = dict(mlp().named_parameters())
    state = sync.init(params)
    for step in range(3):
        x = batch(rank, step).double()
        plain = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
        own = torch.autograd.grad(loss_of(torch.func.functional_call(mlp(), plain, x)), list(plain.values()))
        want, state = sync(dict(zip(plain, own, strict=True)), state)
        before = model.sync_state

        given = {f"module.{n}": p.detach().clone().requires_grad_() for n, p in params.items()}
        loss_of(torch.func.functional_call(model, given, x)).backward()  # leaves
        assert bits([given[f"module.{n}"].grad for n in params]) == bits(list(want.values()))
        assert bits(model.sync_state) == bits(state)
        assert grads_of(model) == [None] * 4

        model.sync_state = before  # not leaves
        scaled = {n: 1.0 * p for n, p in given.items()}
        got = torch.autograd.grad(loss_of(torch.func.functional_call(model, scaled, x)), list(given.values()))
        assert bits(list(got)) == bits(list(want.values()))

        model.sync_state = before  # torch.func.grad
        free = {n: p.detach() for n, p in given.items()}
        func = torch.func.grad(lambda p, x=x: loss_of(torch.func.functional_call(model, p, x)))(free)
        assert bits([func[f"module.{n}"] for n in params]) == bits(list(want.values()))
        assert bits(model.sync_state) == bits(state)
        params = {n: p.detach() - 0.1 * want[n] for n, p in params.items()}


@on_ranks(2)
def test_other_transforms_synchronize_or_raise(rank: int) -> None:
    model = DistributedDataParallel(mlp())
    plain = mlp()
    x = batch(rank, 0).double()
    params = {n: p.detach() for n, p in model.named_parameters()}
    alone = {n.removeprefix("module."): p for n, p in params.items()}

    def loss(p: Any, x: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(model, p, x))

    # What is not about gradients of parameters is this rank's own.
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(model)(x), plain(x))
        torch.testing.assert_close(
            torch.func.jvp(model, (x,), (torch.ones_like(x),)), torch.func.jvp(plain, (x,), (torch.ones_like(x),))
        )
    of_x = torch.func.grad(lambda x: loss_of(model(x)))(x)
    torch.testing.assert_close(of_x, torch.func.grad(lambda x: loss_of(plain(x)))(x))
    # What would be, and cannot be synchronized, raises.
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x.unsqueeze(1))
    with pytest.raises(Exception, match="jvp"):
        torch.func.jvp(lambda p: loss(p, x), (params,), (params,))
    with pytest.raises(RuntimeError, match="has no derivative"):
        torch.func.grad(lambda p: torch.func.grad(loss)(p, x)["module.0.weight"].pow(2).sum())(params)
    dist.barrier()
    want = torch.func.grad(lambda p: loss_of(torch.func.functional_call(plain, p, x)))(alone)
    with model.no_sync():
        got = torch.func.grad(loss)(params, x)
    torch.testing.assert_close([got[f"module.{n}"] for n in alone], list(want.values()))
    got = torch.func.grad(loss)(params, x)  # and it still works
    mean = allreduce(want, ())[0]
    assert bits([got[f"module.{n}"] for n in alone]) == bits(list(mean.values()))


@on_ranks(2)
def test_a_backward_from_within_after_one_that_broke_off(rank: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2))))
    hidden: list[Tensor] = []
    model.module[0].register_forward_hook(lambda *given: hidden.append(given[-1]))
    for step in range(3):
        model.zero_grad()
        loss = model(torch.full((1, 2), 1.0 + rank)).sum()
        if step < 2:
            loss.backward()
    hook = hidden[-1].register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    hidden[-1].sum().backward()
    assert model.module[0].weight.grad.tolist() == [[1.5, 1.5]] * 2


def test_a_state_of_another_pipeline_is_refused():
    model = DistributedDataParallel(make_model(), sync=error_feedback(fp16(allreduce)))
    state = model.sync_state
    for wrong, message in (
        ((), r"has float32\[64, 16\] on cpu as 'residual.0.weight', got nothing"),
        (state._replace(residual={**state.residual, "x": torch.ones(1)}), r"has nothing as 'residual.x', got float32"),
        (
            state._replace(residual={name: r.double() for name, r in state.residual.items()}),
            r"has float32\[64, 16\] on cpu as 'residual.0.weight', got float64\[64, 16\] on cpu",
        ),
        (
            state._replace(residual={name: r.flatten() for name, r in state.residual.items()}),
            r"has float32\[64, 16\] on cpu as 'residual.0.weight', got float32\[1024\] on cpu; load a saved one",
        ),
        ({"residual": state.residual, "inner": ()}, r"for this model is a PyTreeSpec\(ErrorFeedbackState"),
    ):
        with pytest.raises(ValueError, match=message):
            model.sync_state = wrong
    model.sync_state = state


# Errors, after each of which it goes on as if nothing had been


X = torch.ones(3, 4)


def wrapped(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(4, 2), **options)


def require_mean(model: DistributedDataParallel, rank: int, ranks: int) -> None:
    """A backward gives the mean over the ranks: of a loss that is as large as its number."""
    model.zero_grad()
    ((1 + rank) * model(X).sum()).backward()
    mean = sum(range(1, ranks + 1)) / ranks
    assert model.module.bias.grad is not None
    assert model.module.bias.grad.tolist() == [3 * mean] * 2


def stand_ins(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}


@on_ranks(1)
def test_a_pipeline_is_no_device_and_a_module_on_the_cpu_has_none(rank: int) -> None:
    wrong: Any = fp16(allreduce)
    with pytest.raises(TypeError, match=r"second argument is device_ids.*sync=fp16\(allreduce\)"):
        DistributedDataParallel(nn.Linear(4, 2), wrong)
    for given in ({"device_ids": [0]}, {"output_device": 0}):
        with pytest.raises(ValueError, match=r"device_ids .* are for modules on one GPU, got parameters on \['cpu'\]"):
            wrapped(**given)
    with pytest.raises(ValueError, match=r"device_ids must name one device, got \[0, 1\]"):
        wrapped(device_ids=[0, 1])
    require_mean(wrapped(), rank, 1)


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2, bias=False), nn.Linear(4, 2)
        self.uses = False

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + (self.unused(x) if self.uses else 0)


@pytest.mark.parametrize("given", [True, False])
@on_ranks(2)
def test_one_rank_may_load_with_assign(rank: int, given: bool) -> None:
    models = [DistributedDataParallel(Switched(), skip_all_reduce_unused_params=True) for _ in range(2)]

    def step() -> None:
        outs = []
        for model in models:
            model.zero_grad()
            outs.append(model((rank + 1) * X).sum())
        with ExitStack() as blocks:
            for model in models:
                blocks.enter_context(model.weight(1) if given else nullcontext())
            sum(outs).backward()
        assert [model.module.used.weight.grad.tolist() for model in models] == [[[4.5] * 4] * 2] * 2

    step()
    step()
    if rank == 0:
        models[0].load_state_dict(models[0].state_dict(), assign=True)
    step()
    step()
    models[0].module.uses = True
    with pytest.raises(RuntimeError, match="one parameter is unused in first iteration, but then got used"):
        step()


@on_ranks(2)
def test_what_ranks_without_inputs_cannot_follow(rank: int) -> None:
    model = wrapped()
    with pytest.raises(RuntimeError, match="run out of inputs give no weight"), model.weight(2):
        model.join()
    with model.join():
        with pytest.raises(RuntimeError, match="run out of inputs give no weight"), model.weight(1.0):
            pass
        with pytest.raises(RuntimeError, match=r"cannot follow torch.func or .*wrapped with: weight, bias"):
            torch.func.functional_call(model, stand_ins(model), (X,))
        for _ in range(2 + rank):
            model(X).sum().backward()
    require_mean(model, rank, 2)


@on_ranks(2)
def test_methods_of_torchs_class_that_tools_call(rank: int) -> None:
    model, found = wrapped(), list[str]()

    def look(_: Tensor) -> None:
        with pytest.raises(RuntimeError, match="has not finished"):
            model._check_reducer_finalized()
        found.append("open")

    hook = model.module.bias.register_post_accumulate_grad_hook(look)
    require_mean(model, rank, 2)
    model._check_reducer_finalized()
    assert found == ["open"]
    hook.remove()
    model._remove_autograd_hooks()
    model.zero_grad()
    ((1 + rank) * model(X).sum()).backward()
    assert model.module.bias.grad.tolist() == [3.0 * (1 + rank)] * 2


def test_buffers_that_cannot_be_made_equal(monkeypatch):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.BatchNorm1d(4))

    def gone(*_: Any, **__: Any) -> None:
        raise RuntimeError("connection closed")

    with monkeypatch.context() as patch:
        patch.setattr(control, "broadcast", gone)
        with pytest.raises(CollectiveError, match=r"could not be made equal in forward: connection closed\. Another"):
            model(X)
    with pytest.raises(RuntimeError, match=r"CollectiveError|connection closed"):
        model(X)


def test_a_state_dict_with_the_pipelines_state_takes_a_prefix():
    model = wrapped(sync=error_feedback(fp16(fnddp.allreduce)))
    names = ["sync_state.local/residual.weight", "sync_state.local/residual.bias"]
    assert list(model.state_dict(sync_state=True, prefix="net.")) == [
        *("net.module.weight", "net.module.bias"),
        *(f"net.{name}" for name in names),
    ]
    assert list(model.state_dict(sync_state=True)) == ["module.weight", "module.bias", *names]
    assert list(model.state_dict()) == ["module.weight", "module.bias"]


@on_ranks(2)
def test_ranks_with_other_options(rank: int) -> None:
    for options, rank_0, rank_1 in (
        ({"bucket_cap_mb": 1 + rank}, "buckets of 1 MiB", "buckets of 2 MiB"),
        ({"static_graph": rank == 1}, "static_graph=False", "static_graph=True"),
        ({"skip_all_reduce_unused_params": rank == 1}, "unused_params=False", "unused_params=True"),
    ):
        match = f"ranks disagree about options: rank 0: .*{rank_0}.*; rank 1: .*{rank_1}"
        with pytest.raises(fnddp.RankMismatchError, match=match):
            wrapped(**options)
    model = DistributedDataParallel(nn.Linear(4, 2), bucket_cap_mb=1 + rank, init_sync=False)  # nobody looks
    assert gather(model.bucket_bytes_cap) == [2**20, 2**21]


@on_ranks(2)
def test_a_module_that_is_wrapped_in_torchs_class_too_is_refused(rank: int) -> None:
    for inner in (TorchDDP(nn.Linear(2, 1)), nn.Sequential(TorchDDP(nn.Linear(2, 1)))):
        with pytest.raises(RuntimeError, match="is wrapped in torch's DistributedDataParallel, too, .* one of the two"):
            DistributedDataParallel(inner)
    outer = TorchDDP(nn.Sequential(DistributedDataParallel(nn.Linear(2, 1)), nn.Linear(1, 1)))
    with pytest.raises(RuntimeError, match=r"a module of which it is a part, is wrapped in torch's"):
        outer(torch.ones(1, 2))


@on_ranks(2)
def test_what_is_a_sum_over_ranks_is_not_added_up_again(rank: int) -> None:
    model = wrapped(sync=fnddp.all_reduce(op="sum"))
    model(X).sum().backward()
    before = model.module.bias.grad
    assert before is not None
    assert before.tolist() == [6.0, 6.0]
    with pytest.raises(RuntimeError, match=r"'weight' has a gradient that is a sum over ranks .* within no_sync\(\)"):
        model(X).sum().backward()
    assert before.tolist() == [6.0, 6.0]
    for set_to_none in (True, False):
        model.zero_grad(set_to_none)
        with model.no_sync():
            model(X).sum().backward()
        model(X).sum().backward()
        assert model.module.bias.grad.tolist() == [12.0, 12.0]


@on_ranks(2)
def test_a_module_of_ours_may_run_in_the_forward_of_another_one_of_torchs_class(rank: int) -> None:
    teacher = wrapped()

    class Student(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x) - teacher(x)

    assert TorchDDP(Student(4, 2))(X).shape == (3, 2)
