"""`fnddp.DistributedDataParallel` in the place of torch's class: every argument, every method, every kind of model.

Where both do the same sums, on two ranks, they must agree to the bit. Elsewhere the reference is the pipeline called
by hand on the gradients of the bare module.
"""

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation, _MixedPrecision
from torch.utils.checkpoint import checkpoint

import fnddp
from fnddp import DistributedDataParallel as DDP
from fnddp import RankMismatchError, StepFailedError, allreduce, bf16, fp16
from fnddp.adapters.checkpoint import shares
from tests.laws import bits, gather
from tests.test_register import COMPRESSED, Branches, batch, make_model

WITH_RESIDUAL = "error_feedback(fp16(allreduce))"
SMALL = {"bucket_cap_mb": 0.001}


def total(output: Any) -> Tensor:
    """A loss of whatever a module returns."""
    return (output.abs() if output.is_complex() else output).square().float().mean()


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def dense(tensor: Tensor | None) -> Tensor | None:
    return tensor.to_dense() if tensor is not None and tensor.is_sparse else tensor


def assert_same_grads(ours: nn.Module, theirs: nn.Module) -> None:
    pairs = list(zip(ours.named_parameters(), theirs.parameters(), strict=True))
    for (name, p), q in pairs:
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            assert (p.grad.dtype, p.grad.layout) == (q.grad.dtype, q.grad.layout), name
            if p.grad.is_sparse:  # torch adds up what all ranks have in one go, so rounds in another order
                torch.testing.assert_close(dense(p.grad), dense(q.grad), rtol=1e-6, atol=1e-7)
            else:
                assert p.grad.stride() == q.grad.stride(), name
                assert bits([p.grad]) == bits([q.grad]), name


def assert_equal_on_ranks(*values: Any) -> None:
    everyone = gather(bits(values))
    assert all(other == everyone[0] for other in everyone)


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.1 * dense(p.grad)


def step(model: nn.Module, *inputs: Any, descends: bool = True, **kwargs: Any) -> None:
    model.zero_grad()
    total(model(*inputs, **kwargs)).backward()
    if descends:
        descend(model)


def by_hand(sync: fnddp.Sync, module: nn.Module, state: Any, *inputs: Any) -> tuple[dict[str, Tensor], Any]:
    """The pipeline's means of the bare module's gradients, and its next state."""
    module.zero_grad()
    total(module(*inputs)).backward()
    own = {n: torch.zeros_like(p) if p.grad is None else dense(p.grad) for n, p in module.named_parameters()}
    return sync(own, state)


