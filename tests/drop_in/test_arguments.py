"""The drop-in module takes torch's arguments, and they do what they do there."""

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

import fnddp
from fnddp import DistributedDataParallel as DDP
from fnddp import allreduce, fp16
from fnddp.laws import bits
from tests.drop_in.models import (
    OF_TORCH,
    SMALL,
    WITH_RESIDUAL,
    Parts,
    assert_equal_on_ranks,
    assert_same_grads,
    by_hand,
    grads_of,
    normed,
    since_213,
    step,
    total,
)
from tests.ranks import on_ranks
from tests.test_register import COMPRESSED, Branches, batch, make_model


@since_213
def test_arguments_are_torchs_and_three_more():
    ours, theirs = (list(inspect.signature(cls).parameters.values()) for cls in (DDP, TorchDDP))
    positional = [(p.name, p.default, p.kind) for p in ours if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == [(p.name, p.default, p.kind) for p in theirs]
    assert [p.name for p in ours if p.kind is inspect.Parameter.KEYWORD_ONLY] == ["sync", "wire", "backend"]


def test_public_names_are_there():
    assert [name for name in vars(TorchDDP) if not name.startswith("_") and not hasattr(DDP, name)] == []


@on_ranks(1)
def test_public_attributes_are_there(rank: int) -> None:
    ours, theirs = DDP(normed()), TorchDDP(normed())
    missing = [name for name in vars(theirs) if not name.startswith("_") and not hasattr(ours, name)]
    about_cuda_and_buckets = {"logger", "use_side_stream_for_tensor_copies", "bucket_bytes_cap_default"}
    assert set(missing) <= about_cuda_and_buckets
    for name in ("device", "device_ids", "output_device", "dim", "device_type", "broadcast_buffers", "static_graph"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.process_group is theirs.process_group
    assert (ours.bucket_bytes_cap, ours.broadcast_bucket_size) == (
        theirs.bucket_bytes_cap,
        theirs.broadcast_bucket_size,
    )


def check_option(rank: int, options: dict[str, Any]) -> None:
    deprecated = next((name for name in ("broadcast_buffers", "check_reduction") if name in options), None)
    models = []
    for cls in (DDP, TorchDDP):  # each of them
        with pytest.warns(FutureWarning, match=deprecated) if deprecated else nullcontext() as warned:
            models.append(cls(normed(), **options))
        told = [warning for warning in warned or () if warning.category is FutureWarning]
        assert all(warning.filename == __file__ for warning in told)  # where the user wraps the module
    ours, theirs = models
    for i in range(4):
        for model in (ours, theirs):
            step(model, batch(rank, i))
        assert_same_grads(ours, theirs)
        assert bits(ours.state_dict()) == bits(theirs.state_dict())  # buffers too, each rank's as torch's


@pytest.mark.parametrize(
    "options",
    [
        {"device_ids": None, "output_device": None, "dim": 0},
        {"device_ids": []},
        {"broadcast_buffers": True},
        {"broadcast_buffers": False},
        {"broadcast_buffers": False, "forward_sync_buffers": True},
        {"forward_sync_buffers": False},
        {"forward_sync_buffers": True},
        {"init_sync": False},
        {"bucket_cap_mb": 0.0001},
        {"bucket_cap_mb": 100},
        {"bucket_cap_mb_list": [0.0001, 0.001]},
        {"find_unused_parameters": True},
        {"check_reduction": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
        {"batched_grad_copy": True},
    ],
    ids=str,
)
def test_every_option_gives_torchs_bits(gloo, options):
    if not options.keys() <= OF_TORCH.keys() or (
        "broadcast_buffers" in options and "forward_sync_buffers" not in OF_TORCH
    ):
        pytest.skip("compares with torch's class of 2.13")
    gloo(2, check_option, options)


@since_213
@on_ranks(2)
def test_buffers_are_made_equal_when_torch_makes_them_equal(rank: int) -> None:
    for options in ({}, {"forward_sync_buffers": False}, {"broadcast_buffers": False}):
        with pytest.warns(FutureWarning) if "broadcast_buffers" in options else nullcontext():
            models = [cls(normed(), **options) for cls in (DDP, TorchDDP)]
        apart = [normed() for _ in models]
        for module in apart:
            module[1].running_mean += rank
        with pytest.warns(FutureWarning) if "broadcast_buffers" in options else nullcontext():
            models = [cls(module, **options) for cls, module in zip((DDP, TorchDDP), apart, strict=True)]
        assert bits(models[0].state_dict()) == bits(models[1].state_dict())


@on_ranks(4)
def test_over_one_dimension_of_a_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["replicate"]
    ours, theirs = DDP(make_model(), device_mesh=mesh), TorchDDP(make_model(), device_mesh=mesh)
    for model in (ours, theirs):
        step(model, batch(rank, 0))
    assert_same_grads(ours, theirs)
    assert ours.device_mesh == mesh
    assert ours.process_group is mesh.get_group()


@on_ranks(2)
def test_over_a_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    ours, theirs = DDP(make_model(), device_mesh=mesh), TorchDDP(make_model(), device_mesh=mesh)
    for model in (ours, theirs):
        step(model, batch(rank, 0))
    assert_same_grads(ours, theirs)


@pytest.mark.parametrize(
    "what",
    [
        "devices",
        "device of a CPU module",
        "output device",
        "group and mesh",
        "mesh of two dimensions",
        "delayed, no hook",
        "hook, none delayed",
        "nothing to train",
        "no shape yet",
        "SyncBatchNorm",
    ],
)
@on_ranks(1)
def test_what_torch_refuses_is_refused_alike(rank: int, what: str) -> None:
    module: nn.Module = nn.Linear(4, 4)
    arguments: dict[str, Any] = {
        "devices": {"device_ids": [0, 1]},
        "device of a CPU module": {"device_ids": [0]},
        "output device": {"output_device": 1},
        "group and mesh": {"process_group": dist.group.WORLD, "device_mesh": init_device_mesh("cpu", (1,))},
        "mesh of two dimensions": {"device_mesh": init_device_mesh("cpu", (1, 1))},
        "delayed, no hook": {"delay_all_reduce_named_params": [("weight", module.weight)]},
        "hook, none delayed": {"param_to_hook_all_reduce": module.weight},
    }.get(what, {})
    if what == "nothing to train":
        module.requires_grad_(False)
    if what == "no shape yet":
        module = nn.LazyLinear(4)
    if what == "SyncBatchNorm":
        module = nn.SyncBatchNorm.convert_sync_batchnorm(normed())
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        TorchDDP(module, **arguments)
    with pytest.raises((ValueError, RuntimeError)) as ours:
        DDP(module, **arguments)
    assert ours.type is theirs.type


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
    buckets = model.plan.buckets
    params = dict(model.module.named_parameters())
    want, _ = dist._compute_bucket_assignment_by_size([params[n] for n in buckets], [int(cap * 2**20) for cap in caps])
    order = list(buckets)
    assert [[n for n in order if buckets[n] == i] for i in range(len(want))] == [[order[i] for i in b] for b in want]
    assert len({collective.bucket for collective in model.plan.collectives}) == len(want) > 1


def test_a_bucket_must_hold_something():
    for options in ({"bucket_cap_mb": 0}, {"bucket_cap_mb_list": [1, -1]}):
        with pytest.raises(ValueError, match="positive size in MiB"):
            DDP(nn.Linear(2, 2), **options)


@on_ranks(2)
def test_parameters_to_delay_are_synchronized(rank: int) -> None:
    module = make_model()
    delayed = [(name, p) for name, p in module.named_parameters() if name.startswith("0.")]
    ours = DDP(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module[2].weight)
    theirs = TorchDDP(make_model())  # torch's own delayed reduction is not waited for
    for i in range(3):
        for model in (ours, theirs):
            step(model, batch(rank, i))
        assert_same_grads(ours, theirs)


@pytest.mark.parametrize("find", [True, False])
@on_ranks(2)
def test_unused_parameters_are_found_either_way(rank: int, find: bool) -> None:
    ours, theirs = DDP(Parts(), find_unused_parameters=find), TorchDDP(Parts(), find_unused_parameters=True)
    for i, use in enumerate(["ab", "b", "abc", "a" if rank == 0 else "b", "ac"]):
        for model in (ours, theirs):
            step(model, batch(rank, i), use)
        assert_same_grads(ours, theirs)  # None where unused on all ranks


@pytest.mark.parametrize(("first", "then"), [("ab", "a"), ("ab", "abc"), ("abc", "c")])
@pytest.mark.parametrize("text", ["allreduce", WITH_RESIDUAL])
@on_ranks(2)
def test_a_broken_promise_of_a_static_graph_fails_on_all_ranks_without_a_trace(
    rank: int, text: str, first: str, then: str
) -> None:
    model = DDP(Parts(), static_graph=True, sync=fnddp.parse(text), **SMALL)
    straight = DDP(Parts(), sync=fnddp.parse(text), **SMALL)
    for i in range(2):
        for each in (model, straight):
            step(each, batch(rank, i), first)
        assert_same_grads(model, straight)
    before = bits(model.sync_state)
    params = bits(list(model.parameters()))
    model.zero_grad()
    with pytest.raises(RuntimeError, match="not compatible with static_graph"):
        total(model(batch(rank, 2), then)).backward()
    assert grads_of(model) == [None] * 6
    assert (bits(model.sync_state), bits(list(model.parameters()))) == (before, params)
    for each in (model, straight):
        step(each, batch(rank, 3), first)
    assert_same_grads(model, straight)
    assert bits(model.sync_state) == bits(straight.sync_state)


@on_ranks(2)
def test_a_static_graph_may_differ_by_rank(rank: int) -> None:
    """The promise is about what no rank uses: so it is kept here."""
    ours, theirs = DDP(Branches(), static_graph=True), TorchDDP(Branches(), find_unused_parameters=True)
    for i in range(3):
        for model in (ours, theirs):
            step(model, batch(rank, i), rank)
        assert_same_grads(ours, theirs)
    assert ours.reducer._ddp_graph_static()


@pytest.mark.parametrize("text", ["allreduce", "fp16(allreduce)", WITH_RESIDUAL])
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
        ({"reduce_dtype": torch.float16}, "allreduce", torch.float16),
        ({}, "fp16(allreduce)", torch.float16),
        ({}, WITH_RESIDUAL, torch.float16),
        ({}, COMPRESSED, torch.float16),
    ],
    ids=str,
)
@on_ranks(2)
def test_mixed_precision_trains(rank: int, options: dict[str, Any], text: str, wire: torch.dtype) -> None:
    mixed = _MixedPrecision(param_dtype=torch.bfloat16, **options)
    given = fnddp.parse(text)
    model = DDP(make_model(), mixed_precision=mixed, sync=given, **SMALL)
    plain = make_model()
    sync = fnddp.cast(allreduce, wire) if text == "allreduce" else given
    state = sync.init(dict(plain.named_parameters()))

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = plain

        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            return self.plain.named_parameters(*args, **kwargs)

        def forward(self, x: Tensor) -> Tensor:
            rounded = {n: p.bfloat16() for n, p in plain.named_parameters()}
            return torch.func.functional_call(plain, rounded, (x.bfloat16(),))

    losses = []
    for _ in range(4):
        want, state = by_hand(sync, Rounded(), state, batch(rank, 0))
        model.zero_grad()
        output = model(batch(rank, 0))
        assert output.dtype == torch.bfloat16
        loss = total(output)
        loss.backward()
        losses.append(loss.item())
        grads = {n: p.grad for n, p in model.module.named_parameters()}
        assert {g.dtype for g in grads.values()} == {torch.float32}
        assert bits(grads) == bits(want)
        for each, mean in ((model.module, grads), (plain, want)):
            with torch.no_grad():
                for n, p in each.named_parameters():
                    p -= 0.5 * mean[n]
    assert_equal_on_ranks(list(model.parameters()))
    assert losses[-1] < losses[0]
    assert {collective.dtype for collective in model.plan.collectives} == {wire}


def test_mixed_precision_casts_buffers():
    mixed = _MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = DDP(normed(), mixed_precision=mixed)
    assert model.module[1].running_mean.dtype == torch.bfloat16
    step(model, batch(0, 0))
    assert {g.dtype for g in grads_of(model)} == {torch.float32}


def test_mixed_precision_may_not_contradict_the_pipeline():
    mixed = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"reduce_dtype=torch.bfloat16, but the pipeline fp16\(allreduce\) says"):
        DDP(make_model(), sync=fp16(allreduce), mixed_precision=mixed)
    model = DDP(make_model(), mixed_precision=mixed)
    before = model.sync
    with pytest.raises(ValueError, match="says itself what travels"):
        model.sync = fp16(allreduce)
    assert model.sync == before
    step(model, batch(0, 0))
