"""`register` on torch's DDP: the numbers of the pipeline, whatever DDP's options and buckets."""

import gc
import re
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fnddp
from fnddp import RankMismatchError, StepFailedError, allreduce, error_feedback, fp16
from fnddp.laws import bits
from fnddp.simulate.ranks import run_threads
from tests.ranks import on_ranks

COMPRESSED = "error_feedback(powersgd(fp16(allreduce), rank=2))"


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class Branches(nn.Module):
    """`used` takes part on all ranks, `sometimes` on rank 0 only, `never` on none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.sometimes, self.never = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.used(x) + (self.sometimes(x) if rank == 0 else 0)


OPTIONS = [
    {},
    {"bucket_cap_mb": 0.01},  # several buckets, rebuilt after the first step
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01},
    {"find_unused_parameters": True},
    {"static_graph": True, "bucket_cap_mb": 0.01},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_ranks(2)
def test_same_numbers_as_the_pipeline(rank: int, options: dict[str, Any]) -> None:
    sync, plain = fnddp.parse(COMPRESSED), make_model()
    model = DistributedDataParallel(make_model(), **options)
    handle, state = fnddp.register(model, sync), sync.init(dict(plain.named_parameters()))
    for step in range(4):
        for net in (model, plain):
            net.zero_grad()
            if "static_graph" not in options:  # with which no_sync fails in the first step
                with model.no_sync():
                    loss_of(net(batch(rank, 10 + step))).backward()
            loss = loss_of(net(batch(rank, step)))
            if not options:  # several forwards
                loss = loss + loss_of(net(batch(rank, 20 + step)))
            loss.backward()
        mean, state = sync({name: p.grad for name, p in plain.named_parameters()}, state)
        assert bits({name: p.grad for name, p in model.module.named_parameters()}) == bits(mean)
        assert bits(handle.state) == bits(state)


@on_ranks(2)
def test_frozen_shared_and_sparse_parameters(rank: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.EmbeddingBag(10, 16, sparse=True)
            self.frozen = nn.Linear(16, 16).requires_grad_(False)
            self.first = nn.Linear(16, 16)
            self.second = self.first  # shared

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(self.frozen(self.embedding(index))))

    index = torch.tensor([[rank, 3], [3, 9]])
    model = DistributedDataParallel(Model())
    handle = fnddp.register(model, error_feedback(fp16(allreduce)))
    model(index).square().sum().backward()
    assert set(handle.state.residual) == {"embedding.weight", "first.weight", "first.bias"}
    want = torch.zeros(10, 16)
    for r in range(dist.get_world_size()):
        plain = Model()
        plain(torch.tensor([[r, 3], [3, 9]])).square().sum().backward()
        want += plain.embedding.weight.grad.to_dense() / dist.get_world_size()
    got = model.module.embedding.weight.grad
    assert got.is_sparse
    torch.testing.assert_close(got.to_dense(), want, rtol=2e-3, atol=1e-3)  # fp16 wire


@pytest.mark.parametrize("when", ["before DDP", "before register"])
@on_ranks(2)
def test_parameters_that_were_frozen_at_set_up_are_not_silently_left_out(rank: int, when: str) -> None:
    model = make_model()
    model[2].weight.requires_grad_(when != "before DDP")
    ddp = DistributedDataParallel(model)
    model[2].weight.requires_grad_(when == "before DDP")
    fnddp.register(ddp, allreduce)
    model[2].weight.requires_grad_(True)
    frozen_before = {"before DDP": "DistributedDataParallel", "before register": "register"}[when]
    with pytest.raises(ValueError, match=f"parameter '2.weight' was frozen when {frozen_before} was called"):
        loss_of(ddp(batch(rank, 0))).backward()


class Trouble(Exception):
    pass


class Hooked(nn.Module):
    """Calls `fn` in its backward, when the buckets of its last layers are on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, x: torch.Tensor, fn: Any = None) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if fn is not None and i == 1:
                x.register_hook(fn)
        return x


