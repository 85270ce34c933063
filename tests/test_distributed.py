"""Lightning's old `utilities.distributed`: the numbers of a single process, on any group, and errors on all ranks."""

import functools
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

import fnddp
from fnddp import RankMismatchError, WireCounter, allreduce, error_feedback, fp16
from fnddp.distributed import (
    AllGatherGrad,
    all_gather_ddp_if_available,
    gather_all_tensors,
    init_dist_connection,
    register_ddp_comm_hook,
    sync_ddp,
    sync_ddp_if_available,
)
from fnddp.simulation.ranks import run_threads
from tests.ranks import on_ranks

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]

EVEN = [(3, 2), (), (0, 2)]


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """What `rank` holds: every rank can make every other's."""
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        numbers = torch.randn(shape, generator=generator, dtype=torch.complex128)
        return (numbers if dtype.is_complex else numbers.real).to(dtype)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def assert_same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def my_pair(rank: int) -> tuple[dist.ProcessGroup, list[int]]:
    """Ranks 0 and 2, or 1 and 3: the rank in the group is not that in the world."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return groups[rank % 2], [rank % 2, rank % 2 + 2]


def kinds(rank: int) -> list[Tensor]:
    """Tensors of all dtypes, shapes and layouts."""
    x = tensor_of(rank, (2, 3, 4, 4))
    return [
        *(tensor_of(rank, shape, dtype) for shape, dtype in product([(3, 2), (rank + 1, 2)], DTYPES)),
        *(tensor_of(rank, shape) for shape in ((), (0, 2), (4 - rank, 1 + rank, 2), (rank, 3), (0, rank))),
        x.mT if rank else x.clone(),  # one rank's strides are not another's
        x[:, ::2],
        x[0, 0, 0, 0].expand(3, 2),
        torch.complex(x, -x).conj(),
        torch.complex(x, -x).conj().imag,  # with the negative bit
    ]


def each_kind(rank: int) -> Iterator[tuple[Tensor, dist.ProcessGroup | None, list[Tensor]]]:
    """This rank's tensor of a kind, a group, and the tensors of its ranks. None of them may be written to."""
    everyone = [kinds(member) for member in range(4)]
    for (group, members), (i, mine) in product(((None, [0, 1, 2, 3]), my_pair(rank)), enumerate(kinds(rank))):
        yield mine, group, [everyone[member][i] for member in members]
        assert_same(mine, everyone[rank][i])


# Gathering


def check_gather(rank: int) -> None:
    for mine, group, everyone in each_kind(rank):
        gathered = gather_all_tensors(mine, group)
        for got, want in zip(gathered, everyone, strict=True):
            assert_same(got, want)
            assert got.is_contiguous()
            assert got.untyped_storage().nbytes() == got.numel() * got.element_size()  # nothing else is kept
            assert got.numel() == 0 or got.data_ptr() != mine.data_ptr()
        if len({each.shape for each in everyone}) == 1:
            stacked = all_gather_ddp_if_available(mine, group)
            assert_same(stacked, torch.stack(gathered))
            assert_same(AllGatherGrad.apply(mine, group), stacked)
            assert stacked.numel() == 0 or stacked.data_ptr() != mine.data_ptr()
    gathered = gather_all_tensors(torch.full((rank + 1,), 2.0).to(torch.float8_e4m3fn))  # which gloo does not know
    assert [g.dtype for g in gathered] == [torch.float8_e4m3fn] * 4
    assert [g.float().tolist() for g in gathered] == [[2.0] * n for n in (1, 2, 3, 4)]


# Gradients


def loss_on(rank: int, stacked: Tensor) -> Tensor:
    weights = torch.arange(1, 1 + stacked.numel(), dtype=torch.float64).reshape(stacked.shape)
    return ((rank + 1) * weights * stacked.abs() ** 3).sum() / 10 + stacked.abs().sum() ** 2


def penalty_on(rank: int, grad: Tensor) -> Tensor:
    return (rank + 2) * (grad.abs() ** 2).sum()