class Parts(nn.Module):
    """Uses those of its layers that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor, use: str = "abc") -> Tensor:
        return sum(getattr(self, name)(x) for name in use)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


OF_TORCH = inspect.signature(TorchDDP.__init__).parameters
since_213 = pytest.mark.skipif("forward_sync_buffers" not in OF_TORCH, reason="compares with torch's class of 2.13")


# Arguments


@since_213
def test_arguments_are_torchs_and_sync():
    ours, theirs = (list(inspect.signature(cls).parameters.values()) for cls in (DDP, TorchDDP))
    positional = [(p.name, p.default, p.kind) for p in ours if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == [(p.name, p.default, p.kind) for p in theirs]
    assert [p.name for p in ours if p.kind is inspect.Parameter.KEYWORD_ONLY] == ["sync"]


def test_public_names_are_there():
    assert [name for name in vars(TorchDDP) if not name.startswith("_") and not hasattr(DDP, name)] == []


def check_public_attributes(rank: int) -> None:
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


def test_public_attributes_are_there(gloo):
    gloo(1, check_public_attributes)


def check_option(rank: int, options: dict[str, Any]) -> None:
    with pytest.warns(FutureWarning) if {"broadcast_buffers", "check_reduction"} & set(options) else nullcontext():
        ours, theirs = DDP(normed(), **options), TorchDDP(normed(), **options)
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


def check_buffers_when_wrapped(rank: int) -> None:
    for options in ({}, {"forward_sync_buffers": False}, {"broadcast_buffers": False}):
        with pytest.warns(FutureWarning) if "broadcast_buffers" in options else nullcontext():
            models = [cls(normed(), **options) for cls in (DDP, TorchDDP)]
        apart = [normed() for _ in models]
        for module in apart:
            module[1].running_mean += rank
        with pytest.warns(FutureWarning) if "broadcast_buffers" in options else nullcontext():
            models = [cls(module, **options) for cls, module in zip((DDP, TorchDDP), apart, strict=True)]
        assert bits(models[0].state_dict()) == bits(models[1].state_dict())


@since_213
def test_buffers_are_made_equal_when_torch_makes_them_equal(gloo):
    gloo(2, check_buffers_when_wrapped)


def check_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["replicate"]
    ours, theirs = DDP(make_model(), device_mesh=mesh), TorchDDP(make_model(), device_mesh=mesh)
    for model in (ours, theirs):
        step(model, batch(rank, 0))
    assert_same_grads(ours, theirs)
    assert ours.device_mesh == mesh
    assert ours.process_group is mesh.get_group()


def test_over_one_dimension_of_a_mesh(gloo):
    gloo(4, check_mesh)


def whole_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    ours, theirs = DDP(make_model(), device_mesh=mesh), TorchDDP(make_model(), device_mesh=mesh)
    for model in (ours, theirs):
        step(model, batch(rank, 0))
    assert_same_grads(ours, theirs)


def test_over_a_mesh(gloo):
    gloo(2, whole_mesh)


def check_refused(rank: int, what: str) -> None:
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
def test_what_torch_refuses_is_refused_alike(gloo, what):
    gloo(1, check_refused, what)


def check_bucket_sizes(rank: int, options: dict[str, Any], caps: list[float]) -> None:
    model = DDP(make_model(), **options)
    for i in range(3):
        step(model, batch(rank, i))
    buckets = model.plan.buckets
    params = dict(model.module.named_parameters())
    want, _ = dist._compute_bucket_assignment_by_size([params[n] for n in buckets], [int(cap * 2**20) for cap in caps])
    order = list(buckets)
    assert [[n for n in order if buckets[n] == i] for i in range(len(want))] == [[order[i] for i in b] for b in want]
    assert len({collective.bucket for collective in model.plan.collectives}) == len(want) > 1


@pytest.mark.parametrize(
    ("options", "caps"),
    [
        ({"bucket_cap_mb": 0.001}, [0.001]),
        ({"bucket_cap_mb_list": [0.0001, 0.01, 0.002]}, [0.0001, 0.01, 0.002]),
        ({"bucket_cap_mb_list": [0.002], "bucket_cap_mb": 9}, [0.002]),
    ],
    ids=str,
)
def test_buckets_are_filled_as_torch_fills_them(gloo, options, caps):
    gloo(2, check_bucket_sizes, options, caps)


def test_a_bucket_must_hold_something():
    for options in ({"bucket_cap_mb": 0}, {"bucket_cap_mb_list": [1, -1]}):
        with pytest.raises(ValueError, match="positive size in MiB"):
            DDP(nn.Linear(2, 2), **options)


def check_delayed(rank: int) -> None:
    module = make_model()
    delayed = [(name, p) for name, p in module.named_parameters() if name.startswith("0.")]
    ours = DDP(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module[2].weight)
    theirs = TorchDDP(make_model())  # torch's own delayed reduction is not waited for
    for i in range(3):
        for model in (ours, theirs):
            step(model, batch(rank, i))
        assert_same_grads(ours, theirs)


def test_parameters_to_delay_are_synchronized(gloo):
    gloo(2, check_delayed)


def check_unused(rank: int, find: bool) -> None:
    ours, theirs = DDP(Parts(), find_unused_parameters=find), TorchDDP(Parts(), find_unused_parameters=True)
    for i, use in enumerate(["ab", "b", "abc", "a" if rank == 0 else "b", "ac"]):
        for model in (ours, theirs):
            step(model, batch(rank, i), use)
        assert_same_grads(ours, theirs)  # None where unused on all ranks


@pytest.mark.parametrize("find", [True, False])
def test_unused_parameters_are_found_either_way(gloo, find):
    gloo(2, check_unused, find)


def check_static_graph(rank: int, text: str, first: str, then: str) -> None:
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


@pytest.mark.parametrize(("first", "then"), [("ab", "a"), ("ab", "abc"), ("abc", "c")])
@pytest.mark.parametrize("text", ["allreduce", WITH_RESIDUAL])
def test_a_broken_promise_of_a_static_graph_fails_on_all_ranks_without_a_trace(gloo, text, first, then):
    gloo(2, check_static_graph, text, first, then)


def check_static_graph_differs_by_rank(rank: int) -> None:
    """The promise is about what no rank uses: so it is kept here."""
    ours, theirs = DDP(Branches(), static_graph=True), TorchDDP(Branches(), find_unused_parameters=True)
    for i in range(3):
        for model in (ours, theirs):
            step(model, batch(rank, i), rank)
        assert_same_grads(ours, theirs)
    assert ours.reducer._ddp_graph_static()


def test_a_static_graph_may_differ_by_rank(gloo):
    gloo(2, check_static_graph_differs_by_rank)


def check_skipping(rank: int, text: str) -> None:
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


@pytest.mark.parametrize("text", ["allreduce", "fp16(allreduce)", WITH_RESIDUAL])
def test_what_is_skipped_is_not_sent_and_must_stay_unused(gloo, text):
    gloo(2, check_skipping, text)


def check_mixed_precision(rank: int, options: dict[str, Any], text: str, wire: torch.dtype) -> None:
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
def test_mixed_precision_trains(gloo, options, text, wire):
    gloo(2, check_mixed_precision, options, text, wire)


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


# no_sync and join


def check_no_sync(rank: int, text: str) -> None:
    """Forward decides, not where backward is; a gradient that accumulates is synchronized once, as a whole."""
    sync = fnddp.parse(text)
    model, plain = DDP(make_model(), sync=sync, **SMALL), make_model()
    theirs = TorchDDP(make_model()) if text == "allreduce" else None
    state = sync.init(dict(plain.named_parameters()))
    for i in range(3):
        for each in filter(None, (model, theirs)):
            each.zero_grad()
            with each.no_sync():
                with each.no_sync():
                    total(each(batch(rank, 10 * i))).backward()
                loss = total(each(batch(rank, 10 * i + 1)))
            loss.backward()
        outside = total(model(batch(rank, 10 * i + 2)))
        with model.no_sync():
            outside.backward()
        if theirs is not None:
            total(theirs(batch(rank, 10 * i + 2))).backward()
            assert_same_grads(model, theirs)
        plain.zero_grad()
        for k in range(3):
            total(plain(batch(rank, 10 * i + k))).backward()
        want, state = sync({n: p.grad for n, p in plain.named_parameters()}, state)
        assert bits(grads_of(model)) == bits(list(want.values()))
        assert bits(model.sync_state) == bits(state)


@pytest.mark.parametrize("text", ["allreduce", "bf16(allreduce)", WITH_RESIDUAL, COMPRESSED])
def test_no_sync(gloo, text):
    gloo(2, check_no_sync, text)


def train_joined(model: Any, rank: int, batches: int, accumulate: int = 1, **options: Any) -> None:
    with model.join(**options):
        for i in range(batches):
            waits = (i + 1) % accumulate != 0
            with model.no_sync() if waits else nullcontext():
                total(model(batch(rank, i))).backward()
            if not waits:
                descend(model)
                model.zero_grad()


def check_join_by_hand(rank: int, text: str, counts: list[int], divide: bool) -> None:
    sync, n = fnddp.parse(text), dist.get_world_size()
    model, plain = DDP(make_model(), sync=sync, **SMALL), make_model()
    state = sync.init(dict(plain.named_parameters()))
    train_joined(model, rank, counts[rank], divide_by_initial_world_size=divide)
    for i in range(max(counts)):
        left = sum(count > i for count in counts)
        plain.zero_grad()
        total(plain(batch(rank, i))).backward()
        weight = 0.0 if counts[rank] <= i else 1.0 if divide else n / left
        mean, state = sync({name: weight * p.grad for name, p in plain.named_parameters()}, state)
        with torch.no_grad():
            for name, p in plain.named_parameters():
                p -= 0.1 * mean[name]
    assert_equal_on_ranks(model.state_dict())
    # On three ranks a ring adds in an order that depends on where an element lies; a rounding to float16 may then
    # go another way, which error feedback carries along.
    tolerance = {"rtol": 0, "atol": 0} if n == 2 else {"rtol": 0, "atol": 1e-3}
    torch.testing.assert_close(dict(model.module.named_parameters()), dict(plain.named_parameters()), **tolerance)
    torch.testing.assert_close(fnddp.state_dict(model.sync_state), fnddp.state_dict(state), **tolerance)
    step(model, batch(rank, 99))  # all goes on as before, without a factor
    mean, _ = by_hand(sync, plain, state, batch(rank, 99))
    torch.testing.assert_close([p.grad for p in model.parameters()], list(mean.values()), **tolerance)


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("counts", [[4, 2], [0, 3], [2, 2], [5, 2, 3], [1, 4, 4]], ids=str)
@pytest.mark.parametrize("text", ["allreduce", COMPRESSED])
def test_join_is_the_mean_of_those_that_are_left(gloo, text, counts, divide):
    gloo(len(counts), check_join_by_hand, text, counts, divide)


def check_join_as_torch(rank: int, counts: list[int], accumulate: int, options: dict[str, Any]) -> None:
    ours, theirs = DDP(normed()), TorchDDP(normed())
    for model in (ours, theirs):
        train_joined(model, rank, counts[rank], accumulate, **options)
    exact = {"rtol": 0, "atol": 0} if len(counts) == 2 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), **exact)
    assert_equal_on_ranks(ours.state_dict())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("counts", [[6, 2], [2, 4], [2, 6, 4]], ids=str)
@pytest.mark.parametrize("divide", [True, False])
def test_join_as_torch_with_buffers_and_no_sync(gloo, counts, accumulate, divide):
    gloo(len(counts), check_join_as_torch, counts, accumulate, {"divide_by_initial_world_size": divide})


def check_join_options(rank: int) -> None:
    for cls in (TorchDDP, DDP):
        model = cls(make_model())
        train_joined(model, rank, 2, enable=False)
        # Collectives of the step that ends are left behind: what comes next needs another group, as with torch.
        with pytest.raises(RuntimeError):
            train_joined(model, rank, 1 + rank, throw_on_early_termination=True)


def test_join_can_be_off_or_throw(gloo):
    gloo(2, check_join_options)


def check_two_join(rank: int) -> None:
    models = [DDP(make_model()), DDP(normed(), sync=fnddp.parse(COMPRESSED))]
    with dist.algorithms.Join(models, divide_by_initial_world_size=False):
        for i in range(2 + rank):
            for model in models:
                step(model, batch(rank, i))
    for model in models:
        assert_equal_on_ranks(model.state_dict())


def test_two_modules_in_one_join(gloo):
    gloo(2, check_two_join)


# Hooks


def weighted_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    for grad, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        grad.mul_(2 if parameter.ndim == 2 else 4)
        assert grad.shape == parameter.shape
    return allreduce_hook(state, bucket)


HOOKS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "allreduce": (allreduce_hook, allreduce_hook),
    "fp16": (fp16_compress_hook, fp16_compress_hook),
    "parameters": (weighted_hook, weighted_hook),
    "partial": (partial(allreduce_hook), allreduce_hook),
}


def check_hook(rank: int, name: str) -> None:
    ours, theirs = DDP(make_model(), **SMALL), TorchDDP(make_model(), **SMALL)
    for model, hook in zip((ours, theirs), HOOKS[name], strict=True):
        model.register_comm_hook(None, hook)
    for i in range(4):
        for model in (ours, theirs):
            step(model, batch(rank, i))
        assert_same_grads(ours, theirs)
    assert ours.sync == fnddp.from_hook(HOOKS[name][0])
    if name != "partial":
        assert ours._get_ddp_logging_data()["comm_hook"] == theirs._get_ddp_logging_data()["comm_hook"]


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_do_what_they_do_in_torch(gloo, name):
    gloo(2, check_hook, name)


def check_builtin_hook(rank: int, name: str) -> None:
    kind = getattr(dist.BuiltinCommHookType, name)
    ours, theirs = DDP(make_model()), TorchDDP(make_model())
    for model in (ours, theirs):
        model._register_builtin_comm_hook(kind)
        for i in range(3):
            step(model, batch(rank, i))
    assert_same_grads(ours, theirs)


@pytest.mark.parametrize("name", ["ALLREDUCE", "FP16_COMPRESS"])
def test_builtin_hooks(gloo, name):
    gloo(2, check_builtin_hook, name)


def badly_annotated(state: Any, bucket: int) -> torch.futures.Future[Tensor]:
    raise AssertionError


def badly_returning(state: Any, bucket: dist.GradBucket) -> int:
    raise AssertionError


def check_hook_errors(rank: int) -> None:
    for cls in (DDP, TorchDDP):
        model = cls(make_model())
        for hook, error in ((3, TypeError), (badly_annotated, ValueError), (badly_returning, ValueError)):
            with pytest.raises(error, match="hook"):
                model.register_comm_hook(None, hook)
        model.register_comm_hook(None, allreduce_hook)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                model.register_comm_hook(None, fp16_compress_hook)
        step(model, batch(rank, 0))  # the first one stays
        assert_equal_on_ranks(grads_of(model))
    assert DDP(make_model()).sync == allreduce
    piped = DDP(make_model(), sync=fp16(allreduce))
    with pytest.raises(RuntimeError, match=r"synchronized by fp16\(allreduce\), which a hook would replace"):
        piped.register_comm_hook(None, allreduce_hook)
    with pytest.raises(RuntimeError, match="which a hook would replace"):
        piped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    step(piped, batch(rank, 0))
    assert piped.sync == fp16(allreduce)


def test_errors_of_hooks(gloo):
    gloo(2, check_hook_errors)


def average_buffers(calls: list[str], named: dict[str, Tensor]) -> list[torch.futures.Future[Tensor]]:
    calls.append("called")
    floats = [buffer for buffer in named.values() if buffer.is_floating_point()]
    for buffer in floats:
        buffer /= dist.get_world_size()
    return [dist.all_reduce(buffer, async_op=True).get_future() for buffer in floats]


def average_buffers_now(calls: list[str], named: dict[str, Tensor]) -> None:
    torch.futures.wait_all(average_buffers(calls, named))


def check_buffer_hook(rank: int, hook: Callable[..., Any], location: str) -> None:
    ours, theirs = DDP(normed()), TorchDDP(normed())
    calls: dict[nn.Module, list[str]] = {ours: [], theirs: []}
    for model, mine in calls.items():
        model._register_buffer_comm_hook(mine, hook, _BufferCommHookLocation[location])
        for i in range(3):
            step(model, batch(rank, i))
    assert bits(ours.state_dict()) == bits(theirs.state_dict())
    assert len(calls[ours]) == len(calls[theirs]) == 3


@since_213
@pytest.mark.parametrize(
    ("hook", "location"),
    [(average_buffers_now, "PRE_FORWARD"), (average_buffers_now, "POST_FORWARD"), (average_buffers, "POST_FORWARD")],
)
def test_buffer_hooks(gloo, hook, location):
    gloo(2, check_buffer_hook, hook, location)


# State


class Named(nn.Module):
    """A module whose own names begin with `module.`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module, self.head = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.module(x))


