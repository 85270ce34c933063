"""Hooks of users do what they do in torch's class."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation

import fnddp
from fnddp import DistributedDataParallel as DDP
from fnddp import allreduce, fp16
from fnddp.laws import bits
from tests.drop_in.models import (
    SMALL,
    assert_equal_on_ranks,
    grads_of,
    normed,
    since_213,
    step,
    steps_alike,
)
from tests.ranks import on_ranks
from tests.test_register import batch, make_model


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
    if name != "partial":
        assert ours._get_ddp_logging_data()["comm_hook"] == theirs._get_ddp_logging_data()["comm_hook"]


@on_ranks(2)
def test_errors_of_hooks(rank: int) -> None:
    for cls in (DDP, TorchDDP):
        model = cls(make_model())
        with pytest.raises(TypeError, match="hook must be callable"):
            model.register_comm_hook(None, 3)
        assert "must be callable" in model._get_ddp_logging_data()["error"]
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


def average_buffers(calls: list[str], named: dict[str, Tensor]) -> list[torch.futures.Future[Tensor]]:
    calls.append("called")
    floats = [buffer for buffer in named.values() if buffer.is_floating_point()]
    for buffer in floats:
        buffer /= dist.get_world_size()
    return [dist.all_reduce(buffer, async_op=True).get_future() for buffer in floats]


def average_buffers_now(calls: list[str], named: dict[str, Tensor]) -> None:
    torch.futures.wait_all(average_buffers(calls, named))


@since_213
@pytest.mark.parametrize(
    ("hook", "location"),
    [(average_buffers_now, "PRE_FORWARD"), (average_buffers_now, "POST_FORWARD"), (average_buffers, "POST_FORWARD")],
)
@on_ranks(2)
def test_buffer_hooks(rank: int, hook: Callable[..., Any], location: str) -> None:
    ours, theirs = DDP(normed()), TorchDDP(normed())
    calls: dict[nn.Module, list[str]] = {ours: [], theirs: []}
    for model, mine in calls.items():
        model._register_buffer_comm_hook(mine, hook, _BufferCommHookLocation[location])
        for i in range(3):
            step(model, batch(rank, i))
    assert bits(ours.state_dict()) == bits(theirs.state_dict())
    assert len(calls[ours]) == len(calls[theirs]) == 3
