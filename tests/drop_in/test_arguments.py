"""The drop-in module takes torch's arguments, and they do what they do there."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

import fnddp
from fnddp import DistributedDataParallel as DDP
from fnddp import allreduce, fp16
from fnddp.laws import bits
from tests.drop_in.models import (
    SMALL,
    WITH_RESIDUAL,
    Parts,
    assert_equal_on_ranks,
    assert_same_grads,
    average,
    descend,
    grads_of,
    normed,
    step,
    steps_alike,
    total,
)
from tests.ranks import on_ranks
from tests.test_register import COMPRESSED, Branches, batch, make_model


@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.thorough)])
def test_over_one_dimension_of_a_mesh(gloo, shape):
    gloo(math.prod(shape), check_mesh, shape)


def check_mesh(rank: int, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[: len(shape)])["replicate"]
    ours, theirs = DDP(make_model(), device_mesh=mesh), TorchDDP(make_model(), device_mesh=mesh)
    for model in (ours, theirs):
        step(model, batch(rank, 0))
    assert_same_grads(ours, theirs)
    assert ours.device_mesh == mesh
    assert ours.process_group is mesh.get_group()


@on_ranks(1)
def test_arguments_that_torch_refuses_are_refused_alike(rank: int) -> None:
    module = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (1,))
    cases: list[tuple[nn.Module, dict[str, Any]]] = [
        (module, {"device_ids": [0, 1]}),
        (module, {"device_ids": [0]}),
        (module, {"output_device": 1}),
        (module, {"process_group": dist.group.WORLD, "device_mesh": mesh}),
        (module, {"device_mesh": init_device_mesh("cpu", (1, 1))}),
        (module, {"delay_all_reduce_named_params": [("weight", module.weight)]}),
        (module, {"param_to_hook_all_reduce": module.weight}),
        (nn.Linear(4, 4).requires_grad_(False), {}),
        (nn.LazyLinear(4), {}),
        (nn.SyncBatchNorm.convert_sync_batchnorm(normed()), {}),
    ]
    for module, arguments in cases:
        with pytest.raises((ValueError, RuntimeError)) as theirs:
            TorchDDP(module, **arguments)
        with pytest.raises((ValueError, RuntimeError)) as ours:
            DDP(module, **arguments)
        assert ours.type is theirs.type, arguments


@pytest.mark.parametrize(
    ("options", "caps"),
    [
        ({"bucket_cap_mb": 0.001}, [0.001]),
        ({"bucket_cap_mb_list": [0.0001, 0.01, 0.002]}, [0.0001, 0.01, 0.002]),
        ({"bucket_cap_mb_list": [0.002], "bucket_cap_mb": 9}, [0.002]),
    ],
    ids=str,
)
@on_ranks(2)
def test_buckets_are_filled_as_torch_fills_them(rank: int, options: dict[str, Any], caps: list[float]) -> None:
    model = DDP(make_model(), **options)
    for i in range(3):
        step(model, batch(rank, i))
    buckets, params = model.plan.buckets, dict(model.module.named_parameters())
    order, names = list(buckets), list(params)
    want, _ = dist._compute_bucket_assignment_by_size([params[n] for n in order], [int(cap * 2**20) for cap in caps])
    assert [[n for n in order if buckets[n] == i] for i in range(len(want))] == [[order[i] for i in b] for b in want]
    assert len({collective.bucket for collective in model.plan.collectives}) == len(want) > 1
    logged = model._get_ddp_logging_data()
    indices = [[names.index(order[i]) for i in bucket] for bucket in want]
    sizes = [sum(params[order[i]].nbytes for i in bucket) for bucket in want]
    assert logged["prev_iteration_grad_ready_order_indices"] == ", ".join(str(i) for each in indices for i in each)
    assert logged["rebuilt_per_bucket_param_indices"] == ", ".join(" ".join(map(str, each)) for each in indices)
    assert logged["rebuilt_bucket_sizes"] == ", ".join(map(str, sizes))
    assert (logged["has_rebuilt_buckets"], logged["num_buckets_reduced"]) == (1, len(want))


def test_sizes_of_buckets_are_positive():
    for options in ({"bucket_cap_mb": 0}, {"bucket_cap_mb_list": [1, -1]}):
        with pytest.raises(ValueError, match="positive size in MiB"):
            DDP(nn.Linear(2, 2), **options)


@on_ranks(2)
def test_parameters_to_delay_are_synchronized(rank: int) -> None:
    module = make_model()
    delayed = [(name, p) for name, p in module.named_parameters() if name.startswith("0.")]
    ours = DDP(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module[2].weight)
    theirs = TorchDDP(make_model())  # torch's own delayed reduction is not waited for
    steps_alike(rank, ours, theirs)


@pytest.mark.parametrize(("first", "then"), [("ab", "a"), ("ab", "abc"), ("abc", "c")])
@on_ranks(2)
def test_a_broken_promise_of_a_static_graph_fails_on_all_ranks_without_a_trace(
    rank: int, first: str, then: str
) -> None:
    model = DDP(Parts(), static_graph=True, sync=fnddp.parse(WITH_RESIDUAL), **SMALL)
    straight = DDP(Parts(), sync=fnddp.parse(WITH_RESIDUAL), **SMALL)
    steps_alike(rank, model, straight, at=range(2), use=[first])
    before = bits(model.sync_state)
    params = bits(list(model.parameters()))
    model.zero_grad()
    with pytest.raises(RuntimeError, match="not compatible with static_graph"):
        total(model(batch(rank, 2), then)).backward()
    assert "not compatible with static_graph" in model._get_ddp_logging_data()["error"]
    assert grads_of(model) == [None] * 6
    assert (bits(model.sync_state), bits(list(model.parameters()))) == (before, params)
    steps_alike(rank, model, straight, at=[3], use=[first])
    assert bits(model.sync_state) == bits(straight.sync_state)


@on_ranks(2)
def test_a_static_graph_may_differ_by_rank(rank: int) -> None:
    """The promise is about what no rank uses: so it is kept here."""
    ours, theirs = DDP(Branches(), static_graph=True), TorchDDP(Branches(), find_unused_parameters=True)
    steps_alike(rank, ours, theirs, use=[rank])
    assert ours.reducer._ddp_graph_static()


@pytest.mark.parametrize("text", ["allreduce", WITH_RESIDUAL])
@on_ranks(2)
def test_what_is_skipped_is_not_sent_and_must_stay_unused(rank: int, text: str) -> None:
    sync = fnddp.parse(text)
    model, plain = DDP(Parts(), skip_all_reduce_unused_params=True, sync=sync), DDP(Parts(), sync=sync)
    sent: list[int] = []
    for i in range(3):
        for each in (model, plain):
            step(each, batch(rank, i), "ab" if rank == 0 else "a")
        assert_same_grads(model, plain)
        sent.append(model.plan.wire_bytes)
    assert sent[0] == plain.plan.wire_bytes > sent[1] == sent[2]
    before = bits(model.sync_state)
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"(?s)skip_all_reduce_unused_params.*c\.weight"):
        total(model(batch(rank, 3), "abc" if rank == 1 else "ab")).backward()
    assert grads_of(model) == [None] * 6
    assert bits(model.sync_state) == before
    for each in (model, plain):
        step(each, batch(rank, 4), "ab")
    assert_same_grads(model, plain)


@pytest.mark.parametrize(
    ("options", "text", "wire"),
    [
        ({}, "allreduce", torch.bfloat16),
        ({"reduce_dtype": torch.float32}, "allreduce", torch.float32),
        ({}, COMPRESSED, torch.float16),
    ],
    ids=str,
)
@on_ranks(2)
def test_mixed_precision_trains(rank: int, options: dict[str, Any], text: str, wire: torch.dtype) -> None:
    mixed = _MixedPrecision(param_dtype=torch.bfloat16, **options)
    given = fnddp.parse(text)
    model, plain = DDP(make_model(), mixed_precision=mixed, sync=given, **SMALL), make_model()
    sync = fnddp.cast(allreduce, wire) if text == "allreduce" else given
    state = sync.init(dict(plain.named_parameters()))
    losses = []
    for _ in range(4):
        plain.zero_grad()
        rounded = {n: p.bfloat16() for n, p in plain.named_parameters()}
        total(torch.func.functional_call(plain, rounded, (batch(rank, 0).bfloat16(),))).backward()
        state = average(sync, plain.named_parameters(), state)
        model.zero_grad()
        output = model(batch(rank, 0))
        assert output.dtype == torch.bfloat16
        loss = total(output)
        loss.backward()
        losses.append(loss.item())
        assert {g.dtype for g in grads_of(model)} == {torch.float32}
        assert_same_grads(model, plain)
        for each in (model, plain):
            descend(each, 0.5)
    assert_equal_on_ranks(list(model.parameters()))
    assert losses[-1] < losses[0]
    assert {collective.dtype for collective in model.plan.collectives} == {wire}


def test_mixed_precision_casts_buffers_and_may_not_contradict_the_pipeline():
    dtypes = dict.fromkeys(["param_dtype", "buffer_dtype", "reduce_dtype"], torch.bfloat16)
    mixed = _MixedPrecision(**dtypes)
    with pytest.raises(ValueError, match=r"reduce_dtype=torch.bfloat16, but the pipeline fp16\(allreduce\) says"):
        DDP(make_model(), sync=fp16(allreduce), mixed_precision=mixed)
    model = DDP(normed(), mixed_precision=mixed)
    assert model.module[1].running_mean.dtype == torch.bfloat16
    before = model.sync
    with pytest.raises(ValueError, match="says itself what travels"):
        model.sync = fp16(allreduce)
    assert model.sync == before
    step(model, batch(0, 0))
    assert {g.dtype for g in grads_of(model)} == {torch.float32}
