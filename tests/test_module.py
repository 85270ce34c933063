"""`fnddp.DistributedDataParallel` on gloo processes: torch's DDP in everything users rely on."""

import copy
import pickle
import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import CollectiveError, DistributedDataParallel, allreduce, fp16
from fnddp.core import tree
from fnddp.laws import bits, gather
from fnddp.wire import control
from tests.models import WITH_RESIDUAL, Parts, batch, grads_of, loss_of, make_model, normed
from tests.ranks import on_ranks
from tests.ways import failing


@on_ranks(2)
def test_parameters_and_buffers_are_those_of_the_first_rank(rank: int) -> None:
    module = normed()
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


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)).double()


@on_ranks(2)
def test_a_module_of_torchscript(rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        models = [wrap(torch.jit.script(mlp())) for wrap in (TorchDDP, DistributedDataParallel, TorchDDP)]
    fnddp.register(models[2], allreduce)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(rank)).double()
    for step in range(2):
        for model in models:
            model.zero_grad()
            (model(x) * (rank + step + 1)).square().mean().backward()
        for want, *others in zip(*(model.parameters() for model in models), strict=True):
            for got in others:
                torch.testing.assert_close(got.grad, want.grad)


def penalty(net: nn.Module, x: Tensor, power: int) -> Tensor:
    """Its first backward reaches no parameter, and is no step; with power 1, the second begins past the outputs."""
    x = x.clone().requires_grad_()
    (of_x,) = torch.autograd.grad((net(x) if power == 1 else net(x) ** power).sum(), x, create_graph=True)
    return of_x.pow(2).sum()


@on_ranks(2)
def test_double_backward(rank: int) -> None:
    """Through gradients of inputs, as in a gradient penalty. Through those of parameters: see MAML in test_backward."""
    module = mlp()
    model = DistributedDataParallel(copy.deepcopy(module))
    batches = [batch(r, 0).double() for r in range(dist.get_world_size())]
    for power in (1, 2):
        for net in (model, module):
            net.zero_grad()
        penalty(model, batches[rank], power).backward()
        torch.stack([penalty(module, x, power) for x in batches]).mean().backward()
        torch.testing.assert_close(grads_of(model), grads_of(module))


@on_ranks(2)
def test_transforms_of_torch_func_are_of_this_rank_alone_or_say_what_to_write(rank: int) -> None:
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
    # What is about them, and would be taken for synchronized, raises.
    for transform in (
        lambda: torch.func.grad(loss)(params, x),
        lambda: torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x.unsqueeze(1)),
        lambda: torch.func.jvp(lambda p: loss(p, x), (params,), (params,)),
        lambda: torch.func.jacrev(loss)(params, x),
    ):
        with pytest.raises(
            RuntimeError, match=r"0.weight, .* such gradients cannot be synchronized; use fnddp.value_and_grad"
        ):
            transform()
    want = torch.func.grad(lambda p: loss_of(torch.func.functional_call(plain, p, x)))(alone)
    with model.no_sync():
        got = torch.func.grad(loss)(params, x)
    torch.testing.assert_close([got[f"module.{n}"] for n in alone], list(want.values()))
    loss_of(model(x)).backward()  # and it still works
    torch.testing.assert_close([p.grad for p in model.parameters()], list(allreduce(want, ())[0].values()))


def test_a_state_of_another_pipeline_is_refused():
    model = DistributedDataParallel(make_model(), sync=WITH_RESIDUAL)
    state = model.sync_state
    has = r"has float32\[64\] on cpu as 'residual.0.bias', got "
    for wrong, message in (
        ((), f"{has}nothing"),
        (state._replace(residual={**state.residual, "x": torch.ones(1)}), r"has nothing as 'residual.x', got float32"),
        (tree.map_tensors(torch.Tensor.double, state), rf"{has}float64\[64\] on cpu; load a saved one"),
        ({"residual": state.residual, "inner": ()}, r"for this model is a PyTreeSpec\(ErrorFeedbackState"),
    ):
        with pytest.raises(ValueError, match=message):
            model.sync_state = wrong


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


@on_ranks(1)
def test_device_ids_that_do_not_fit_are_refused(rank: int) -> None:
    wrong: Any
    for wrong in (fp16(allreduce), "fp16(allreduce)"):
        with pytest.raises(TypeError, match=r"second argument is device_ids.*sync='?fp16\(allreduce\)"):
            DistributedDataParallel(nn.Linear(4, 2), wrong)
    with pytest.raises(ValueError, match=r"device_ids .* are for modules on one GPU, got parameters on \['cpu'\]"):
        wrapped(device_ids=[0])
    require_mean(wrapped(), rank, 1)


