"""Models that torch's class takes, alone and several together."""

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import fnddp
from fnddp import DistributedDataParallel as DDP
from fnddp import allreduce
from fnddp.laws import bits
from tests.drop_in.models import (
    SMALL,
    WITH_RESIDUAL,
    Mixed,
    assert_equal_on_ranks,
    assert_same_grads,
    average,
    by_hand,
    descend,
    grads_of,
    step,
    steps_alike,
    steps_by_hand,
    total,
)
from tests.ranks import on_ranks
from tests.test_register import COMPRESSED, batch, make_model


class Odd(nn.Module):
    """A scalar, no elements, a shared layer, and strides that are not those of a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 8))
        self.conv = nn.Conv2d(4, 16, 2).to(memory_format=torch.channels_last)
        self.first = self.second = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.first.weight
        self.transposed = nn.Parameter(torch.randn(5, 16).t())
        self.wide = nn.Parameter(torch.randn(5, 2, 5).transpose(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.reshape(8, 4, 2, 2).contiguous(memory_format=torch.channels_last)).reshape(8, 16)
        x = self.scale * self.tied(self.second(self.first(x))) + self.empty.sum()
        return (x @ self.transposed) @ self.wide.sum(0)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(16, 8, dtype=torch.complex64))
        self.second = nn.Linear(8, 4, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        return self.second((x.to(torch.complex64) @ self.first).to(torch.complex128))


class Sparse(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.embedding = nn.EmbeddingBag(10, 8, sparse=sparse), nn.Embedding(10, 8, sparse=sparse)
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        index = (x[:, :2] * 3).long() % 10
        return self.linear(self.bag(index) + self.embedding(index).sum(1))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            block = nn.Sequential(layer, nn.Tanh())
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Twice(Checkpointed):
    """Each layer is checkpointed several times, and another one is not used at all."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__(reentrant)
        self.unused, *layers = self.layers
        self.layers = nn.ModuleList(layers * 2)


MODELS: dict[str, Callable[[], nn.Module]] = {"mixed dtypes": Mixed, "odd": Odd, "complex": Complex, "sparse": Sparse}


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_models_that_torch_takes(rank: int, name: str) -> None:
    # Theirs of a dense embedding: torch's sum of sparse tensors over gloo has once corrupted the heap in CI.
    model = Sparse(sparse=False) if name == "sparse" else MODELS[name]()
    ours, theirs = DDP(MODELS[name](), **SMALL), TorchDDP(model, **SMALL)
    steps_alike(rank, ours, theirs, at=range(4))
    assert name != "sparse" or all(p.grad.is_sparse for p in (ours.module.bag.weight, ours.module.embedding.weight))
    for model in (ours, theirs):  # gradients add up
        with model.no_sync():
            step(model, batch(rank, 8), descends=False)
        total(model(batch(rank, 9))).backward()
    assert_same_grads(ours, theirs)


@pytest.mark.parametrize("text", [WITH_RESIDUAL, COMPRESSED])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "complex"])
@on_ranks(2)
def test_models_with_any_pipeline(rank: int, name: str, text: str) -> None:
    steps_by_hand(rank, DDP(MODELS[name](), sync=fnddp.parse(text), **SMALL), MODELS[name](), range(4))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", [Checkpointed, Twice])
@on_ranks(2)
def test_activation_checkpointing(rank: int, make: Callable[[bool | None], nn.Module], reentrant: bool) -> None:
    sync = fnddp.parse(COMPRESSED)
    options = {**SMALL, "static_graph": make is Twice}  # for which torch asks there
    inside, straight = (DDP(make(r), sync=sync, **options) for r in (reentrant, None))
    around = DDP(make(None), sync=sync, **options)
    for i in range(3):
        step(straight, batch(rank, i))
        step(inside, batch(rank, i))
        assert_same_grads(inside, straight)
        around.zero_grad()
        x = batch(rank, i).requires_grad_()
        total(checkpoint(around, x, use_reentrant=reentrant)).backward()
        descend(around)
        assert_same_grads(around, straight)
        for model in (inside, around):
            assert bits(model.sync_state) == bits(straight.sync_state)
    with straight.no_sync(), inside.no_sync():
        step(straight, batch(rank, 8))
        step(inside, batch(rank, 8))
    assert_same_grads(inside, straight)


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["around", "inside"])
@on_ranks(2)
def test_compile(rank: int, where: str) -> None:
    torch._dynamo.reset()
    compiled = partial(torch.compile, backend="aot_eager")
    for sync in (allreduce, fnddp.parse(COMPRESSED)):
        model = DDP(compiled(make_model()) if where == "inside" else make_model(), sync=sync)
        called = model if where == "inside" else compiled(model)
        plain = compiled(make_model()) if where == "inside" else make_model()  # parameters are named alike
        state = sync.init(dict(plain.named_parameters()))
        for i in range(4):
            state = by_hand(sync, plain, state, batch(rank, i))
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # of what Dynamo cannot trace
                step(called, batch(rank, i), descends=False)
            assert_same_grads(model, plain)
        with model.no_sync():
            step(called, batch(rank, 9))
            step(plain, batch(rank, 9))
        assert bits(grads_of(model)) == bits(grads_of(plain))


@on_ranks(2)
def test_several_forwards_before_a_backward(rank: int) -> None:
    ours, theirs = DDP(make_model(), **SMALL), TorchDDP(make_model(), **SMALL)
    for i in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            outputs = [model(batch(rank, 10 * i + k)) for k in range(3)]
            sum(total(output) for output in outputs).backward()
        assert_same_grads(ours, theirs)
        outputs = [total(ours(batch(rank, k))) for k in range(2)]  # and one step for each
        ours.zero_grad()
        for output in outputs:
            output.backward()
        assert_equal_on_ranks(grads_of(ours))


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.inner, self.last = nn.Linear(16, 16), inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)).tanh())


@pytest.mark.parametrize("texts", [("bf16(allreduce)", WITH_RESIDUAL), ("allreduce", COMPRESSED)])
@on_ranks(2, seconds=40)
def test_a_wrapped_module_inside_another(rank: int, texts: tuple[str, str]) -> None:
    outer, inner = map(fnddp.parse, texts)
    model = DDP(Outer(DDP(make_model(), sync=inner, **SMALL)), sync=outer)
    plain = Outer(make_model())
    state = model.module.inner.sync_state
    for i in range(4):
        step(model, batch(rank, i))
        plain.zero_grad()
        total(plain(batch(rank, i))).backward()
        average(outer, [(n, p) for n, p in plain.named_parameters() if not n.startswith("inner.")], ())
        state = average(inner, plain.inner.named_parameters(), state)
        descend(plain)
        assert_same_grads(model, plain)
    assert bits(model.module.inner.sync_state) == bits(state)