def check_state_dict(rank: int, make: Callable[[], nn.Module]) -> None:
    ours, theirs = DDP(make(), sync=fnddp.parse(COMPRESSED)), TorchDDP(make())
    holder = nn.ModuleDict({"net": ours})
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert list(ours.state_dict(prefix="x.")) == list(theirs.state_dict(prefix="x."))
    assert list(holder.state_dict()) == [f"net.{key}" for key in theirs.state_dict()]
    step(theirs, batch(rank, 0))
    for saved in (theirs.state_dict(), theirs.module.state_dict(), dict(theirs.state_dict())):
        fresh = DDP(make(), sync=fnddp.parse(COMPRESSED))
        assert str(fresh.load_state_dict(saved)) == "<All keys matched successfully>"
        assert bits(fresh.state_dict()) == bits(theirs.state_dict())
    holder.load_state_dict({f"net.{key}": value for key, value in theirs.state_dict().items()})
    assert bits(ours.state_dict()) == bits(theirs.state_dict())
    fewer = dict(list(theirs.state_dict().items())[1:])
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict(fewer)
    assert ours.load_state_dict(fewer, strict=False).missing_keys == [next(iter(theirs.state_dict()))]
    theirs.load_state_dict(ours.state_dict())  # and back


@pytest.mark.parametrize("make", [normed, make_model, Named])
def test_state_dicts_of_torch_and_of_the_bare_module_are_interchangeable(gloo, make):
    gloo(1, check_state_dict, make)