@on_ranks(2)
def test_one_rank_may_load_with_assign(rank: int) -> None:
    models = [DistributedDataParallel(Parts(), skip_all_reduce_unused_params=True) for _ in range(2)]

    def step(use: str) -> None:
        outs = []
        for model in models:
            model.zero_grad()
            outs.append(model(torch.full((3, 16), rank + 1.0), use).sum())
        sum(outs).backward()
        assert [model.module.a.weight.grad.tolist() for model in models] == [[[4.5] * 16] * 8] * 2

    step("a")
    step("a")
    if rank == 0:
        models[0].load_state_dict(models[0].state_dict(), assign=True)
    step("a")
    step("a")
    with pytest.raises(RuntimeError, match="one parameter is unused in first iteration, but then got used"):
        step("ab")


@on_ranks(1)
def test_a_state_has_the_dtypes_of_assigned_parameters(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(4, 4), sync="error_feedback(powersgd(allreduce, rank=1))")
    model(X).sum().backward()
    residual = model.sync_state.residual["weight"]
    model.load_state_dict({key: value.double() for key, value in model.state_dict().items()}, assign=True)
    assert torch.equal(model.sync_state.residual["weight"], residual.double())
    model(X.double()).sum().backward()
    assert model.module.weight.grad.dtype == torch.float64


@on_ranks(1)
def test_steps_that_are_refused_stay_refused_when_parameters_are_assigned(rank: int) -> None:
    model = wrapped()
    for refuse, message in (
        (lambda: model.refuse(RuntimeError("half of a file is loaded")), "half of a file is loaded"),
        (lambda: setattr(model._engine, "broken", CollectiveError("a rank has died")), "a rank has died"),
    ):
        refuse()
        with suppress(RuntimeError):
            model.load_state_dict(model.state_dict(), assign=True)
        with pytest.raises(RuntimeError, match=message):
            model(X)
        model.refuse(None)


@pytest.mark.parametrize("text", ["allreduce", "error_feedback(powersgd(allreduce, rank=1))"])
@pytest.mark.parametrize("change", ["sync", "deepcopy", "pickle", "assign"])
@on_ranks(2)
def test_parameters_that_are_frozen_for_a_time_are_synchronized_when_they_are_thawed(
    rank: int, change: str, text: str
) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), sync=text)
    model.module[1].weight.requires_grad_(False)
    model(X * (1 + rank)).sum().backward()
    if change == "sync":
        model.sync = "bf16(allreduce)"
    elif change == "deepcopy":
        model = copy.deepcopy(model)
    elif change == "pickle":
        model = pickle.loads(pickle.dumps(model))
    else:
        model.load_state_dict(model.state_dict(), assign=True)
    assert not model.module[1].weight.requires_grad
    for is_thawed in (False, True):
        model.module[1].weight.requires_grad_(is_thawed)
        model.zero_grad()
        model(X * (1 + rank)).sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert ("module.1.weight" in grads) == is_thawed
        assert bits(list(grads.values())) == bits([gather(grad)[0] for grad in grads.values()])


@on_ranks(2)
def test_memory_of_a_frozen_parameter_does_not_depend_on_its_earlier_gradient(rank: int) -> None:
    """So a run resumes that freezes one part after the other, as Lightning's `toggle_optimizer` does."""
    states = []
    for clears in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model = DistributedDataParallel(net, sync="error_feedback(bf16(allreduce))")
        model(X * (1 + rank)).sum().backward()
        net[1].requires_grad_(False)
        held = None if clears else net[1].weight.grad.clone()
        if clears:
            net[1].zero_grad()
        model(X * (1 + rank)).square().sum().backward()
        assert bits([net[1].weight.grad]) == bits([held])
        states.append(fnddp.state_dict(model.sync_state))
    assert bits(states[0]["local/residual.1.weight"]) == bits(states[1]["local/residual.1.weight"])


@pytest.mark.parametrize("text", ["allreduce", "error_feedback(powersgd(allreduce, rank=1, min_compression_rate=0))"])
@on_ranks(2)
def test_parameters_that_are_thawed_after_wrapping_are_synchronized_from_the_next_forward(rank: int, text: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    module[0].requires_grad_(False)
    model = DistributedDataParallel(module, sync=text)
    data = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))
    model(data).square().sum().backward()
    before, steps = model.sync_state, model._engine.lane.begun
    module[0].requires_grad_()
    if rank == 0:
        with torch.no_grad():
            model(data)
    for begun in (1, 2):
        model.zero_grad()
        model(data).square().sum().backward()
        grads = grads_of(model)
        assert len(grads) == 6
        assert bits(grads) == bits([gather(grad)[0] for grad in grads])
        assert model._engine.lane.begun == steps + begun
    if text != "allreduce":
        assert before.residual.keys() < model.sync_state.residual.keys()
    module.append(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="3.weight.*wrap the module again"):
        model(data)


@on_ranks(2)
def test_ranks_that_thaw_other_parameters_all_raise(rank: int) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    module[:2].requires_grad_(False)
    model = DistributedDataParallel(module)
    module[rank].requires_grad_()
    with pytest.raises(fnddp.RankMismatchError, match="ranks disagree about leaf '[01].weight'"):
        model(X)
    module[:2].requires_grad_()
    model(X).sum().backward()
    assert bits(grads_of(model)) == bits([gather(grad)[0] for grad in grads_of(model)])