def reference(members: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """First gradients, and those of the penalty on them, by member: in one process, of the sum of all losses."""
    tensors = [tensor_of(member, shape, dtype).requires_grad_() for member in members]
    total = sum(loss_on(member, torch.stack(tensors)) for member in members)
    firsts = torch.autograd.grad(total, tensors, create_graph=True)
    penalty = sum(penalty_on(member, first) for member, first in zip(members, firsts, strict=True))
    return list(firsts), list(torch.autograd.grad(penalty, tensors))


def check_gradients(rank: int) -> None:
    groups = [(None, [0, 1, 2, 3]), my_pair(rank)]
    for dtype, shape, (group, members) in product((torch.float64, torch.complex128), EVEN, groups):
        firsts, seconds = reference(members, shape, dtype)
        mine = tensor_of(rank, shape, dtype).requires_grad_()
        loss = loss_on(rank, all_gather_ddp_if_available(mine, group, sync_grads=True))
        (first,) = torch.autograd.grad(loss, mine, create_graph=True)
        torch.testing.assert_close(first, firsts[members.index(rank)])
        (second,) = torch.autograd.grad(penalty_on(rank, first), mine)
        torch.testing.assert_close(second, seconds[members.index(rank)])


def check_gradient_forms(rank: int) -> None:
    n = dist.get_world_size()
    mine = tensor_of(rank, (3, 2)).mT.requires_grad_()
    loss = AllGatherGrad.apply(mine).sum()
    with WireCounter() as counter:
        loss.backward()  # a gradient without strides
    assert (counter.wire_bytes, counter.collectives) == (n * mine.nbytes, 1)
    assert_same(mine.grad, torch.full((2, 3), float(n), dtype=torch.float64))

    assert not all_gather_ddp_if_available(mine).requires_grad
    assert not any(gathered.requires_grad for gathered in gather_all_tensors(mine))
    assert not sync_ddp(mine).requires_grad
    with torch.no_grad():
        assert not all_gather_ddp_if_available(mine, sync_grads=True).requires_grad


def check_within_torch_func(rank: int) -> None:
    shape = (3,)
    members = list(range(dist.get_world_size()))
    mine = tensor_of(rank, shape)

    def loss(x: Tensor) -> Tensor:
        return loss_on(rank, AllGatherGrad.apply(x))

    def total(*tensors: Tensor) -> Tensor:
        stacked = torch.stack(tensors)
        return sum(loss_on(member, stacked) for member in members)

    first = torch.func.grad(loss)
    firsts, seconds = reference(members, shape, torch.float64)
    torch.testing.assert_close(first(mine), firsts[rank])
    second = torch.func.grad(lambda x: penalty_on(rank, first(x)))(mine)
    torch.testing.assert_close(second, seconds[rank])
    assert torch.func.grad(lambda x: (x * all_gather_ddp_if_available(x)).sum())(mine).shape == shape  # as a constant

    # Batched: each example on its own.
    everyone = torch.stack([tensor_of(member, shape) for member in members])
    stacked = torch.stack([everyone, 2 * everyone, -everyone])
    batch = stacked[:, rank]
    assert_same(torch.func.vmap(AllGatherGrad.apply)(batch), stacked)
    want = torch.stack([torch.func.grad(total, argnums=rank)(*example) for example in stacked])
    torch.testing.assert_close(torch.func.vmap(first)(batch), want)
    torch.testing.assert_close(torch.func.vmap(first, in_dims=1)(batch.mT), want)

    # Forward: all ranks' tangents at once.
    tangents = tuple(tensor_of(10 + member, shape) for member in members)
    for ours, theirs in (
        (loss, lambda *tensors: loss_on(rank, torch.stack(tensors))),
        (first, torch.func.grad(total, argnums=rank)),
    ):
        want = torch.func.jvp(theirs, tuple(everyone), tangents)
        torch.testing.assert_close(torch.func.jvp(ours, (mine,), (tangents[rank],)), want)


# Reducing


def reduce_exactly(tensors: list[Tensor], op: str) -> Tensor:
    dtype, n = tensors[0].dtype, len(tensors)
    fractions = dtype.is_floating_point or dtype.is_complex
    wide = torch.promote_types(dtype, torch.float64) if fractions else torch.int64
    stack = torch.stack([tensor.to(wide) for tensor in tensors])
    if op == "mean" and not fractions:
        return ((2 * stack.sum(0) + n) // (2 * n)).to(dtype)  # to the nearest, halves up
    return getattr(torch, {"max": "amax", "min": "amin", "product": "prod"}.get(op, op))(stack, 0).to(dtype)


SPELLINGS = {
    "sum": [None, "SUM", dist.ReduceOp.SUM, dist.ReduceOp(dist.ReduceOp.SUM)],
    "mean": ["AVG", "Mean", "avg", dist.ReduceOp.AVG],
    "max": ["Max", dist.ReduceOp.MAX],
    "min": ["MIN", dist.ReduceOp.MIN],
    "product": ["PRODUCT", dist.ReduceOp.PRODUCT],
}

# Sums of four terms and a division: a few roundings.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float32: 1e-6, torch.complex64: 1e-6}


def check_reduce(rank: int) -> None:
    for mine, group, everyone in each_kind(rank):
        for op in SPELLINGS if len({each.shape for each in everyone}) == 1 else ():
            if not (mine.is_complex() and op in ("max", "min")):
                tolerance = TOLERANCE.get(mine.dtype, 1e-12 if mine.is_floating_point() or mine.is_complex() else 0)
                want = reduce_exactly(everyone, op)
                torch.testing.assert_close(sync_ddp(mine, group, op), want, rtol=tolerance, atol=4 * tolerance)
    for op, spelling in [(op, spelling) for op, spellings in SPELLINGS.items() for spelling in spellings]:
        assert_same(sync_ddp_if_available(mine, None, spelling), sync_ddp(mine, None, op))


def check_integer_means(rank: int) -> None:
    def mean(*values: int, dtype: torch.dtype = torch.int32) -> int:
        return sync_ddp(torch.tensor(values[rank], dtype=dtype), reduce_op="mean").item()

    assert mean(1, 1, 3) == 2  # 5/3, which truncation makes 1
    assert mean(-1, -1, -3) == -2
    assert mean(0, 0, 1) == 0
    assert mean(2**31 - 1, 2**31 - 1, 2**31 - 1) == 2**31 - 1  # the sum does not fit
    assert mean(200, 200, 199, dtype=torch.uint8) == 200
    assert mean(True, True, False, dtype=torch.bool) is True
    large = torch.tensor(60000.0, dtype=torch.float16)
    assert sync_ddp(large, reduce_op="mean").item() == pytest.approx(60000, rel=2e-3)  # nor does this one


# Errors


def check_mismatch(rank: int) -> None:
    is_odd = rank == 2
    plain, double = torch.ones(2), torch.ones(2, dtype=torch.float64 if is_odd else torch.float32)
    stack, gather = all_gather_ddp_if_available, AllGatherGrad.apply
    shapes = r"the tensor to gather: rank 0: float32\[1, 2\]; rank 1: float32\[2, 2\]; rank 2: float32\[3, 2\]$"
    mismatches: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        ("dtype: ranks 0, 1: torch.float32; rank 2: torch.float64", gather_all_tensors, (double,)),
        ("the number of dimensions: ranks 0, 1: 1; rank 2: 2", gather_all_tensors, (torch.ones([2] * (1 + is_odd)),)),
        *((shapes, each, (torch.ones(rank + 1, 2),)) for each in (stack, gather)),
        *((r"ranks 0, 1: float32\[2\]; rank 2: float64\[2\]", each, (double,)) for each in (stack, gather, sync_ddp)),
        ("reduce_op: ranks 0, 1: sum; rank 2: mean", sync_ddp, (plain, None, "mean" if is_odd else "sum")),
    ]
    for text, call, given in mismatches:
        with pytest.raises(RankMismatchError, match=f"^ranks disagree about .*{text}"):
            call(*given)
    bad = {
        r"expected a tensor, got a float; wrap it": 1.0,
        r"expected a dense tensor, got layout torch.sparse_coo; pass tensor.to_dense": plain.to_sparse(),
    }
    for call, (message, value) in product((gather_all_tensors, stack, gather, sync_ddp), bad.items()):
        kind, prefix = (TypeError, "") if rank == 1 else (RankMismatchError, "rank 1: .*failed with TypeError: ")
        with pytest.raises(kind, match=prefix + message):
            call(value if rank == 1 else plain)
        call(plain)  # nothing is left over


def check_refusals(rank: int) -> None:
    for op in ("median", dist.ReduceOp.BAND, "", 3):
        with pytest.raises(ValueError, match="must be one of avg, mean, sum, max, min, product, or None, got"):
            sync_ddp(torch.ones(2), reduce_op=op)
    with pytest.raises(ValueError, match=r"is torch.complex64, which has no max"):
        sync_ddp(torch.ones(2, dtype=torch.complex64), reduce_op="max")
    with pytest.raises(RuntimeError, match=r"cannot run inside torch.func.grad"):
        torch.func.grad(lambda x: sync_ddp(x).sum())(torch.ones(2))
    batched = [
        lambda x: gather_all_tensors(x)[0],
        sync_ddp,
        functools.partial(sync_ddp, reduce_op="product"),
        lambda x: allreduce({"w": x}, ())[0]["w"],
        torch.func.grad(lambda x: (x + gather_all_tensors(x)[0]).sum()),
    ]
    for call in batched:
        with pytest.raises(RuntimeError, match=r"a collective cannot run inside torch.func.vmap: call it on the whole"):
            torch.func.vmap(call)(torch.ones(2, 3))


CHECKS: dict[Callable[[int], None], int] = {
    check_gather: 4,
    check_mismatch: 3,
    check_gradients: 4,
    check_gradient_forms: 3,
    check_reduce: 4,
    check_integer_means: 3,
    check_refusals: 3,
}


@pytest.mark.parametrize("check", CHECKS)
def test_on_threads(check):
    run_threads(CHECKS[check], check)


@pytest.mark.thorough
@pytest.mark.parametrize("check", [*CHECKS, check_within_torch_func])  # whose levels all threads of a process share
def test_on_gloo(gloo, check):
    gloo(CHECKS.get(check, 3), check)


# Without a process group


def test_without_a_process_group():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    assert all_gather_ddp_if_available(x, sync_grads=True) is x
    assert sync_ddp_if_available(x, reduce_op="no such") is x
    assert gather_all_tensors(x)[0] is x
    for op in SPELLINGS:
        synced = sync_ddp(x, reduce_op=op)
        assert synced.tolist() == [1.0, 2.0]
        assert synced.data_ptr() != x.data_ptr()


# Connecting


def cluster(rank: int, size: int, port: int) -> SimpleNamespace:
    return SimpleNamespace(main_address="127.0.0.1", main_port=port, global_rank=lambda: rank, world_size=lambda: size)


def test_init_dist_connection(monkeypatch):
    """Its doctest connects."""
    given: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: given.append((backend, more)))
    monkeypatch.setenv("MASTER_ADDR", "before")
    monkeypatch.setenv("MASTER_PORT", "before")
    timeout = timedelta(seconds=30)
    init_dist_connection(cluster(3, 4, 5), "gloo", timeout=timeout)
    init_dist_connection(cluster(-1, -1, 6), "nccl", 1, 2)
    assert given == [
        ("gloo", {"rank": 3, "world_size": 4, "timeout": timeout}),
        ("nccl", {"rank": 1, "world_size": 2}),
    ]
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("127.0.0.1", "6")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    init_dist_connection(cluster(0, 0, 1), "gloo")
    assert os.environ["MASTER_PORT"] == "6"
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch.distributed is not available"):
        init_dist_connection(cluster(0, 0, 1), "gloo")