def check_resume(rank: int) -> None:
    sync = fnddp.parse(f"warmup({COMPRESSED}, steps=1)")
    model = DDP(normed(), sync=sync, **SMALL)
    for i in range(3):
        step(model, batch(rank, i))
    saved = copy.deepcopy(model.state_dict(sync_state=True))
    assert set(saved) > set(model.state_dict())
    again = DDP(normed(), sync=sync, **SMALL)
    assert str(again.load_state_dict(saved)) == "<All keys matched successfully>"
    for i in range(3, 6):
        for each in (model, again):
            step(each, batch(rank, i))
    assert bits(again.state_dict(sync_state=True)) == bits(model.state_dict(sync_state=True))
    with pytest.raises(ValueError, match="saved from another pipeline"):
        DDP(normed(), sync=fp16(allreduce)).load_state_dict(saved)


def test_a_state_dict_with_the_pipelines_state_resumes_to_the_bit(gloo):
    gloo(2, check_resume)


def check_copies(rank: int, how: str) -> None:
    model = DDP(normed(), sync=fnddp.parse(COMPRESSED), static_graph=True, **SMALL)
    for i in range(2):
        step(model, batch(rank, i))
    again = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert (again.sync, again.static_graph) == (model.sync, True)
    assert bits(again.sync_state) == bits(model.sync_state)
    for i in range(2, 5):
        for each in (model, again):
            step(each, batch(rank, i))
        assert_same_grads(again, model)
        assert bits(again.sync_state) == bits(model.sync_state)
    assert_equal_on_ranks(list(again.parameters()))
    before = bits(model.state_dict()), bits(model.sync_state)
    step(again, batch(rank, 9))  # nothing is shared
    assert (bits(model.state_dict()), bits(model.sync_state)) == before


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_keep_the_pipeline_and_its_state(gloo, how):
    gloo(2, check_copies, how)