@on_ranks(2)
def test_a_backward_that_breaks_off_fails_the_step_on_all(rank: int) -> None:
    def fail(_: torch.Tensor) -> None:
        raise Trouble("in my backward")

    group = dist.new_group([0, 1], timeout=timedelta(seconds=8))
    model = DistributedDataParallel(Hooked(), bucket_cap_mb=0.01, process_group=group)
    handle = fnddp.register(model, fnddp.parse(COMPRESSED))
    loss_of(model(batch(rank, 0))).backward()
    before, own = bits(handle.state), [p.grad.clone() for p in model.parameters()]
    plain = Hooked()
    loss_of(plain(batch(rank, 1))).backward()
    if rank == 1:
        with pytest.raises(Trouble, match="in my backward"):
            loss_of(model(batch(rank, 1), fail)).backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
            model(batch(rank, 2))  # DDP's own word
    else:
        with pytest.raises(StepFailedError, match="rank 1 failed with .*its backward did not finish"):
            loss_of(model(batch(rank, 1))).backward()
        own = [was + p.grad for was, p in zip(own, plain.parameters(), strict=True)]
        assert bits([p.grad for p in model.parameters()]) == bits(own)
    assert bits(handle.state) == before


@on_ranks(2)
def test_a_forward_without_gradients_does_not_end_a_step(rank: int) -> None:
    models = [DistributedDataParallel(Hooked(), bucket_cap_mb=0.001) for _ in range(2)]
    handles = [fnddp.register(model, fnddp.parse(COMPRESSED)) for model in models]

    def run_again(_: torch.Tensor) -> None:
        with torch.no_grad():  # with gradients DDP allows none
            models[0](batch(rank, 9))

    for i in range(3):  # DDP has several buckets from the second step on
        for model, forward in zip(models, (run_again, None), strict=True):
            model.zero_grad()
            loss_of(model(batch(rank, i), forward)).backward()
        one, other = ([p.grad for p in model.parameters()] for model in models)
        assert bits(one) == bits(other)
        assert bits(handles[0].state) == bits(handles[1].state)


@on_ranks(1)
def test_a_registered_model_can_be_freed(rank: int) -> None:
    model = DistributedDataParallel(make_model())
    fnddp.register(model, error_feedback(allreduce))
    loss_of(model(batch(rank, 0))).backward()
    alive = weakref.ref(model), weakref.ref(model.module)
    del model
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


@on_ranks(2)
def test_uneven_inputs_with_join(rank: int) -> None:
    model = DistributedDataParallel(make_model())
    handle = fnddp.register(model, fnddp.parse(COMPRESSED))
    with model.join():
        for step in range(2 + 3 * rank):  # rank 0 runs out first and shadows with zero gradients
            model.zero_grad()
            loss_of(model(batch(rank, step))).backward()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, bits(handle.state.inner.q))
    assert everyone[0] == everyone[1]


@on_ranks(2)
def test_bad_use(rank: int) -> None:
    with pytest.raises(TypeError, match=r"expected a torch.nn.parallel.DistributedDataParallel, got .*Sequential"):
        fnddp.register(make_model(), allreduce)
    model = DistributedDataParallel(make_model())
    handle = fnddp.register(model, error_feedback(allreduce))
    state = handle.state._replace(residual={name: r.sum() for name, r in handle.state.residual.items()})
    with pytest.raises(ValueError, match=r"has float32\[64, 16\] on cpu as 'residual.0.weight', got float32\[\]"):
        handle.state = state
    with pytest.raises(RuntimeError, match="DDP has one hook slot, and fnddp_hook is in it"):
        fnddp.register(model, allreduce)


def test_disagreement_at_set_up_raises_on_all_ranks():
    def body(rank: int) -> None:
        ddp = DistributedDataParallel(make_model())
        ddp.module[0].weight.requires_grad_(rank != 1)
        message = "leaf '0.weight': ranks 0, 2: float32[64, 16] on cpu; rank 1: leaf '0.bias'"
        with pytest.raises(RankMismatchError, match=re.escape(f"ranks disagree about {message}")):
            fnddp.register(ddp, fnddp.parse(COMPRESSED))

    run_threads(3, body)


@on_ranks(2)
def test_another_process_group_than_when_registered(rank: int) -> None:
    model = DistributedDataParallel(make_model())
    fnddp.register(model, fp16(allreduce))
    late = loss_of(model(batch(rank, 0)))
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    error = r"registered in the process group '.*' of 2 ranks, and now it runs in .* of 1 ranks.*register the pipeline"
    for run in (lambda: model(batch(rank, 1)), late.backward):
        with pytest.raises(RuntimeError, match=error):
            run()


@on_ranks(1)
def test_a_pipeline_that_runs_cannot_be_replaced_by_a_name(rank: int) -> None:
    handle = fnddp.register(DistributedDataParallel(nn.Linear(2, 1)), fnddp.allreduce)
    for runs in (handle, fnddp.jit(fnddp.allreduce)):
        with pytest.raises(AttributeError, match="sync"):
            runs.sync = fnddp.none
        assert runs.sync == fnddp.allreduce
