"""`fnddp.DistributedDataParallel` and `value_and_grad` on gloo processes: torch's DDP in everything users rely on."""

import copy
import gc
import io
import weakref
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import RankMismatchError, StepFailedError, allreduce, error_feedback, fp16
from fnddp.laws import bits, gather
from fnddp.wire.protocol import CollectiveError
from tests.ranks import on_ranks
from tests.test_register import COMPRESSED, Branches, batch, functional_steps, loss_of, make_model

SMALL = {"bucket_cap_mb": 0.01}


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach() for p in model.parameters()]


# As torch's DDP


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("options", [{}, SMALL], ids=["one bucket", "small buckets"])
@on_ranks(2)
def test_same_bits_as_torchs_ddp(rank: int, options: dict[str, Any], set_to_none: bool, micro: int) -> None:
    ours, theirs = fnddp.DistributedDataParallel(make_model(), **options), TorchDDP(make_model(), **options)
    models = [(m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for m in (ours, theirs)]
    for step in range(5):
        for model, optimizer in models:
            optimizer.zero_grad(set_to_none=set_to_none)
            for i in range(micro):
                with model.no_sync() if i < micro - 1 else nullcontext():
                    loss_of(model(batch(rank, micro * step + i))).backward()
            optimizer.step()
        assert bits(grads_of(ours)) == bits(grads_of(theirs)), f"step {step}"
        assert bits(list(ours.parameters())) == bits(list(theirs.parameters())), f"step {step}"


def module_steps(rank: int, sync: fnddp.Sync, steps: int, batches: int, **options: Any) -> tuple[dict, Any]:
    model = fnddp.DistributedDataParallel(make_model(), sync=sync, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(batches):
            with model.no_sync() if i < batches - 1 else nullcontext():
                loss_of(model(batch(rank, batches * step + i))).backward()
        optimizer.step()
    return dict(model.module.named_parameters()), model.sync_state


def check_as_functional(rank: int, text: str, batches: int, options: dict[str, Any]) -> None:
    sync = fnddp.parse(text)
    params, state = module_steps(rank, sync, 5, batches, **options)
    want_params, want_state = functional_steps(rank, sync, 5, batches)
    if dist.get_world_size() > 2:
        # A ring adds the ranks' parts of an element in an order that depends on where it lies in the buffer.
        torch.testing.assert_close(params, want_params, rtol=0, atol=1e-3)
        return
    assert bits(state) == bits(want_state)
    assert bits(params) == bits(want_params)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("options", [{}, SMALL], ids=["one bucket", "small buckets"])
@pytest.mark.parametrize(
    "text",
    [
        COMPRESSED,
        "warmup(bucketize(fp16(allreduce)), steps=2)",
        "error_feedback(fp16(allreduce), decay=0.5)",
        "partition({'*.weight': error_feedback(powersgd(allreduce)), '*': bf16(allreduce)})",
        "fp16(allreduce, check=True)",
    ],
)
def test_same_bits_as_the_functional_loop(gloo, text, options, batches):
    gloo(2, check_as_functional, text, batches, options)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_other_world_sizes(gloo, n):
    gloo(n, check_as_functional, COMPRESSED, 1, SMALL)


@on_ranks(2)
def test_several_forwards_and_several_backwards(rank: int) -> None:
    ours, theirs = fnddp.DistributedDataParallel(make_model()), TorchDDP(make_model())
    for model in (ours, theirs):
        for _ in range(2):
            model.zero_grad()
            (loss_of(model(batch(rank, 0))) + loss_of(model(batch(rank, 1)))).backward()
    assert bits(grads_of(ours)) == bits(grads_of(theirs))
    for model in (ours, theirs):  # two backwards, which add up
        model.zero_grad()
        for i in range(2):
            loss_of(model(batch(rank, i))).backward()
    assert bits(grads_of(ours)) == bits(grads_of(theirs))


@pytest.mark.parametrize("text", ["allreduce", "error_feedback(fp16(allreduce))"])
@on_ranks(2, 3)
def test_unused_parameters(rank: int, text: str) -> None:
    model = fnddp.DistributedDataParallel(Branches(), sync=fnddp.parse(text), **SMALL)
    for step in range(3):
        model.zero_grad()
        loss_of(model(batch(rank, step), rank)).backward()
        assert model.module.never.weight.grad is None
        assert model.module.never.bias.grad is None
        everyone = gather(bits(grads_of(model.module.sometimes)))
        assert all(other == everyone[0] for other in everyone)
        plain = Branches()
        loss_of(plain(batch(0, step), 0)).backward()
        if text == "allreduce":  # zeros on the other ranks
            want = plain.sometimes.weight.grad / dist.get_world_size()
            assert torch.equal(model.module.sometimes.weight.grad, want)
    if text != "allreduce":
        assert (model.sync_state.residual["sometimes.weight"].abs().max() > 0) == (rank == 0)
        assert not model.sync_state.residual["never.weight"].any()
    model.module.never.weight.grad = held = torch.full_like(model.module.never.weight, 7.0)
    loss_of(model(batch(rank, 3), rank)).backward()
    assert model.module.never.weight.grad is held
    assert bool((held == 7).all())


class Routed(nn.Module):
    """Each call uses one of its experts: another one on every rank and in every step, or several times the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, route: list[int]) -> dict[str, Any]:
        for i in route:
            x = self.experts[i](x).tanh()
        return {"out": [x], "route": route}


@on_ranks(2, 4)
def test_control_flow_that_depends_on_the_rank(rank: int) -> None:
    n = dist.get_world_size()
    model = fnddp.DistributedDataParallel(Routed(), **SMALL)
    for step in range(6):
        routes = [[(r + step) % 4] * (1 + r) + [step % 4] for r in range(n)]
        model.zero_grad()
        loss_of(model(batch(rank, step), routes[rank])["out"][0]).backward()
        plains = [Routed() for _ in range(n)]
        for r, plain in enumerate(plains):
            loss_of(plain(batch(r, step), routes[r])["out"][0]).backward()
        for name, p in model.module.named_parameters():
            each = [dict(plain.named_parameters())[name].grad for plain in plains]
            if all(g is None for g in each):
                assert p.grad is None
            else:
                want = sum((torch.zeros_like(p) if g is None else g) / n for g in each)
                torch.testing.assert_close(p.grad, want, rtol=1e-6, atol=1e-7)  # the order of a sum of n ranks


# Setting up


def batch_norm_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


@on_ranks(2)
def test_parameters_and_buffers_are_those_of_the_first_rank(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[1].running_mean += rank
    model[2].bias.requires_grad_(False)
    ddp = fnddp.DistributedDataParallel(model)
    everyone = gather(bits(model.state_dict()))
    assert everyone[0] == everyone[1]
    ours, theirs = fnddp.DistributedDataParallel(batch_norm_model()), TorchDDP(batch_norm_model())
    for step in range(3):
        for each in (ours, theirs):
            each.zero_grad()
            loss_of(each(batch(rank, step))).backward()
        assert bits(grads_of(ours)) == bits(grads_of(theirs))
        assert bits(ours.state_dict()) == bits(theirs.state_dict())
    for each in (ours, theirs):  # when torch makes buffers equal: in the first evaluation, not in what comes after it
        each.eval()
        with torch.no_grad():
            each(batch(rank, 9))
        everyone = gather(bits(each.state_dict()))
        assert everyone[0] == everyone[1]
        if rank == 0:
            each(batch(rank, 9))
    alone = fnddp.DistributedDataParallel(batch_norm_model(), forward_sync_buffers=False)
    loss_of(alone(batch(rank, 0))).backward()
    loss_of(alone(batch(rank, 1))).backward()
    means = gather(bits(alone.module[1].running_mean))
    assert means[0] != means[1]
    del ddp


def check_disagreement(rank: int, what: str) -> str:
    sync = fp16(allreduce) if (rank, what) == (1, "pipeline") else allreduce
    model = nn.Linear(4, 3 + (rank if what == "shape" else 0))
    with pytest.raises(RankMismatchError) as caught:
        fnddp.DistributedDataParallel(model, sync=sync)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", r"ranks disagree about leaf 'weight': rank 0: float32[3, 4] on cpu; rank 1: float32[4, 4] on cpu"),
        ("pipeline", r"ranks disagree about pipeline: rank 0: allreduce; rank 1: fp16(allreduce)"),
    ],
)
def test_disagreement_raises_on_all_ranks(gloo, what, message):
    messages = gloo(2, check_disagreement, what)
    assert messages[0] == messages[1]
    assert message in messages[0]


def test_nothing_to_train_is_an_error():
    with pytest.raises(RuntimeError, match="no parameter of the module requires a gradient; use it unwrapped"):
        fnddp.DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match=r"device_ids must name one device, got \[0, 1\]"):
        fnddp.DistributedDataParallel(nn.Linear(2, 2), device_ids=[0, 1])


@on_ranks(4)
def test_over_a_group(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    model = fnddp.DistributedDataParallel(make_model(), process_group=mine, sync=fnddp.parse(COMPRESSED))
    assert model.sync == fnddp.parse(COMPRESSED).over(mine)
    loss_of(model(batch(rank, 0))).backward()
    everyone = gather(bits(grads_of(model)))
    assert everyone[0] == everyone[1] != everyone[2] == everyone[3]


# Steps that fail


def fail(grad: Tensor) -> None:
    raise ZeroDivisionError("in my backward")


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        for i, layer in enumerate(self.model):
            x = layer(x)
            if fails and i == 2:
                x.register_hook(fail)
        return x


def check_backward_fails(rank: int, text: str) -> None:
    sync = fnddp.parse(text)
    model = fnddp.DistributedDataParallel(Fragile(), sync=sync, **SMALL)
    straight = fnddp.DistributedDataParallel(Fragile(), sync=sync, **SMALL)
    for step in range(5):
        if step in (0, 2, 3):
            before, params = bits(model.sync_state), bits(list(model.parameters()))
            if rank == 1:
                with pytest.raises(ZeroDivisionError, match="in my backward"):
                    loss_of(model(batch(rank, step), fails=True)).backward()
                model.zero_grad()
            else:
                with pytest.raises(StepFailedError, match="rank 1 failed with .*its backward did not finish"):
                    loss_of(model(batch(rank, step))).backward()
                model.zero_grad()
            # Rank 1 tells the others when it uses the module again: here in the next forward.
            assert bits(model.sync_state) == before
            assert bits(list(model.parameters())) == params
        for each in (model, straight):
            each.zero_grad()
            loss_of(each(batch(rank, 10 + step))).backward()
        assert bits(grads_of(model)) == bits(grads_of(straight))
        assert bits(model.sync_state) == bits(straight.sync_state)


@pytest.mark.parametrize(
    ("n", "text"), [(2, "allreduce"), (2, COMPRESSED), (2, "error_feedback(fp16(allreduce))"), (3, "allreduce")]
)
def test_an_error_in_one_ranks_backward(gloo, n, text):
    gloo(n, check_backward_fails, text)


@on_ranks(2)
def test_a_rank_that_never_calls_backward(rank: int) -> None:
    """A rank that never calls backward: the others hear of it from the process group."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    model = fnddp.DistributedDataParallel(make_model(), process_group=group)
    loss_of(model(batch(rank, 0))).backward()
    if rank == 0:
        with pytest.raises(CollectiveError, match="not called backward"):
            loss_of(model(batch(rank, 1))).backward()
        with pytest.raises(RuntimeError, match="an earlier step failed on this rank"):
            model(batch(rank, 2))
    dist.barrier()


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(
    "text", ["allreduce", COMPRESSED, "error_feedback(fp16(allreduce), decay=0.5)", "fp16(allreduce, check=True)"]
)
@on_ranks(2)
def test_autograd_grad_is_synchronized(rank: int, text: str, create_graph: bool) -> None:
    model = fnddp.DistributedDataParallel(make_model(), sync=fnddp.parse(text), **SMALL)
    straight = fnddp.DistributedDataParallel(make_model(), sync=fnddp.parse(text), **SMALL)
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


@on_ranks(2)
def test_double_backward(rank: int) -> None:
    """Through gradients of inputs, as in a gradient penalty, and through those of parameters, as in MAML."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model = fnddp.DistributedDataParallel(copy.deepcopy(module))
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


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)).double()


@pytest.mark.parametrize("text", ["allreduce", COMPRESSED, "fp16(allreduce, check=True)"])
@on_ranks(2)
def test_functional_call_is_synchronized(rank: int, text: str) -> None:
    sync = fnddp.parse(text)
    model = fnddp.DistributedDataParallel(mlp(), sync=sync)
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
    model = fnddp.DistributedDataParallel(mlp())
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


# State


@on_ranks(2)
def test_state_dict_is_that_of_torchs_ddp(rank: int) -> None:
    ours, theirs = fnddp.DistributedDataParallel(batch_norm_model()), TorchDDP(batch_norm_model())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(key.startswith("module.") for key in ours.state_dict())
    loss_of(theirs(batch(rank, 0))).backward()
    with torch.no_grad():
        for p in theirs.parameters():
            p -= p.grad
    ours.load_state_dict(theirs.state_dict())
    assert bits(ours.state_dict()) == bits(theirs.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]


@on_ranks(2)
def test_resuming_is_bit_exact(rank: int) -> None:
    def train(model: fnddp.DistributedDataParallel, steps: range) -> None:
        for step in steps:
            loss_of(model(batch(rank, step))).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            model.zero_grad()

    sync = fnddp.parse(f"warmup({COMPRESSED}, steps=2)")
    model = fnddp.DistributedDataParallel(make_model(), sync=sync, **SMALL)
    train(model, range(3))
    held, before = model.sync_state, bits(model.sync_state)
    module = copy.deepcopy(model.module.state_dict())
    file = io.BytesIO()
    torch.save(fnddp.state_dict(model.sync_state), file)
    train(model, range(3, 6))
    after = bits(list(model.parameters())), bits(model.sync_state)
    assert bits(held) == before
    file.seek(0)

    again = fnddp.DistributedDataParallel(make_model(), sync=sync, **SMALL)
    again.module.load_state_dict(module)
    again.sync_state = fnddp.load_state_dict(again.sync_state, torch.load(file, weights_only=True))
    train(again, range(3, 6))
    assert (bits(list(again.parameters())), bits(again.sync_state)) == after

    for _ in range(2):  # back to what was held, twice: setting it does not give it away
        model.module.load_state_dict(module)
        model.sync_state = held
        train(model, range(3, 6))
        assert (bits(list(model.parameters())), bits(model.sync_state)) == after
        assert bits(held) == before


def test_a_state_of_another_pipeline_is_refused():
    model = fnddp.DistributedDataParallel(make_model(), sync=error_feedback(fp16(allreduce)))
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


@on_ranks(2)
def test_sparse_shared_and_frozen_parameters(rank: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.EmbeddingBag(10, 16, sparse=True)
            self.frozen = nn.Linear(16, 16).requires_grad_(False)
            self.first = nn.Linear(16, 16)
            self.second = self.first  # shared

        def forward(self, index: Tensor) -> Tensor:
            return self.second(self.first(self.frozen(self.embedding(index))))

    ours, theirs = fnddp.DistributedDataParallel(Model()), TorchDDP(Model())
    for step in range(3):
        index = torch.tensor([[rank, 3 + step], [3, 9]])
        for model in (ours, theirs):
            model.zero_grad()
            model(index).square().sum().backward()
        got, want = (m.module.embedding.weight.grad for m in (ours, theirs))
        assert got.is_sparse
        torch.testing.assert_close(got.to_dense(), want.to_dense(), rtol=1e-6, atol=1e-7)  # torch divides the sum
        assert torch.equal(ours.module.first.weight.grad, theirs.module.first.weight.grad)
    assert ours.module.frozen.weight.grad is None


@on_ranks(2)
def test_what_the_user_holds_is_not_written_over(rank: int) -> None:
    model = fnddp.DistributedDataParallel(make_model(), sync=fnddp.parse(COMPRESSED), **SMALL)
    held: list[tuple[Any, Any]] = []
    for step in range(8):
        loss_of(model(batch(rank, step))).backward()
        if step in (1, 2, 4):
            held.append(([p.grad for p in model.parameters()], bits(grads_of(model))))
            held.append((model.sync_state, bits(model.sync_state)))
        model.zero_grad()
        assert all(bits(value) == before for value, before in held)


@on_ranks(2)
def test_a_wrapped_model_can_be_freed(rank: int) -> None:
    model = fnddp.DistributedDataParallel(make_model(), sync=fnddp.parse(COMPRESSED))
    for step in range(3):
        loss = loss_of(model(batch(rank, step)))
        loss.backward()
    alive = [weakref.ref(each) for each in (model, model.module, next(model.parameters()))]
    del model, loss
    gc.collect()
    assert [each() for each in alive] == [None] * 3


# value_and_grad


def linear_loss(params: dict[str, Tensor], x: Tensor, trouble: str = "") -> Tensor:
    if trouble:
        raise ZeroDivisionError(trouble)
    return (x @ params["w"] + params["b"]).tanh().square().mean()


def linear_params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {"w": torch.randn(16, 8, generator=generator), "b": torch.zeros(8), "unused": torch.ones(3)}


@pytest.mark.parametrize("text", ["allreduce", "error_feedback(powersgd(fp16(allreduce), rank=2))"])
@on_ranks(2)
def test_value_and_grad_fails_on_all_ranks_and_goes_on(rank: int, text: str) -> None:
    sync = fnddp.parse(text)
    step, grad = fnddp.value_and_grad(linear_loss, sync), torch.func.grad(linear_loss)
    params = linear_params()
    state, expected = sync.init(params), sync.init(params)
    for i in range(6):
        if i in (0, 3):
            if rank == 1:
                with pytest.raises(ZeroDivisionError, match="on rank one"):
                    step(params, state, batch(rank, i), trouble="on rank one")
            else:
                with pytest.raises(StepFailedError, match="rank 1 failed with ZeroDivisionError: on rank one"):
                    step(params, state, batch(rank, i))
            assert bits(state) == bits(expected)
        mean, expected = sync(grad(params, batch(rank, i)), expected)
        value, grads, state = step(params, state, batch(rank, i))
        assert torch.equal(value, linear_loss(params, batch(rank, i)))
        assert bits(grads) == bits(mean)
        assert bits(state) == bits(expected)
        assert not grads["unused"].any()
        params = {name: p - 0.1 * grads[name] for name, p in params.items()}


@on_ranks(2)
def test_parameters_that_are_not_in_the_loss_count_as_zero(rank: int) -> None:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        used = params["w"].sum()
        return used + (params["b"] * x).sum() if rank == 0 else used

    step = fnddp.value_and_grad(loss, allreduce)
    for _ in range(3):
        _, grads, _ = step({"w": torch.ones(2), "b": torch.ones(2)}, (), torch.tensor([2.0, 4.0]))
        assert (grads["w"].tolist(), grads["b"].tolist()) == ([1.0, 1.0], [1.0, 2.0])
    constant = fnddp.value_and_grad(lambda params: torch.tensor(3.0), allreduce)
    value, grads, _ = constant({"w": torch.ones(2)}, ())
    assert (value.item(), grads["w"].tolist()) == (3.0, [0.0, 0.0])


@on_ranks(2)
def test_a_loss_that_is_no_scalar_is_an_error_on_all_ranks(rank: int) -> None:
    step = fnddp.value_and_grad(lambda params, x: params["w"] * x, allreduce)
    with pytest.raises(TypeError, match=r"must return a scalar tensor, got a tensor of shape \(2,\); take its sum"):
        step({"w": torch.ones(2)}, (), torch.ones(2))
    with pytest.raises(TypeError, match=r"must return a scalar tensor, got a float"):
        fnddp.value_and_grad(lambda params: 1.0, allreduce)({"w": torch.ones(2)}, ())
    _, grads, _ = step({"w": torch.tensor(1.0)}, (), torch.tensor(2.0 + rank))
    assert grads["w"].item() == 2.5


@on_ranks(2)
def test_within_compile(rank: int) -> None:
    torch._dynamo.reset()
    sync = fnddp.parse("error_feedback(fp16(allreduce))")
    step = fnddp.value_and_grad(linear_loss, sync)
    params = linear_params()
    value, grads, state = step(params, sync.init(params), batch(rank, 0))

    @torch.compile(backend="eager")
    def compiled(params: Any, state: Any, x: Tensor) -> Any:
        return step(params, state, x)

    again, compiled_grads, compiled_state = compiled(params, sync.init(params), batch(rank, 0))
    torch.testing.assert_close(again, value)
    torch.testing.assert_close(compiled_grads, grads)
    torch.testing.assert_close(compiled_state.residual, state.residual)


def test_within_vmap_without_ranks():
    step = fnddp.value_and_grad(linear_loss, allreduce)
    params = {name: p.expand(3, *p.shape) for name, p in linear_params().items()}
    x = torch.stack([batch(0, i) for i in range(3)])
    values, grads, _ = torch.func.vmap(lambda p, x: step(p, (), x), out_dims=(0, 0, None))(params, x)
    for i in range(3):
        want = torch.func.grad(linear_loss)(linear_params(), x[i])
        torch.testing.assert_close({name: g[i] for name, g in grads.items()}, want)
    assert values.shape == (3,)


@on_ranks(2)
def test_aux_is_the_ranks_own(rank: int) -> None:
    def loss(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        out = x @ params["w"] + params["b"]
        return out.square().mean(), {"out": out, "rank": rank}

    step = fnddp.value_and_grad(loss, allreduce, has_aux=True)
    for i in range(2):
        (value, aux), grads, _ = step(linear_params(), (), batch(rank, i))
        assert aux["rank"] == rank
        assert not aux["out"].requires_grad
        assert torch.equal(value, aux["out"].square().mean())
        assert gather(bits(grads))[0] == bits(grads)


@on_ranks(2)
def test_what_no_sync_has_accumulated_is_synchronized_though_unused_then(rank: int) -> None:
    torch.manual_seed(0)
    model = fnddp.DistributedDataParallel(nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)}))
    model.module.forward = lambda name, x: model.module[name](x)
    x = torch.full((1, 3), float(rank + 1))
    with model.no_sync():
        model("a", x).sum().backward()
    model("b", x).sum().backward()
    for layer in ("a", "b"):
        assert model.module[layer].weight.grad.tolist() == [[1.5, 1.5, 1.5]]


def test_autocast_does_not_reach_the_pipeline():
    sync = fnddp.parse("error_feedback(powersgd(allreduce, rank=2))")
    grads = {"w": torch.randn(24, 16, generator=torch.Generator().manual_seed(0))}
    step = fnddp.jit(sync)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean, state = step(grads, sync.init(grads))
        want, want_state = sync(grads, sync.init(grads))
    assert bits((mean, state)) == bits((want, want_state))


class Backwards(nn.Module):
    """Makes gradients in another order than DDP expects: that of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.unused = (nn.Linear(4, 4, bias=False) for _ in range(3))
        for parameter in self.parameters():
            nn.init.eye_(parameter)
        self.uses = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.first(x))
        return self.unused(y) if self.uses else y


@pytest.mark.parametrize("given", [True, False])
@on_ranks(2)
def test_one_rank_may_load_with_assign(rank: int, given: bool) -> None:
    group = dist.new_group(timeout=timedelta(seconds=20))
    options: Any = {"bucket_cap_mb": 1e-5, "process_group": group, "skip_all_reduce_unused_params": True}
    models = [fnddp.DistributedDataParallel(Backwards(), **options) for _ in range(2)]

    def step() -> None:
        outs = []
        for scale, model in enumerate(models, 1):
            model.zero_grad()
            outs.append(model(scale * (rank + 1) * torch.tensor([[1.0, 2.0, 3.0, 4.0]])).sum())
        with ExitStack() as blocks:
            for model in models:
                blocks.enter_context(model.weight(1) if given else nullcontext())
            sum(outs).backward()
        for scale, model in enumerate(models, 1):
            for layer in (model.module.first, model.module.last):
                assert layer.weight.grad[0].tolist() == [1.5 * scale, 3 * scale, 4.5 * scale, 6 * scale]

    step()
    step()
    if rank == 0:
        models[0].load_state_dict(models[0].state_dict(), assign=True)
    step()
    step()
    models[0].module.uses = True
    with pytest.raises(RuntimeError, match="one parameter is unused in first iteration, but then got used"):
        step()