def check_logging_data(rank: int) -> None:
    ours, theirs = DDP(normed()), TorchDDP(normed())
    first = [dict(model._get_ddp_logging_data()) for model in (ours, theirs)]
    for model in (ours, theirs):
        for i in range(3):
            step(model, batch(rank, i))
    for mine, torchs in (first, [dict(model._get_ddp_logging_data()) for model in (ours, theirs)]):
        assert sorted(set(torchs) - set(mine)) == []
        assert {key: mine[key] for key in torchs if "_time" not in key} == {
            key: value for key, value in torchs.items() if "_time" not in key
        }
        assert all(mine[key] > 0 for key in torchs if key.endswith("_time"))


def test_logging_data_has_torchs_keys(gloo):
    gloo(2, check_logging_data)


def check_ignored(rank: int) -> None:
    models = []
    for cls in (DDP, TorchDDP):
        module = normed()
        with torch.no_grad():
            module[2].weight += rank
            module[1].running_mean += rank
        cls._set_params_and_buffers_to_ignore_for_model(module, ["2.weight", "1.running_mean"])
        models.append(cls(module))
        for i in range(3):
            step(models[-1], batch(rank, i))
    ours, theirs = models
    assert_same_grads(ours, theirs)
    assert bits(ours.state_dict()) == bits(theirs.state_dict())
    everyone = gather(bits([ours.module[2].weight, ours.module[1].running_mean]))
    assert everyone[0][0] != everyone[1][0]
    assert everyone[0][1] != everyone[1][1]


def test_ignored_parameters_and_buffers(gloo):
    gloo(2, check_ignored)


def check_static_graph_by_method(rank: int) -> None:
    for cls in (DDP, TorchDDP):
        model = cls(make_model())
        model._set_static_graph()
        assert model.static_graph
        late = cls(make_model())
        for i in range(3):
            step(model, batch(rank, i))
            step(late, batch(rank, i))
        assert_same_grads(model, late)
        with pytest.raises(RuntimeError, match="before training loop starts"):
            late._set_static_graph()


def test_static_graph_by_method(gloo):
    gloo(2, check_static_graph_by_method)


# Models


class Mixed(nn.Module):
    """Parameters of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(16, 8).double(), nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x.double()).float()).bfloat16())


class Conv(nn.Module):
    """Weights whose strides are not those of a new tensor: channels_last, and a transposed matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 8, 2).to(memory_format=torch.channels_last)
        self.weight = nn.Parameter(torch.randn(5, 8).t())
        self.wide = nn.Parameter(torch.randn(5, 2, 5).transpose(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.reshape(8, 4, 2, 2).contiguous(memory_format=torch.channels_last)).reshape(8, 8)
        return (x @ self.weight) @ self.wide.sum(0)


class Odd(nn.Module):
    """A scalar, a parameter without elements, and a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 8))
        self.first = self.second = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.tied(self.second(self.first(x))) + self.empty.sum()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(16, 8, dtype=torch.complex64))
        self.second = nn.Linear(8, 4, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        return self.second((x.to(torch.complex64) @ self.first).to(torch.complex128))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.embedding = nn.EmbeddingBag(10, 8, sparse=True), nn.Embedding(10, 8, sparse=True)
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
    """Each layer is checkpointed several times, and the first one is not used at all."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__(reentrant)
        self.layers = nn.ModuleList([self.layers[1], self.layers[2], self.layers[1], self.layers[2]])
        self.unused = nn.Linear(16, 16)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixed dtypes": Mixed,
    "strides": Conv,
    "odd shapes and ties": Odd,
    "complex": Complex,
    "sparse": Sparse,
}


def check_model(rank: int, name: str) -> None:
    ours, theirs = DDP(MODELS[name](), **SMALL), TorchDDP(MODELS[name](), **SMALL)
    for i in range(4):
        for model in (ours, theirs):
            step(model, batch(rank, i))
        assert_same_grads(ours, theirs)
    for model in (ours, theirs):  # gradients add up
        model.zero_grad()
        with model.no_sync():
            total(model(batch(rank, 8))).backward()
        total(model(batch(rank, 9))).backward()
    assert_same_grads(ours, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_models_that_torch_takes(gloo, name):
    gloo(2, check_model, name)


def check_model_with(rank: int, name: str, text: str) -> None:
    sync = fnddp.parse(text)
    model, plain = DDP(MODELS[name](), sync=sync, **SMALL), MODELS[name]()
    state = sync.init(dict(plain.named_parameters()))
    for i in range(4):
        want, state = by_hand(sync, plain, state, batch(rank, i))
        step(model, batch(rank, i), descends=False)
        for key, p in model.module.named_parameters():
            assert p.grad.is_sparse or p.grad.stride() == p.stride(), key
            assert bits([dense(p.grad)]) == bits([want[key]]), key
        assert bits(model.sync_state) == bits(state)


@pytest.mark.parametrize("text", ["bf16(allreduce)", WITH_RESIDUAL, COMPRESSED])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "complex"])
def test_models_with_any_pipeline(gloo, name, text):
    gloo(2, check_model_with, name, text)


def check_reentrant(rank: int, make: Callable[[bool | None], nn.Module], reentrant: bool, text: str) -> None:
    sync = fnddp.parse(text)
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


@pytest.mark.parametrize("text", ["allreduce", COMPRESSED])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", [Checkpointed, Twice])
def test_activation_checkpointing(gloo, make, reentrant, text):
    gloo(2, check_reentrant, make, reentrant, text)


def check_compiled(rank: int, where: str) -> None:
    torch._dynamo.reset()
    compiled = partial(torch.compile, backend="aot_eager")
    for sync in (allreduce, fnddp.parse(COMPRESSED)):
        model = DDP(compiled(make_model()) if where == "inside" else make_model(), sync=sync)
        called = model if where == "inside" else compiled(model)
        plain = compiled(make_model()) if where == "inside" else make_model()  # parameters are named alike
        state = sync.init(dict(plain.named_parameters()))
        for i in range(4):
            want, state = by_hand(sync, plain, state, batch(rank, i))
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # of what Dynamo cannot trace
                step(called, batch(rank, i), descends=False)
            assert bits([p.grad for p in model.parameters()]) == bits(list(want.values()))
        with model.no_sync():
            step(called, batch(rank, 9))
            step(plain, batch(rank, 9))
        assert bits(grads_of(model)) == bits(grads_of(plain))