# Hooks


def doubling(state: Any, renamed: Any) -> torch.futures.Future[Tensor]:
    state.append("called")
    return allreduce_hook(None, renamed).then(lambda done: 2 * done.value())


class DoublingHook:
    __call__ = staticmethod(doubling)


def make_model() -> nn.Module:
    model, random = nn.Linear(4, 2), torch.Generator().manual_seed(0)  # of its own: ranks may be threads
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(-0.5, 0.5, generator=random)
    return model


def require_mean(model: nn.Module, rank: int, factor: float = 1) -> None:
    """Of two ranks, but for what float16 rounds."""
    plain = make_model()
    sum(plain(torch.full((1, 4), r + 1.0)).square().sum() / 2 for r in range(2)).backward()
    model(torch.full((1, 4), rank + 1.0)).square().sum().backward()
    torch.testing.assert_close(model.module.weight.grad, factor * plain.weight.grad, rtol=2e-3, atol=2e-3)


@pytest.mark.thorough
@on_ranks(2)
def test_hooks_on_torchs_class_off_cuda(rank: int) -> None:
    for hook, name in ((DoublingHook(), "DoublingHook"), (functools.partial(doubling), "doubling")):
        for wrapper in (None, fp16_compress_wrapper, functools.partial):
            model, calls = DistributedDataParallel(make_model()), []
            assert register_ddp_comm_hook(model, calls, hook, wrapper) is None
            require_mean(model, rank, factor=2)
            assert calls == ["called"]
            if wrapper is None:
                assert model._get_ddp_logging_data()["comm_hook"] == name

    model = DistributedDataParallel(make_model())
    register_ddp_comm_hook(model, ddp_comm_wrapper=fp16_compress_wrapper)
    assert model._comm_hooks == []


@pytest.mark.thorough
@on_ranks(2)
def test_pipelines_as_hooks(rank: int) -> None:
    model = DistributedDataParallel(make_model())
    handle = register_ddp_comm_hook(model, ddp_comm_hook=error_feedback(fp16(allreduce)))
    require_mean(model, rank)
    assert handle.sync == error_feedback(fp16(allreduce))
    assert set(handle.sync_state.residual) == {"weight", "bias"}

    model = DistributedDataParallel(make_model())
    for extra in ({"ddp_comm_state": 1}, {"ddp_comm_wrapper": fp16_compress_wrapper}):
        with pytest.raises(
            ValueError, match=r"allreduce is a pipeline, which takes neither ddp_comm_state nor ddp_comm_w"
        ):
            register_ddp_comm_hook(model, ddp_comm_hook=allreduce, **extra)
    model = fnddp.DistributedDataParallel(make_model())
    assert register_ddp_comm_hook(model, ddp_comm_hook=error_feedback(fp16(allreduce))) is None
    assert model.sync == error_feedback(fp16(allreduce))
    require_mean(model, rank)
