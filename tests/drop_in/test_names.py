"""Names that tools read and call give what they give on torch's class, whatever the options."""

import inspect
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import DistributedDataParallel as DDP
from fnddp.laws import bits
from tests.models import (
    COMPRESSED,
    OF_TORCH,
    Mixed,
    Parts,
    batch,
    grads_of,
    loss_of,
    make_model,
    normed,
    since_213,
    step,
    steps_alike,
)
from tests.ranks import on_ranks

ATTRIBUTES = {
    *("device", "device_ids", "output_device", "dim", "device_type", "is_multi_device_module", "static_graph"),
    *("find_unused_parameters", "gradient_as_bucket_view", "batched_grad_copy", "mixed_precision", "process_group"),
    *("require_backward_grad_sync", "require_forward_param_sync", "forward_sync_buffers", "broadcast_buffers"),
    *("bucket_bytes_cap", "bucket_bytes_cap_list", "broadcast_bucket_size", "skip_all_reduce_unused_params"),
    "parameters_to_ignore",
}
OPTIONS: list[dict[str, Any]] = [
    *({}, {"device_ids": None, "output_device": None, "dim": 1}, {"device_ids": []}, {"find_unused_parameters": True}),
    *({"gradient_as_bucket_view": True}, {"static_graph": True}, {"batched_grad_copy": True}, {"init_sync": False}),
    *({"bucket_cap_mb": 0.0005}, {"bucket_cap_mb": 100}, {"bucket_cap_mb_list": [0.0001, 0.001]}),
    *({"forward_sync_buffers": False}, {"broadcast_buffers": False}, {"check_reduction": True}),
    *({"broadcast_buffers": True}, {"broadcast_buffers": False, "forward_sync_buffers": True}),
    {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
    *([{"lazy_bucket_allocation": True}] if "lazy_bucket_allocation" in OF_TORCH else []),
]
DEPRECATED = {"broadcast_buffers", "check_reduction"}


def test_arguments_are_torchs_and_three_more():
    """Those of the newest torch; an older one lacks the last ones."""
    signatures = (inspect.signature(cls).parameters.values() for cls in (DDP, TorchDDP))
    ours, theirs = ([(p.name, p.default, p.kind) for p in each] for each in signatures)
    *positional, sync, wire, backend = ours
    assert [sync[0], wire[0], backend[0]] == ["sync", "wire", "backend"]
    known = {name for name, *_ in positional}
    new = [name for name, *_ in theirs if name not in known]
    assert not new, (
        f"torch {torch.__version__}: its DistributedDataParallel takes {new} too; let that of fnddp take them at the "
        "same places, keep them as attributes, and say in docs/ddp-reference.md what they do there and here"
    )
    if "forward_sync_buffers" not in OF_TORCH:  # the default of its older name was True
        theirs = [(name, None if name == "broadcast_buffers" else default, kind) for name, default, kind in theirs]
    assert positional[: len(theirs)] == theirs, f"torch {torch.__version__} has other places or defaults"


@on_ranks(1)
def test_public_names_are_there(rank: int) -> None:
    assert [name for name in vars(TorchDDP) if not name.startswith("_") and not hasattr(DDP, name)] == []
    ours = DDP(normed())
    assert isinstance(ours, TorchDDP)
    assert issubclass(DDP, TorchDDP)
    missing = {name for name in vars(TorchDDP(normed())) if not name.startswith("_") and not hasattr(ours, name)}
    assert missing <= {"logger", "bucket_bytes_cap_default"}


def wrapped(make: Any, options: dict[str, Any]) -> list[Any]:
    """Modules wrapped in our class and in torch's, which warn alike, with buffers that differ by rank before."""
    models = []
    for cls in (DDP, TorchDDP):
        module = make()
        for buffer in module.buffers():
            buffer += dist.get_rank()
        with pytest.warns(FutureWarning) if DEPRECATED & options.keys() else nullcontext() as warned:
            models.append(cls(module, **options))
        future = [warning for warning in warned or () if warning.category is FutureWarning]
        assert all(warning.filename == __file__ for warning in future)  # where the user wraps the module
    return models


@since_213
@on_ranks(2)
def test_every_option_gives_torchs_bits_and_attributes(rank: int) -> None:
    some_unused = [(Parts, options) for options in OPTIONS if options.get("find_unused_parameters")]
    for make, options in [*((normed, options) for options in OPTIONS), *some_unused, (Mixed, {})]:
        ours, theirs = wrapped(make, options)
        for name in ATTRIBUTES | ({"lazy_bucket_allocation"} & OF_TORCH.keys()):
            assert getattr(ours, name) == getattr(theirs, name), (name, options)
        for steps in (0, 3):
            steps_alike(rank, ours, theirs, at=range(steps), use=["ab"] if make is Parts else [])
            assert bits(ours.state_dict()) == bits(theirs.state_dict())  # buffers too, each rank's as torch's


@on_ranks(2)
def test_buffers_are_made_equal_when_they_are_due(rank: int) -> None:
    model = DDP(normed())
    assert model.will_sync_module_buffers()
    assert list(model.named_module_buffers) == [name for name, _ in model.module.named_buffers()]
    assert len(model.modules_buffers) == 3
    mean = model.module[1].running_mean
    model.require_forward_param_sync = False
    assert not model.will_sync_module_buffers()
    mean += rank
    with torch.no_grad():
        model.eval()(batch(rank, 0))
    assert mean[0] == rank
    model.require_forward_param_sync, model.forward_sync_buffers = True, False
    assert not model.will_sync_module_buffers()
    model.broadcast_buffers = True
    assert model.will_sync_module_buffers()
    assert not DDP(nn.Linear(2, 2)).will_sync_module_buffers()
    model._default_broadcast_coalesced(authoritative_rank=1)
    assert mean[0] == 1
    own = torch.tensor([float(rank)])
    model._default_broadcast_coalesced([own])
    assert own == 0


def test_other_names_that_tools_use():
    model = DDP(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True), nn.Embedding(3, 2)))
    parameters, sparse = model._build_params_for_reducer()
    assert sparse == [False, False, True, False]
    names = [name for name, _ in model.module.named_parameters()]
    assert model._build_debug_param_to_name_mapping(parameters) == dict(enumerate(names))
    x = torch.ones(2, 2)
    (inputs,), (kwargs,) = model.to_kwargs((x,), {"y": x}, 0)
    assert torch.equal(inputs[0], kwargs["y"])
    with pytest.raises(TypeError, match="Accelerate would wrap"):
        _ = model._is_accelerate_prepared