@pytest.mark.parametrize("where", ["around", "inside"])
def test_compile(gloo, where):
    gloo(2, check_compiled, where)


def check_several_forwards(rank: int) -> None:
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


def test_several_forwards_before_a_backward(gloo):
    gloo(2, check_several_forwards)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.inner, self.last = nn.Linear(16, 16), inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)).tanh())


PAIRS = [("allreduce", "allreduce"), ("bf16(allreduce)", WITH_RESIDUAL), ("allreduce", COMPRESSED)]


def check_nested(rank: int, texts: tuple[str, str]) -> None:
    outer, inner = map(fnddp.parse, texts)
    model = DDP(Outer(DDP(make_model(), sync=inner, **SMALL)), sync=outer)
    plain = Outer(make_model())
    state = inner.init(dict(plain.inner.named_parameters()))
    for i in range(4):
        step(model, batch(rank, i))
        plain.zero_grad()
        total(plain(batch(rank, i))).backward()
        own = {n: p.grad for n, p in plain.named_parameters()}
        of_inner = {n: p.grad for n, p in plain.inner.named_parameters()}
        want, _ = outer({n: g for n, g in own.items() if not n.startswith("inner.")}, ())
        of_inner, state = inner(of_inner, state)
        for name, p in plain.named_parameters():
            p.grad = want[name] if name in want else of_inner[name.removeprefix("inner.")]
        descend(plain)
        assert_same_grads(model, plain)
    assert bits(model.module.inner.sync_state) == bits(state)


@pytest.mark.parametrize("texts", PAIRS)
def test_a_wrapped_module_inside_another(gloo, texts):
    gloo(2, check_nested, texts, timeout=40)


def check_two_models(rank: int, texts: tuple[str, str]) -> None:
    """As a generator and a discriminator: alternately, and one through the other."""
    first, second = (DDP(Checkpointed(None), sync=fnddp.parse(text), **SMALL) for text in texts)
    plains, states = [Checkpointed(None), Checkpointed(None)], [first.sync_state, second.sync_state]
    for i in range(4):
        for both in ((first, second), plains):
            for model in both:
                model.zero_grad()
            if i % 2:
                total(both[1](both[0](batch(rank, i)))).backward()
            else:
                for model in both:
                    total(model(batch(rank, i))).backward()
        for k, (model, plain) in enumerate(zip((first, second), plains, strict=True)):
            own = {n: p.grad for n, p in plain.named_parameters()}
            means, states[k] = fnddp.parse(texts[k])(own, states[k])
            for name, p in plain.named_parameters():
                p.grad = means[name]
            assert_same_grads(model, plain)
            descend(model)
            descend(plain)


@pytest.mark.parametrize("texts", PAIRS)
def test_two_wrapped_modules_alternately(gloo, texts):
    gloo(2, check_two_models, texts, timeout=40)


# Changes after wrapping


def check_change_of_sync(rank: int) -> None:
    model, plain = DDP(make_model(), **SMALL), make_model()
    for i, text in enumerate(["allreduce", WITH_RESIDUAL, WITH_RESIDUAL, COMPRESSED, COMPRESSED, "allreduce"]):
        sync = fnddp.parse(text)
        if model.sync != sync:
            model.sync = sync
            state = sync.init(dict(plain.named_parameters()))
        elif i == 0:
            state = ()
        want, state = by_hand(sync, plain, state, batch(rank, i))
        step(model, batch(rank, i), descends=False)
        assert bits(grads_of(model)) == bits(list(want.values()))
        assert bits(model.sync_state) == bits(state)
    model.sync = fnddp.parse(WITH_RESIDUAL)
    step(model, batch(rank, 7))
    before = bits(model.sync_state)
    with pytest.raises(RankMismatchError, match="disagree about pipeline"):
        model.sync = fp16(allreduce) if rank == 0 else bf16(allreduce)
    assert model.sync == fnddp.parse(WITH_RESIDUAL)
    assert bits(model.sync_state) == before
    straight = DDP(copy.deepcopy(model.module), sync=fnddp.parse(WITH_RESIDUAL))
    straight.sync_state = model.sync_state
    for each in (model, straight):
        step(each, batch(rank, 8))
    assert_same_grads(model, straight)


def test_the_pipeline_can_change_between_steps(gloo):
    gloo(2, check_change_of_sync)


def check_change_within_backward(rank: int) -> None:
    model = DDP(make_model(), sync=fnddp.parse(WITH_RESIDUAL))
    before = bits(model.sync_state)
    output = model(batch(rank, 0))

    def change(grad: Tensor) -> None:
        model.sync = allreduce

    if rank == 1:
        model.module[2].weight.register_hook(change)
        with pytest.raises(RuntimeError, match="cannot change while a backward is running"):
            total(output).backward()
        model.module[2].weight._backward_hooks.clear()
    else:
        with pytest.raises(StepFailedError, match="rank 1 failed"):
            total(output).backward()
    assert bits(model.sync_state) == before
    model.zero_grad()
    model.sync = allreduce  # the backward is over
    step(model, batch(rank, 1))
    assert_equal_on_ranks(grads_of(model))


def test_the_pipeline_cannot_change_during_a_backward(gloo):
    gloo(2, check_change_within_backward)


