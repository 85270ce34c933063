"""Arguments of torch's class, and hooks of users, do what they do there."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

import fnddp
from fnddp import DistributedDataParallel as DDP
from fnddp import allreduce, fp16
from fnddp.laws import bits
from tests.models import (
    COMPRESSED,
    SMALL,
    WITH_RESIDUAL,
    Parts,
    assert_equal_on_ranks,
    assert_same_grads,
    average,
    batch,
    descend,
    grads_of,
    loss_of,
    make_model,
    normed,
    step,
    steps_alike,
)
from tests.ranks import on_ranks


@on_ranks(2, pytest.param(4, marks=pytest.mark.thorough))
def test_over_one_dimension_of_a_mesh(rank: int) -> None:
    shape = 2, dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))["replicate"]
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
    order = list(buckets)
    want, _ = dist._compute_bucket_assignment_by_size([params[n] for n in order], [int(cap * 2**20) for cap in caps])
    assert [[n for n in order if buckets[n] == i] for i in range(len(want))] == [[order[i] for i in b] for b in want]
    assert len({collective.bucket for collective in model.plan.collectives}) == len(want) > 1


def test_sizes_of_buckets_are_positive():
    for options in (
        {"bucket_cap_mb": 0},
        {"bucket_cap_mb": "25"},
        {"bucket_cap_mb": True},
        {"bucket_cap_mb_list": [1, -1]},
    ):
        with pytest.raises(
            ValueError, match="buckets must have a positive size in MiB|size of a bucket in MiB must be a finite number"
        ):
            DDP(nn.Linear(2, 2), **options)


@on_ranks(2)
def test_parameters_to_delay_are_synchronized(rank: int) -> None:
    module = make_model()
    delayed = [(name, p) for name, p in module.named_parameters() if name.startswith("0.")]
    ours = DDP(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module[2].weight)
    theirs = TorchDDP(make_model())  # torch's own delayed reduction is not waited for
    steps_alike(rank, ours, theirs)


@pytest.mark.parametrize(
    ("promise", "first", "then"),  # what each rank uses: the promises are about what no rank does
    [
        ("static_graph", ("ab", "ab"), ("a", "a")),
        ("static_graph", ("ab", "a"), ("ab", "abc")),
        ("static_graph", ("abc", "abc"), ("c", "c")),
        ("skip_all_reduce_unused_params", ("ab", "a"), ("ab", "abc")),
    ],
)
@on_ranks(2)
def test_a_broken_promise_fails_on_all_ranks_without_a_trace(
    rank: int, promise: str, first: tuple[str, str], then: tuple[str, str]
) -> None:
    model, straight = (DDP(Parts(), sync=WITH_RESIDUAL, **SMALL, **options) for options in ({promise: True}, {}))
    sent: list[int] = []
    for i in range(3):
        steps_alike(rank, model, straight, at=[i], use=[first[rank]])
        sent.append(model.plan.wire_bytes)
    assert sent[0] == straight.plan.wire_bytes
    assert (sent[1] < sent[0]) == (sent[2] < sent[0]) == (promise != "static_graph")  # what is skipped is not sent
    before = bits([model.sync_state, list(model.parameters())])
    model.zero_grad()
    with pytest.raises(RuntimeError, match=rf"(?s)not compatible with {promise} .*[bc]\.weight"):
        loss_of(model(batch(rank, 3), then[rank])).backward()
    assert grads_of(model) == [None] * 6
    assert bits([model.sync_state, list(model.parameters())]) == before
    steps_alike(rank, model, straight, at=[4], use=[first[rank]])
    assert bits(model.sync_state) == bits(straight.sync_state)


@on_ranks(2)
def test_parameters_that_a_first_step_used_may_be_unused_later(rank: int) -> None:
    skipping, straight = (DDP(Parts(), skip_all_reduce_unused_params=skips, **SMALL) for skips in (True, False))
    for use in ("ab", "a", "b", "ab"):
        steps_alike(rank, skipping, straight, use=[use])


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
def test_mixed_precision(rank: int, options: dict[str, Any], text: str, wire: torch.dtype) -> None:
    mixed = _MixedPrecision(param_dtype=torch.bfloat16, **options)
    given = fnddp.parse(text)
    model, plain = DDP(make_model(), mixed_precision=mixed, sync=given, **SMALL), make_model()
    sync = fnddp.cast(allreduce, wire) if text == "allreduce" else given
    state = sync.init(dict(plain.named_parameters()))
    for _ in range(4):
        plain.zero_grad()
        rounded = {n: p.bfloat16() for n, p in plain.named_parameters()}
        loss_of(torch.func.functional_call(plain, rounded, (batch(rank, 0).bfloat16(),))).backward()
        state = average(sync, plain.named_parameters(), state)
        model.zero_grad()
        output = model(batch(rank, 0))
        assert output.dtype == torch.bfloat16
        loss_of(output).backward()
        assert {g.dtype for g in grads_of(model)} == {torch.float32}
        assert_same_grads(model, plain)
        for each in (model, plain):
            descend(each, 0.5)
    assert_equal_on_ranks(list(model.parameters()))
    assert {collective.dtype for collective in model.plan.collectives} == {wire}


def test_mixed_precision_casts_buffers_and_may_not_contradict_the_pipeline():
    dtypes = dict.fromkeys(["param_dtype", "buffer_dtype", "reduce_dtype"], torch.bfloat16)
    mixed = _MixedPrecision(**dtypes)
    with pytest.raises(ValueError, match=r"reduce_dtype=torch.bfloat16, but the pipeline fp16\(allreduce\) decides"):
        DDP(make_model(), sync=fp16(allreduce), mixed_precision=mixed)
    model = DDP(normed(), mixed_precision=mixed)
    assert model.module[1].running_mean.dtype == torch.bfloat16
    before = model.sync
    with pytest.raises(ValueError, match="decides which dtype is sent"):
        model.sync = fp16(allreduce)
    assert model.sync == before
    step(model, batch(0, 0))
    assert {g.dtype for g in grads_of(model)} == {torch.float32}


def weighted_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    for grad, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        grad.mul_(2 if parameter.ndim == 2 else 4)
        assert grad.shape == parameter.shape
    return allreduce_hook(state, bucket)


HOOKS: dict[str, tuple[Any, Any]] = {
    "fp16": (fp16_compress_hook, fp16_compress_hook),
    "parameters": (weighted_hook, weighted_hook),
    "partial": (partial(allreduce_hook), allreduce_hook),
    "built in": (dist.BuiltinCommHookType.ALLREDUCE,) * 2,
    "built in fp16": (dist.BuiltinCommHookType.FP16_COMPRESS,) * 2,
}


@pytest.mark.parametrize("name", HOOKS)
@on_ranks(2)
def test_hooks_do_what_they_do_in_torch(rank: int, name: str) -> None:
    ours, theirs = DDP(make_model(), **SMALL), TorchDDP(make_model(), **SMALL)
    for model, hook in zip((ours, theirs), HOOKS[name], strict=True):
        if isinstance(hook, dist.BuiltinCommHookType):
            model._register_builtin_comm_hook(hook)
        else:
            model.register_comm_hook(None, hook)
            assert model is theirs or ours.sync == fnddp.from_hook(hook)
    steps_alike(rank, ours, theirs, at=range(4))


@on_ranks(2)
def test_errors_of_hooks(rank: int) -> None:
    for cls in (DDP, TorchDDP):
        model = cls(make_model())
        with pytest.raises(TypeError, match="hook must be callable"):
            model.register_comm_hook(None, 3)
        with pytest.raises((TypeError, AssertionError), match="hook"):
            model._register_buffer_comm_hook(None, 3)
        model.register_comm_hook(None, allreduce_hook)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                model.register_comm_hook(None, fp16_compress_hook)
        step(model, batch(rank, 0))  # the first one stays
        assert_equal_on_ranks(grads_of(model))
    piped = DDP(make_model(), sync=fp16(allreduce))
    with pytest.raises(RuntimeError, match=r"synchronized by fp16\(allreduce\), which the hook .*allreduce_hook would"):
        piped.register_comm_hook(None, allreduce_hook)
    with pytest.raises(RuntimeError, match=r"which the hook .*ALLREDUCE would replace"):
        piped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    step(piped, batch(rank, 0))
    assert piped.sync == fp16(allreduce)