@on_ranks(1)
def test_a_static_graph_is_set_once_and_before_training(rank: int) -> None:
    for cls in (DDP, TorchDDP):
        model, late = cls(make_model()), cls(make_model())
        model._set_static_graph()
        assert model.static_graph
        with pytest.warns(UserWarning, match="static_graph to be True, no need to set it again"):
            model._set_static_graph()
        for i in range(2):
            step(model, batch(rank, i))
            step(late, batch(rank, i))
        with pytest.raises(RuntimeError, match="before training loop starts"):
            late._set_static_graph()


@on_ranks(2)
def test_methods_that_tools_call_on_the_reducer(rank: int) -> None:
    model = DDP(Parts())
    step(model, batch(rank, 0), "ab")
    before = bits(grads_of(model))
    model.reducer._delay_all_reduce()  # lightning: after the first backward of a static graph
    assert bits(grads_of(model)) == before
    assert model.reducer._ddp_graph_static()
    assert model.reducer._rebuild_buckets() is False
    step(model, batch(rank, 1), "abc")
    assert not model.reducer._ddp_graph_static()
    with model.no_sync():
        output = model(batch(rank, 2))
    model.reducer.prepare_for_backward([])
    model.zero_grad()
    output.sum().backward()
    other = model.module.a.bias.grad.clone()
    dist.all_reduce(other)
    assert torch.equal(other, 2 * model.module.a.bias.grad)


@pytest.mark.parametrize("text", ["allreduce", COMPRESSED])
@on_ranks(2)
def test_optimizers_that_step_in_backward(rank: int, text: str) -> None:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of what it imports
        from torch.distributed.optim import _apply_optimizer_in_backward
    model, plain = (DDP(make_model(), sync=fnddp.parse(text)) for _ in range(2))
    for _ in range(2):  # two for each parameter
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for i in range(3):
        loss_of(model(batch(rank, i))).backward()
        assert all(p.grad is None for p in model.parameters())
        step(plain, batch(rank, i), descends=False)
        optimizer.step()
        optimizer.step()
        assert bits(list(model.parameters())) == bits(list(plain.parameters()))