def check_frozen(rank: int, text: str) -> None:
    model = DDP(Parts(), sync=fnddp.parse(text), **SMALL)
    plain = Parts()
    sync = fnddp.parse(text)
    state = sync.init(dict(plain.named_parameters()))
    for i in range(4):
        if i == 2:
            for module in (model.module, plain):
                module.b.requires_grad_(False)
        if i == 3:
            for module in (model.module, plain):
                module.b.requires_grad_(True)
        want, state = by_hand(sync, plain, state, batch(rank, i))
        step(model, batch(rank, i), descends=False)
        for name, p in model.module.named_parameters():
            assert (p.grad is None) == (not p.requires_grad)
            assert p.grad is None or bits([p.grad]) == bits([want[name]])
        assert bits(model.sync_state) == bits(state)


@pytest.mark.parametrize("text", ["allreduce", "fp16(allreduce)", WITH_RESIDUAL])
def test_parameters_frozen_after_wrapping(gloo, text):
    gloo(2, check_frozen, text)


def test_parameters_unfrozen_after_wrapping_are_named():
    module = Parts()
    module.b.requires_grad_(False)
    model = DDP(module)
    step(model, batch(0, 0))
    module.b.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"b\.weight, b\.bias did not require a gradient .* wrap the module again"):
        model(batch(0, 0))


def check_replaced(rank: int, what: str) -> None:
    model = DDP(make_model(), sync=fnddp.parse(WITH_RESIDUAL), **SMALL)
    step(model, batch(rank, 0))
    torch.manual_seed(5)
    layer = nn.Linear(64, 64)
    if what == "parameter":
        model.module[2].weight, model.module[2].bias = layer.weight, layer.bias
    else:
        model.module[2] = layer
    plain, state = copy.deepcopy(model.module), model.sync_state
    for i in range(1, 4):
        want, state = by_hand(model.sync, plain, state, batch(rank, i))
        step(model, batch(rank, i), descends=False)
        got = {n: p.grad for n, p in model.module.named_parameters()}
        assert bits([got[n] for n in want]) == bits(list(want.values()))
        assert bits(model.sync_state) == bits(state)


@pytest.mark.parametrize("what", ["parameter", "module"])
def test_replaced_parameters_are_synchronized(gloo, what):
    gloo(2, check_replaced, what)


def check_replaced_by_another_shape(rank: int, what: str) -> None:
    model = DDP(make_model())
    last = nn.Linear(64, 7)
    if what == "parameter":
        model.module[4].weight, model.module[4].bias = last.weight, last.bias
    else:
        model.module[4] = last
    with pytest.raises(ValueError, match=r"'4\.weight' is now float32\[7, 64\], but was float32\[4, 64\]"):
        step(model, batch(rank, 0))


@pytest.mark.parametrize("what", ["parameter", "module"])
def test_parameters_replaced_by_others_of_another_shape_are_named(gloo, what):
    gloo(2, check_replaced_by_another_shape, what)


def check_is_torchs(rank: int) -> None:
    model = DDP(make_model())
    assert isinstance(model, TorchDDP)
    assert issubclass(DDP, TorchDDP)
    with pytest.raises(TypeError, match=r"fnddp.*DistributedDataParallel.*sync"):
        fnddp.register(model, fp16(allreduce))
    with pytest.raises(TypeError, match="register: expected a torch"):
        fnddp.register(make_model(), allreduce)
    step(model, batch(rank, 0))
    assert_equal_on_ranks(grads_of(model))


def test_it_passes_for_torchs_class_but_has_no_hook_slot(gloo):
    gloo(2, check_is_torchs)


# Checkpoints


CHECKPOINTED = f"warmup({COMPRESSED}, steps=1)"


def wrapped_for_checkpoint() -> DDP:
    return DDP(make_model(), sync=fnddp.parse(CHECKPOINTED), **SMALL)


def save(rank: int, folder: str) -> dict[str, Any]:
    model = wrapped_for_checkpoint()
    for i in range(3):
        step(model, batch(rank, i))
    dcp.save({"model": model.state_dict(), "sync": model.sync_checkpoint()}, checkpoint_id=folder)
    saved = {key: copy.deepcopy(value) for key, value in fnddp.state_dict(model.sync_state).items()}
    for i in range(3, 6):
        step(model, batch(rank, i))
    return {"saved": saved, "later": (bits(model.state_dict()), bits(model.sync_state))}


def load(rank: int, folder: str, saved_world_size: int | None, steps: int) -> dict[str, Any]:
    model = wrapped_for_checkpoint()
    state = model.state_dict()
    dcp.load({"model": state, "sync": model.sync_checkpoint(saved_world_size)}, checkpoint_id=folder)
    model.load_state_dict(state)
    loaded = {key: copy.deepcopy(value) for key, value in fnddp.state_dict(model.sync_state).items()}
    for i in range(3, 3 + steps):
        step(model, batch(rank, i))
    assert_equal_on_ranks(model.state_dict())
    return {"saved": loaded, "later": (bits(model.state_dict()), bits(model.sync_state))}


@pytest.mark.parametrize("n", [1, 2])
def test_a_checkpoint_resumes_to_the_bit(gloo, tmp_path, n):
    saved = gloo(n, save, str(tmp_path))
    loaded = gloo(n, load, str(tmp_path), None, 3)
    for before, after in zip(saved, loaded, strict=True):
        assert list(after["saved"]) == list(before["saved"])
        assert bits(after["saved"]) == bits(before["saved"])
        assert after["later"] == before["later"]


@pytest.mark.parametrize(("n", "then"), [(4, 2), (2, 4), (2, 3), (3, 2), (1, 2)])
def test_a_checkpoint_for_another_number_of_ranks_keeps_the_mean_of_residuals(gloo, tmp_path, n, then):
    before = [result["saved"] for result in gloo(n, save, str(tmp_path))]
    after = [result["saved"] for result in gloo(then, load, str(tmp_path), n, 2)]
    for key, value in before[0].items():
        if key.startswith("replicated/"):
            assert all(bits([ranks[key]]) == bits([value]) for ranks in after), key
        else:
            want, got = (torch.stack([ranks[key] for ranks in all_ranks]).mean(0) for all_ranks in (before, after))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)  # the order of a sum


