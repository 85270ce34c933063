"""Errors of a wrapped module, after each of which it goes on as if nothing had been."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import CollectiveError, DistributedDataParallel, allreduce, error_feedback, fp16
from fnddp.laws import gather
from fnddp.wire import control
from tests.ranks import on_ranks

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


def stand_ins(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}


@on_ranks(1)
def test_a_pipeline_is_no_device_and_a_module_on_the_cpu_has_none(rank: int) -> None:
    wrong: Any = fp16(allreduce)
    with pytest.raises(TypeError, match=r"second argument is device_ids.*sync=fp16\(allreduce\)"):
        DistributedDataParallel(nn.Linear(4, 2), wrong)
    for given in ({"device_ids": [0]}, {"output_device": 0}):
        with pytest.raises(ValueError, match=r"device_ids .* are for modules on one GPU, got parameters on \['cpu'\]"):
            wrapped(**given)
    with pytest.raises(ValueError, match=r"device_ids must name one device, got \[0, 1\]"):
        wrapped(device_ids=[0, 1])
    require_mean(wrapped(), rank, 1)


@on_ranks(2)
def test_what_ranks_without_inputs_cannot_follow(rank: int) -> None:
    model = wrapped()
    with pytest.raises(RuntimeError, match="run out of inputs give no weight"), model.weight(2):
        model.join()
    with model.join():
        with pytest.raises(RuntimeError, match="run out of inputs give no weight"), model.weight(1.0):
            pass
        with pytest.raises(RuntimeError, match=r"cannot follow torch.func or .*wrapped with: weight, bias"):
            torch.func.functional_call(model, stand_ins(model), (X,))
        for _ in range(2 + rank):
            model(X).sum().backward()
    require_mean(model, rank, 2)


def test_a_backward_synchronizes_parameters_or_what_stands_for_them():
    model = wrapped()
    tensors = stand_ins(model)
    other = torch.func.functional_call(model, tensors, (X,)).sum()
    both = model(X).sum() + other
    with pytest.raises(RuntimeError, match="tensors that stand for parameters cannot be a part of one that synchron"):
        both.backward()
    assert model.sync_stats()["steps"] == 0
    require_mean(model, 0, 1)
    assert model.sync_stats()["failed_steps"] == 1


def test_a_backward_that_is_running_has_not_finished():
    model = wrapped()
    found: list[str] = []

    def look(grad: Tensor) -> None:
        with pytest.raises(RuntimeError, match="has not finished"):
            model._check_reducer_finalized()
        found.append("open")

    model.module.bias.register_post_accumulate_grad_hook(look)
    require_mean(model, 0, 1)
    model._check_reducer_finalized()
    assert found == ["open"]


@on_ranks(2)
def test_without_its_hooks_gradients_are_the_ranks_own(rank: int) -> None:
    model = wrapped()
    require_mean(model, rank, 2)
    model._remove_autograd_hooks()
    model.zero_grad()
    ((1 + rank) * model(X).sum()).backward()
    assert model.module.bias.grad.tolist() == [3.0 * (1 + rank)] * 2


def test_buffers_that_cannot_be_made_equal(monkeypatch):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.BatchNorm1d(4))

    def gone(*_: Any, **__: Any) -> None:
        raise RuntimeError("connection closed")

    with monkeypatch.context() as patch:
        patch.setattr(control, "broadcast", gone)
        with pytest.raises(CollectiveError, match=r"could not be made equal in forward: connection closed\. Another"):
            model(X)
    with pytest.raises(RuntimeError, match=r"CollectiveError|connection closed"):
        model(X)


def test_a_state_dict_with_the_pipelines_state_takes_a_prefix():
    model = wrapped(sync=error_feedback(fp16(fnddp.allreduce)))
    names = ["sync_state.local/residual.weight", "sync_state.local/residual.bias"]
    assert list(model.state_dict(sync_state=True, prefix="net.")) == [
        *("net.module.weight", "net.module.bias"),
        *(f"net.{name}" for name in names),
    ]
    assert list(model.state_dict(sync_state=True)) == ["module.weight", "module.bias", *names]
    assert list(model.state_dict()) == ["module.weight", "module.bias"]


@on_ranks(2)
def test_ranks_with_other_options(rank: int) -> None:
    for options, rank_0, rank_1 in (
        ({"bucket_cap_mb": 1 + rank}, "buckets of 1 MiB", "buckets of 2 MiB"),
        ({"static_graph": rank == 1}, "static_graph=False", "static_graph=True"),
        ({"skip_all_reduce_unused_params": rank == 1}, "unused_params=False", "unused_params=True"),
    ):
        match = f"ranks disagree about options: rank 0: .*{rank_0}.*; rank 1: .*{rank_1}"
        with pytest.raises(fnddp.RankMismatchError, match=match):
            wrapped(**options)
    model = DistributedDataParallel(nn.Linear(4, 2), bucket_cap_mb=1 + rank, init_sync=False)  # nobody looks
    assert gather(model.bucket_bytes_cap) == [2**20, 2**21]


@on_ranks(2)
def test_a_module_that_is_wrapped_in_torchs_class_too_is_refused(rank: int) -> None:
    for inner in (TorchDDP(nn.Linear(2, 1)), nn.Sequential(TorchDDP(nn.Linear(2, 1)))):
        with pytest.raises(RuntimeError, match="is wrapped in torch's DistributedDataParallel, too, .* one of the two"):
            DistributedDataParallel(inner)
    outer = TorchDDP(nn.Sequential(DistributedDataParallel(nn.Linear(2, 1)), nn.Linear(1, 1)))
    with pytest.raises(RuntimeError, match=r"a module of which it is a part, is wrapped in torch's"):
        outer(torch.ones(1, 2))


@on_ranks(2)
def test_what_is_a_sum_over_ranks_is_not_added_up_again(rank: int) -> None:
    model = wrapped(sync=fnddp.all_reduce(op="sum"))
    model(X).sum().backward()
    before = model.module.bias.grad
    assert before is not None
    assert before.tolist() == [6.0, 6.0]
    with pytest.raises(RuntimeError, match=r"'weight' has a gradient that is a sum over ranks .* within no_sync\(\)"):
        model(X).sum().backward()
    assert before.tolist() == [6.0, 6.0]
    for set_to_none in (True, False):
        model.zero_grad(set_to_none)
        with model.no_sync():
            model(X).sum().backward()
        model(X).sum().backward()
        assert model.module.bias.grad.tolist() == [12.0, 12.0]


@on_ranks(2)
def test_a_module_of_ours_may_run_in_the_forward_of_another_one_of_torchs_class(rank: int) -> None:
    teacher = wrapped()

    class Student(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x) - teacher(x)

    assert TorchDDP(Student(4, 2))(X).shape == (3, 2)