@on_ranks(2)
def test_a_set_up_that_raises_changes_nothing(rank: int) -> None:
    model = wrapped()
    no_hook = failing(nn.Parameter, "register_post_accumulate_grad_hook", at=1, error=RuntimeError("no hook"))
    with no_hook, pytest.raises(RuntimeError, match="no hook"):
        model.sync = "bf16(allreduce)"
    assert model.sync == allreduce
    require_mean(model, rank, 2)


class Versioned(nn.Linear):
    _version = 3
    seen: Any = None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        self.seen = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_versions_of_modules_are_loaded_and_errors_name_the_callers_keys():
    for given in (nn.Sequential(Versioned(3, 3)), DistributedDataParallel(nn.Sequential(Versioned(3, 3)))):
        model = DistributedDataParallel(nn.Sequential(Versioned(3, 3)))
        model.load_state_dict(given.state_dict())
        assert model.module[0].seen == 3
    other = DistributedDataParallel(nn.Sequential(nn.Identity(), nn.Linear(3, 3)))
    for known, key in ((other.state_dict(), "module.1.bias"), (other.module.state_dict(), "1.bias")):
        with pytest.raises(RuntimeError, match=f'Unexpected key.*"{key}"') as error:
            model.load_state_dict(known)
        assert "module.module" not in str(error.value)


STATES = "error_feedback(every(3, allreduce))"


@on_ranks(2)
def test_a_state_of_another_pipeline_on_any_rank_leaves_parameters_as_they_are(rank: int) -> None:
    model = wrapped(sync=STATES)
    saved = model.state_dict(sync_state=True)
    saved = {key: value + 1 for key, value in saved.items()}
    if rank == 1:
        del saved["sync_state.replicated/inner.step"]
    before = copy.deepcopy(model.state_dict(sync_state=True))
    with pytest.raises(ValueError, match=r"missing \['replicated/inner.step'\]"):
        model.load_state_dict(saved)
    assert model.state_dict(sync_state=True).keys() == before.keys()
    assert bits(list(model.module.parameters())) == bits([before["module.weight"], before["module.bias"]])
    dist.barrier()
    assert model.sync_state.inner.step == 0


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


def test_buffers_that_cannot_be_made_equal():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.BatchNorm1d(4))
    gone = failing(control, "broadcast", error=RuntimeError("connection closed"))
    with gone, pytest.raises(CollectiveError, match=r"be made equal in forward: connection closed\. Another"):
        model(X)
    with pytest.raises(RuntimeError, match=r"CollectiveError|connection closed"):
        model(X)


def test_a_state_dict_with_the_pipelines_state_takes_a_prefix():
    assert list(wrapped(sync=WITH_RESIDUAL).state_dict(sync_state=True, prefix="net.")) == [
        *("net.module.weight", "net.module.bias"),
        *("net.sync_state.local/residual.bias", "net.sync_state.local/residual.weight"),
    ]


@on_ranks(2)
def test_a_module_that_is_wrapped_in_torchs_class_too_is_refused(rank: int) -> None:
    for inner in (TorchDDP(nn.Linear(2, 1)), nn.Sequential(TorchDDP(nn.Linear(2, 1)))):
        with pytest.raises(
            RuntimeError, match="is also wrapped in torch's DistributedDataParallel, .* only one of them"
        ):
            DistributedDataParallel(inner)
    outer = TorchDDP(nn.Sequential(DistributedDataParallel(nn.Linear(2, 1)), nn.Linear(1, 1)))
    with pytest.raises(RuntimeError, match=r"a module that contains it, is also wrapped in torch's"):
        outer(torch.ones(1, 2))
    student, teacher = nn.Linear(4, 2), wrapped()  # which is no part of the student, and runs in its forward
    student.register_forward_hook(lambda _, inputs, output: output - teacher(*inputs).detach())
    assert TorchDDP(student)(X).shape == (3, 2)


@on_ranks(2)
def test_what_is_a_sum_over_ranks_is_not_added_up_again(rank: int) -> None:
    model = wrapped(sync=fnddp.all_reduce(op="sum"))
    model(X).sum().backward()
    before = model.module.bias.grad
    assert before is not None
    assert before.tolist() == [6.0, 6.0]
    with pytest.raises(RuntimeError, match=r"'weight' already has a gradient summed over ranks, .* within no_sync\(\)"):
        model(X).sum().backward()
    assert before.tolist() == [6.0, 6.0]
    for set_to_none in (True, False):
        model.zero_grad(set_to_none)
        with model.no_sync():
            model(X).sum().backward()
        model(X).sum().backward()
        assert model.module.bias.grad.tolist() == [12.0, 12.0]