SIZES = st.integers(1, 64)


@given(size=SIZES, saved_size=SIZES)
def test_shares_keep_the_mean(size, saved_size):
    each = [shares(rank, size, saved_size) for rank in range(size)]
    for mine in each:
        assert sum(mine.values()) == pytest.approx(1)
        assert all(share > 0 for share in mine.values())
        assert set(mine) <= set(range(saved_size))
    for saved in range(saved_size):
        assert sum(mine.get(saved, 0) for mine in each) == pytest.approx(size / saved_size)
    if size == saved_size:
        assert each == [{rank: 1.0} for rank in range(size)]


# What tools do with torch's class


def check_optimizers_in_backward(rank: int, text: str) -> None:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of what it imports
        from torch.distributed.optim import _apply_optimizer_in_backward
    model, plain = (DDP(make_model(), sync=fnddp.parse(text)) for _ in range(2))
    for _ in range(2):  # two for each parameter
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(3):
        total(model(batch(rank, step))).backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.zero_grad()
        total(plain(batch(rank, step))).backward()
        optimizer.step()
        optimizer.step()
        assert bits(list(model.parameters())) == bits(list(plain.parameters()))


@pytest.mark.parametrize("text", ["allreduce", COMPRESSED])
def test_optimizers_that_step_in_backward(gloo, text):
    gloo(2, check_optimizers_in_backward, text)


def check_manual_optimization(rank: int) -> None:
    """As lightning's DDPStrategy does it: forward must not prepare for backward, the strategy does."""
    model, plain = (DDP(make_model()) for _ in range(2))
    model.module.register_forward_hook(lambda *_: setattr(model, "require_backward_grad_sync", False))
    for step in range(2):
        loss = total(model(batch(rank, step)))
        model.require_backward_grad_sync = True
        model.require_forward_param_sync = True
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([])
        loss.backward()
        total(plain(batch(rank, step))).backward()
        assert bits([p.grad for p in model.parameters()]) == bits([p.grad for p in plain.parameters()])


def test_manual_optimization_as_in_lightning(gloo):
    gloo(2, check_manual_optimization)


def check_new_parameters(rank: int) -> None:
    model = DDP(make_model())
    model.module.append(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"5.weight, 5.bias came into the module after it was wrapped"):
        model(batch(rank, 0))
    model = DDP(make_model())
    model.module = nn.Sequential(make_model())
    with pytest.raises(RuntimeError, match=r"0.0.weight, 0.0.bias, .* came into the module"):
        model(batch(rank, 0))


def test_parameters_that_come_later_are_named(gloo):
    gloo(2, check_new_parameters)


def make_convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3, bias=False))


def images(rank: int) -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(rank))


def mean_grads(module: nn.Module, rank: int, backwards: int = 1) -> list[Tensor]:
    """What gradients must be: the mean over ranks of those of the bare module."""
    loss = total(module(images(rank)))
    for _ in range(backwards):
        loss.backward(retain_graph=True)
    return [torch.stack(gather(p.grad.contiguous())).mean(0) for p in module.parameters()]


def assert_close_grads(model: DDP, expected: list[Tensor]) -> None:
    for p, mean in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, mean, rtol=1e-5, atol=1e-7)  # convolutions round by memory format
        assert p.grad.stride() == p.stride()


def check_memory_formats(rank: int, on_ranks: list[int]) -> None:
    model, expected = DDP(make_convolutions()), mean_grads(make_convolutions(), rank)
    if rank in on_ranks:
        model.to(memory_format=torch.channels_last)
    for _ in range(3):
        model.zero_grad()
        total(model(images(rank))).backward()
        assert_close_grads(model, expected)


@pytest.mark.parametrize("on_ranks", [[0, 1], [1]])
def test_another_memory_format_after_wrapping(gloo, on_ranks):
    gloo(2, check_memory_formats, on_ranks)


def check_same_graph_twice(rank: int) -> None:
    model = DDP(make_convolutions())
    loss = total(model(images(rank)))
    loss.backward(retain_graph=True)
    assert_close_grads(model, mean_grads(make_convolutions(), rank))
    loss.backward(retain_graph=True)
    assert_close_grads(model, mean_grads(make_convolutions(), rank, backwards=2))
    model.zero_grad()
    loss.backward()
    assert_close_grads(model, mean_grads(make_convolutions(), rank))


def test_the_same_graph_twice(gloo):
    gloo(2, check_same_graph_twice)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def check_parametrizations(rank: int) -> None:
    model, bare = DDP(make_convolutions()), make_convolutions()
    total(model(images(rank))).backward()
    for module in (model.module, bare):
        nn.utils.parametrize.register_parametrization(module[0], "weight", Doubled())
    expected = mean_grads(bare, rank)
    for _ in range(2):
        model.zero_grad()
        total(model(images(rank))).backward()
        assert_close_grads(model, expected)
    nn.utils.parametrizations.weight_norm(model.module[2])
    with pytest.raises(RuntimeError, match="2.parametrizations.weight.original0, .* came into the module"):
        model(images(rank))


def test_parametrizations_after_wrapping(gloo):
    gloo(2, check_parametrizations)


def check_delayed_reduction(rank: int) -> None:
    model = DDP(make_model(), static_graph=True)
    total(model(batch(rank, 0))).backward()
    before = bits(grads_of(model))
    model.reducer._delay_all_reduce()  # lightning: behind the first backward of manual optimization
    assert bits(grads_of(model)) == before


def test_static_graph_and_manual_optimization_as_in_lightning(gloo):
    gloo(2, check_delayed_reduction)
