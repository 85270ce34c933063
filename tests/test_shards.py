"""Codecs on what FSDP2 sends between shards, on gloo ranks, against FSDP2 itself and one process with all batches."""

import gc
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import fnddp
from fnddp import Link, RankMismatchError, StepFailedError, WireCounter
from fnddp.integrations.checkpoint import load, save
from fnddp.integrations.fsdp import compress, compress_replicas, compress_shards, plan_axes
from fnddp.laws import bits
from fnddp.transforms.memory import widened
from tests.peers import everyones
from tests.ranks import on_ranks
from tests.sharded import Net, batches, gathered, local, loss, meshes, sharded, switched_off, train, whole


def whole_grads(model: nn.Module) -> dict[str, Tensor]:
    parameters: Any = model.named_parameters()
    return {name: p.grad.full_tensor() for name, p in parameters if p.grad is not None}


def local_grads(x: Tensor, extra: bool = True) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net()
    loss(model, x, extra=extra).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def sent(handle: Any, what: str, only: str | None = None) -> int:
    """Return the bytes of "gradients" or of "weights" of all groups of parameters, or of one."""
    return sum(
        nbytes for name, each in handle.traffic.items() for _, nbytes, _ in getattr(each, what) if only in (None, name)
    )


def change(*models: nn.Module, by: Callable[[Tensor], Tensor]) -> None:
    """Change all weights, as an optimizer does."""
    with torch.no_grad():
        for model in models:
            for p in model.parameters():
                p.copy_(by(p))


def along_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % dist.get_world_size() == 0 else None


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "reduced in 16 bits": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "columns": {"shard_placement_fn": along_columns},
    "frozen": {"frozen": True},
    "checkpointed": {"checkpointed": True},
    "compiled": {"compiled": True},
    "two modules in a group": {"grouped": True},
    "over two": {"reshard_after_forward": 2},
}


@pytest.mark.thorough
@on_ranks(2, 4)
def test_without_a_codec_it_is_fsdp(rank: int) -> None:
    """With any option of FSDP, with gradients accumulated whole and as shards, and a layer left out.

    To the bit on 2 ranks. On 4 sums are in rank order here, in another one there: with what depends on their number.
    """
    is_exact = dist.get_world_size() == 2
    tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 1e-5, "atol": 2e-6}
    for name, options in OPTIONS.items():
        if not is_exact and name not in ("plain", "columns", "over two"):
            continue
        native, ours = sharded(**options), sharded(**options)
        handle = compress_shards(ours, "two_shot", "allgather")
        train(native, batches(3))
        train(ours, batches(3))
        torch.testing.assert_close(local(ours), local(native), **tolerance)
        of_fsdp, of_ours = (partial(switched_off, each.set_requires_gradient_sync) for each in (native, ours))
        for mine in (handle.no_sync, of_ours):
            train(native, batches(2), of_fsdp)
            train(ours, batches(2), mine)
            torch.testing.assert_close(local(ours), local(native), **tolerance)
        for model in (native, ours):  # shards of two backwards add up, and some use less than all parameters
            loss(model, batches(1)[0]).backward()
            loss(model, batches(1, seed=9)[0], extra=False).backward()
        torch.testing.assert_close(whole_grads(ours), whole_grads(native), **tolerance)
        assert handle.steps == 3 * 2 + 2 * 2 + 2, name


@pytest.mark.parametrize("factor", [3.0, 1.0])
@on_ranks(2)
def test_factors_of_the_user_are_kept(rank: int, factor: float) -> None:
    """Set before or after, as FSDP divides itself; gloo has no other operation for them than the sum."""
    (x,) = batches(1)
    before, after, native = sharded(), sharded(), sharded()
    compress_shards(after, "two_shot")
    for model in (before, after, native):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
                module.set_force_sum_reduction_for_comms(True)
    compress_shards(before, "two_shot")
    for model in (before, after, native):
        loss(model, x).backward()
    for a, b, want in zip(*(whole_grads(model).values() for model in (before, after, native)), strict=True):
        assert torch.equal(a, want)
        assert torch.equal(b, want)


@pytest.mark.parametrize(("bits", "steps"), [(8, 127), (4, 7)])
@on_ranks(2)
def test_quantized_gradients_and_weights(rank: int, bits: int, steps: int) -> None:
    """Means are within half a step of the largest of a row; bytes are those of the plan; master weights are exact."""
    (x,) = batches(1)
    ours = sharded(reshard_after_forward=False)
    handle = compress_shards(ours, f"quantize(two_shot, bits={bits})", f"quantize(allgather, bits={bits})")
    masters = whole(ours)
    with WireCounter() as counter:
        out = ours(x)["out"]
        out.square().mean().backward()
    assert counter.wire_bytes == sent(handle, "gradients") + sent(handle, "weights")
    given = whole_grads(ours)
    # A row of codes takes `bits` an element, and a scale of 4 bytes for each 128.
    widths = {"layers.0": (5 * 6 + 5), "layers.1": (3 * 9 + 3), "layers.2": (5 + 1), "extra": (3 * 5 + 3)}
    for name, width in widths.items():
        codes = -(-width * bits // 8)
        assert sent(handle, "gradients", name) == 2 * (codes + 4), name
        assert sent(handle, "weights", name) == codes + 4, name

    ours.zero_grad()
    seen = gathered(ours)
    for parameter in seen.values():
        assert torch.equal(*everyones(parameter))
    largest = max(float(p.abs().max()) for p in masters.values())
    error = max(float((seen[name] - master).abs().max()) for name, master in masters.items())
    assert 0 < error <= largest / steps / 2 * 1.001
    assert all(torch.equal(p, masters[name]) for name, p in whole(ours).items())

    plain = Net()
    plain.load_state_dict(seen)
    loss(plain, x).backward()
    want = {name: p.grad for name, p in plain.named_parameters()}
    everyone: Any = everyones(want)
    largest = max(float(grad.abs().max()) for each in everyone for grad in each.values())
    for name, grad in given.items():
        mean = sum(each[name] for each in everyone) / len(everyone)
        assert float((grad - mean).abs().max()) <= largest / steps / 2 * 1.001, name


@on_ranks(2)
def test_differences_of_weights_end_at_the_weights(rank: int) -> None:
    """The error of what is sent is left for the next difference; backward sends no weights, nor do equal ones."""
    (x,) = batches(1)
    ours = sharded()
    handle = compress_shards(ours, weights="ef21(quantize(allgather, bits=4))")
    plain = sharded()
    want = loss(plain, x)
    assert torch.equal(loss(ours, x), want)  # the first time they are sent as they are
    errors: list[float] = []
    for step in (0.1, 1e-2, 1e-3, 1e-4):
        change(ours, plain, by=lambda p, step=step: p + step * p.sin())
        with WireCounter() as counter:
            value = loss(ours, x)
        assert counter.wire_bytes == sent(handle, "weights")
        errors.append(abs(float(value.detach() - loss(plain, x).detach())))
    assert errors[-1] < errors[0] / 50
    with WireCounter() as counter:
        value.backward()
    assert counter.wire_bytes == sent(handle, "gradients")
    with WireCounter() as counter, torch.no_grad():
        assert torch.equal(loss(ours, x), value)
    assert counter.wire_bytes == 0
    change(ours, plain, by=lambda p: p + 1e-4)
    handle.sync_state = handle.sync_state  # as when a checkpoint is loaded, with other weights
    assert torch.equal(loss(ours, x), loss(plain, x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@on_ranks(2)
def test_differences_of_weights_of_other_dtypes(rank: int, dtype: torch.dtype) -> None:
    model: Any = fully_shard(nn.Linear(6, 6, bias=False).to(dtype))
    compress_shards(model, weights="ef21(quantize(allgather))")
    for _ in range(3):
        want = whole(model)["weight"]
        torch.testing.assert_close(model(torch.eye(6, dtype=dtype)).T, want, rtol=0.0, atol=0.01)
        model.reshard()
        change(model, by=lambda p: 1.01 * p)


@pytest.mark.parametrize("weights", ["ef21(quantize(allgather, bits=4))", "ef21(topk(allgather, ratio=0.1))"])
@on_ranks(2)
def test_differences_follow_weights_whoever_writes_them(rank: int, weights: str) -> None:
    """They are written by an optimizer, a loaded checkpoint, or into the tensors; on one rank, and not finite.

    A backward finds those of its forward, also where other forwards came between.
    """
    x, y = batches(2)
    ours, plain, other = sharded(), sharded(), sharded(seed=1)
    handle = compress_shards(ours, "two_shot", weights)
    for model in (ours, plain):
        train(model, batches(3))  # with which a loaded model is not compared: codecs have had their errors
    with torch.inference_mode():  # an evaluation
        loss(ours, x)
    loss(ours, x).backward()
    want = whole_grads(ours)
    ours.zero_grad()
    value = loss(ours, x)
    with torch.no_grad():
        loss(ours, y)
    loss(ours, y)
    value.backward()
    assert bits(whole_grads(ours)) == bits(want)
    for values in (other.state_dict(), {name: 1.05 * value for name, value in other.state_dict().items()}):
        for model in (ours, plain):
            model.load_state_dict(values)
        assert torch.equal(loss(ours, x), loss(plain, x))
    first = next(ours.parameters()).to_local()  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad():
        change(ours, plain, by=lambda p: 2 - p)  # as torch.distributed.checkpoint does
        assert torch.equal(loss(ours, x), loss(plain, x))
        good = first.clone()
        if rank == 0:
            first[0, 0] = float("nan")
        assert not loss(ours, x).isfinite()
        first.copy_(good)
        assert torch.equal(loss(ours, x), loss(plain, x))
    handle.sync_state = handle.sync_state
    with torch.inference_mode():
        loss(ours, x)
    loss(ours, x).backward()


@on_ranks(2)
def test_compress_after_an_evaluation(rank: int) -> None:
    """Such as an evaluation before training, after which FSDP leaves whole what is not in a group of its own."""
    (x,) = batches(1)
    mesh = meshes(1, 2)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    fully_shard(model[1], mesh=mesh["shard"])
    ours: Any = fully_shard(model, mesh=mesh["shard"])
    with torch.no_grad():
        ours(x)
    handle = compress(ours, mesh, gradients="two_shot", replicas="allreduce")
    ours(x).sum().backward()
    assert handle.sync_stats()["steps"] == 1


@on_ranks(2)
def test_statistics_are_those_of_the_next_step(rank: int) -> None:
    (x,) = batches(1)
    ours = sharded()
    handle = compress(ours, meshes(2, names="shard"), gradients="quantize(two_shot)", weights="quantize(allgather)")
    told: list[int] = []
    for set_up in (lambda _: None, ours.set_reshard_after_forward, ours.layers[1].requires_grad_):
        set_up(False)
        loss(ours, x).backward()
        ours.zero_grad()
        with WireCounter() as counter:
            loss(ours, x).backward()
        stats = handle.sync_stats()
        told.append(stats["gradients_bytes"] + stats["weights_bytes"])
        assert told[-1] == counter.wire_bytes
    assert told[0] > told[1] > told[2]


@pytest.mark.parametrize(
    ("weights", "residual", "lost"),
    [((), "float32", 1e-6), ((3, 1), "float32", 1e-6), ((), "int8", 0.02)],
    ids=["plain", "weighted", "int8"],
)
@on_ranks(2)
def test_error_feedback_loses_nothing(rank: int, weights: tuple[int, ...], residual: str, lost: float) -> None:
    """A layer that a step leaves out keeps what it has; a parameter that is unfrozen later has memory from then on."""
    ours = sharded(frozen=True)
    sync = f"error_feedback(sign(two_shot), residual={residual!r})"
    handle = compress_shards(ours, f"weighted({sync})" if weights else sync)
    expected: dict[str, Tensor] = {}
    for step, x in enumerate(batches(4)):
        extra = step != 2
        ours.layers[1].weight.requires_grad_(step > 0)
        shares = [each / sum(weights) for each in weights[:: -1 if step % 2 else 1]] or [0.5, 0.5]
        with handle.weight(12 * shares[rank]) if weights else nullcontext():
            loss(ours, x, extra=extra).backward()
        for name, grad in local_grads(x, extra).items():
            if step > 0 or name != "layers.1.weight":
                expected[name] = expected.get(name, torch.zeros(())) + sum(everyones(grad * shares[rank]))
    kept = {name: x for state in widened(handle.sync_state).values() for name, x in state.residual.items()}
    for name, out in whole_grads(ours).items():
        assert kept[name].shape == out.shape
        mean = sum(everyones(kept[name])) / dist.get_world_size()
        torch.testing.assert_close(out + mean, expected[name], rtol=1e-4, atol=lost * float(expected[name].abs().max()))


@on_ranks(2)
def test_padding_counts_in_no_average(rank: int) -> None:
    """The scale of signs is the mean magnitude of an owner's rows of a parameter, not of the zeros behind them."""
    (x,) = batches(1)
    ours = sharded()
    compress_shards(ours, "sign(two_shot)")
    loss(ours, x).backward()
    everyone: Any = everyones(local_grads(x))
    for name in ("layers.0.weight", "layers.1.bias"):
        whole_of_rank = [each[name].double().numpy() for each in everyone]
        rows = -(-whole_of_rank[0].shape[0] // 2)
        parts = [[each[:rows], each[rows:]] for each in whole_of_rank]
        means = [
            sum(np.where(of[owner] < 0, -1, 1) * np.abs(of[owner]).mean() for of in parts) / 2 for owner in range(2)
        ]
        torch.testing.assert_close(whole_grads(ours)[name], torch.tensor(np.concatenate(means)).float())


WEIGHTED = {"gradients": "weighted(two_shot)", "replicas": "weighted(allreduce)"}
LOSSY_WEIGHTED = {
    "gradients": "weighted(error_feedback(quantize(two_shot, bits=4)))",
    "replicas": "weighted(error_feedback(powersgd(allreduce, rank=1)))",
}


@on_ranks(2, pytest.param(4, marks=pytest.mark.thorough))
def test_weights_of_tokens(rank: int) -> None:
    """The mean is that of all tokens of all shards and replicas, also where half of the ranks have none, and NaN."""
    n, tokens = dist.get_world_size(), [1, 4, 2, 3]
    for replicas in (1, 2, 4)[:n]:
        mesh = meshes(replicas, n // replicas)
        model = sharded(mesh["shard"], reshard_after_forward=False)
        handle = compress(model, mesh, **WEIGHTED)
        for seed, used in ((5, range(n)), (6, range(n // 2, n))):
            x = batches(1, seed)[0][: tokens[rank]]
            with WireCounter() as counter:
                value = loss(model, x)
                with handle.weight(100), handle.weight(len(x) if rank in used else 0):
                    (value if rank in used else value * torch.nan).backward()
            pooled = torch.cat([everyones(x)[r] for r in used])
            torch.testing.assert_close(whole_grads(model), local_grads(pooled), rtol=1e-4, atol=1e-6)
            if n == 2 * replicas:  # where no weights are gathered again
                assert counter.wire_bytes == sum(axis.wire_bytes for axis in handle.plan.axes)
            model.zero_grad()


@pytest.mark.thorough
@on_ranks(4)
def test_tokens_of_several_backwards(rank: int) -> None:
    """The weight of the last is for all that no_sync has kept whole; replicas would add up what has none."""
    mesh, tokens = meshes(2, 2), [(1, 3), (4, 2), (2, 2), (3, 1)]
    parts = [x[:count] for x, count in zip(batches(2), tokens[rank], strict=True)]
    pooled = torch.cat([torch.cat(each) for each in everyones(parts)])
    model = sharded(mesh["shard"])
    handle = compress(model, mesh, **WEIGHTED)
    share = [len(part) / sum(tokens[rank]) for part in parts]
    with handle.no_sync():
        (loss(model, parts[0]) * share[0]).backward()
    with handle.weight(sum(tokens[rank])):
        (loss(model, parts[1]) * share[1]).backward()
    torch.testing.assert_close(whole_grads(model), local_grads(pooled), rtol=1e-4, atol=1e-6)
    assert handle.replicas is not None
    with pytest.raises(TypeError, match="no_sync: shards average the gradients of each backward"):
        handle.replicas.no_sync().__enter__()


@pytest.mark.parametrize("axes", ["shards", "replicas", "both"])
@on_ranks(2, pytest.param(4, marks=pytest.mark.thorough))
def test_a_step_without_weights_fails_on_all_ranks(rank: int, axes: str) -> None:
    """Where one is missing or invalid, or all are 0: the state is left, and the next step works."""
    n = dist.get_world_size()
    shape = {"shards": (1, n), "replicas": (n, 1), "both": (n // 2, 2)}[axes]
    mesh, (first, odd, last) = meshes(*shape), batches(3)
    models = [sharded(mesh["shard"]) for _ in range(2)]
    if axes == "shards":
        handles: list[Any] = [compress_shards(model, LOSSY_WEIGHTED["gradients"]) for model in models]
    else:
        handles = [compress(model, mesh, **LOSSY_WEIGHTED) for model in models]
    for model, handle in zip(models, handles, strict=True):
        with handle.weight(1 + rank):
            loss(model, first).backward()
    before, state = bits(whole_grads(models[0])), bits(handles[0].sync_state)
    for given, text in ((None, "gave none"), (-1, "gave -1"), (0, "all ranks gave 0")):
        is_odd = rank == n - 1 or given == 0
        kind = ValueError if is_odd else StepFailedError
        with pytest.raises(kind, match=text), handles[0].weight(given if is_odd else 5):
            loss(models[0], odd).backward()
        assert bits(whole_grads(models[0])) == before or axes == "replicas"  # where they are to be cleared
        assert bits(handles[0].sync_state) == state
    for model, handle in zip(models, handles, strict=True):
        model.zero_grad()
        with handle.weight(1 + rank):
            loss(model, last).backward()
    assert bits(whole_grads(models[0])) == bits(whole_grads(models[1]))
    assert bits(handles[0].sync_state) == bits(handles[1].sync_state)


@on_ranks(2)
def test_pipelines_without_weights_are_refused_where_they_are_needed(rank: int) -> None:
    """Before a step: by `weight`, and where FSDP or the pipeline of the other axis takes a plain mean."""
    mesh = meshes(1, 2)
    for of_shards, of_replicas, text in (
        (None, WEIGHTED["replicas"], "shards take the plain mean; call compress_shards.* before compress_replicas"),
        ("two_shot", WEIGHTED["replicas"], "shards take the plain mean"),
        (WEIGHTED["gradients"], "allreduce", r"write weighted\(allreduce"),
    ):
        with pytest.raises(TypeError, match=text):
            compress(sharded(mesh["shard"]), mesh, gradients=of_shards, replicas=of_replicas)
    with pytest.raises(TypeError, match="FSDP itself averages over replicas here"):
        compress_shards(sharded(meshes(2, 1)), WEIGHTED["gradients"])
    with pytest.raises(TypeError, match=r"write weighted\(partition\("):
        compress_shards(sharded(), {"extra.*": "two_shot", "*": "weighted(two_shot)"})
    with pytest.raises(TypeError, match=r"write weighted\(two_shot\)"):
        compress_shards(sharded(), "two_shot").weight(3).__enter__()


@on_ranks(2)
def test_a_step_that_failed_ends_with_a_backward_that_breaks_off(rank: int) -> None:
    """Although its error has frames, which nobody collects here, in which the step was."""
    model = sharded()
    handle = compress_shards(model, "quantize(two_shot)")
    first, second = batches(2)

    def odd(*_: Any) -> Any:
        raise ValueError("odd")

    broken = first.requires_grad_()
    broken.register_hook(odd)
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fnddp.quantize, "encode", odd)
            with pytest.raises(ValueError, match="odd"):
                loss(model, broken).backward()
        model.zero_grad()
        loss(model, second).backward()
        assert handle.steps == 1
    finally:
        gc.enable()


ALL_AXES = {
    "gradients": "error_feedback(quantize(two_shot, bits=4, rounding='stochastic'))",
    "weights": "quantize(allgather)",
    "replicas": "error_feedback(powersgd(bf16(allreduce), rank=1))",
}


@on_ranks(2)
def test_what_does_not_fit_raises_on_all_ranks(rank: int) -> None:
    own_group = "FSDP sends {} over its own group, as {} does"
    refused = {
        "powersgd(allreduce)": "powersgd does not fit the flat buffers that FSDP sends, .* compress_replicas",
        "allreduce": "all_reduce does not fit",
        "quantize(allgather)": own_group.format("gradients", "two_shot"),
        "two_shot(server_memory=True)": "as two_shot does and .* does not",
        "ef21(sign(two_shot))": "ef21 does not fit",
        "shared_momentum(sign(two_shot))": "shared_momentum does not fit",
        "bf16(two_shot, check=True)": "leave out check=True",
    }
    model, twice, two_shot = Net(), sharded(), {"gradients": "two_shot"}
    partly: Any = fully_shard(model, ignored_params={model.extra.bias})
    compress_shards(twice, "two_shot")
    for wrong, hops, expected in (
        *((sharded(), {"gradients": text}, f"gradients=.*{expected}") for text, expected in refused.items()),
        (
            sharded(),
            {"weights": "quantize(two_shot)"},
            f"weights=.*{own_group.format('weights', 'allgather')}",
        ),
        (sharded(), {"weights": "quantize(allgather, rounding='stochastic')"}, "rounds at random"),
        (sharded(), {}, "give a pipeline for gradients, for weights, or both"),
        (Net(), two_shot, "fully_shard was not called on the model itself, a Net"),
        (partly, two_shot, "parameter 'extra.bias' is not sharded"),
        (twice, two_shot, "Scatter is already set for the module 'layers.0'"),
    ):
        with pytest.raises(TypeError, match=expected):
            compress_shards(wrong, **hops)
    with pytest.raises(RankMismatchError, match="disagree about gradients: rank 0: bf16.*rank 1: quantize"):
        compress_shards(sharded(), "quantize(two_shot)" if rank else "bf16(two_shot)")
    kind, text = (TypeError, "does not fit") if rank else (RankMismatchError, "rank 1: .*failed with TypeError")
    with pytest.raises(kind, match=text):
        compress_shards(sharded(), "allreduce" if rank else "two_shot")


@pytest.mark.thorough
@on_ranks(4)
def test_shards_of_hsdp_and_of_replicas(rank: int) -> None:
    mesh = meshes(2, 2)
    native, ours, both = sharded(mesh), sharded(mesh), sharded(mesh["shard"])
    compress_shards(ours, "two_shot", "allgather")
    compress_shards(both, "two_shot")
    compress_replicas(both, "allreduce", mesh["replicate"])
    for model in (native, ours, both):
        train(model, batches(3))
    assert torch.equal(local(ours), local(native))
    assert torch.equal(local(both), local(native))
    with pytest.raises(TypeError, match="call it before compress_replicas"):
        compress_shards(both, "two_shot")
    with pytest.raises(TypeError, match="compress_replicas: it was already called for this model"):
        compress_replicas(both, "sign(allgather)", mesh["replicate"])
    lossy = sharded(mesh)
    compress_shards(lossy, "error_feedback(quantize(two_shot, bits=4))", "quantize(allgather)")
    train(lossy, batches(3))
    everyone = everyones(local(lossy))
    assert torch.equal(everyone[0], everyone[2])
    assert torch.equal(everyone[1], everyone[3])
    assert not torch.equal(everyone[rank], local(native))


@pytest.mark.thorough
@on_ranks(4)
def test_an_error_of_one_rank_before_training_is_one_on_all_axes(rank: int) -> None:
    mesh, both = meshes(2, 2), {"gradients": "two_shot", "replicas": "allreduce"}
    one_differs = "allreduce" if rank else "bf16(allreduce)"

    def one_call(**texts: str) -> Any:
        return compress(sharded(mesh["shard"]), mesh, **texts)

    attempts: list[tuple[int, Callable[[], Any]]] = [  # the rank that fails, and what all do
        (3, lambda: compress_shards(sharded(mesh), "allreduce" if rank == 3 else "two_shot")),
        (2, lambda: compress_shards(sharded(mesh), "bf16(two_shot)" if rank > 1 else "two_shot")),
        (3, lambda: one_call(**both | ({"gradients": "two_sho"} if rank == 3 else {}))),
        (1, lambda: one_call(**both | ({"replicas": "sign(allreduce)"} if rank == 1 else {}))),
        # Only one rank leaves out a pipeline.
        (0, lambda: one_call(weights="allgather", **({"replicas": "allreduce"} if rank else {}))),
        (-1, lambda: one_call(weights="allgather", **(both if rank else {"replicas": "allreduce"}))),
        (0, lambda: compress_replicas(sharded(mesh["shard"]), one_differs, mesh["replicate"])),
    ]
    for who, attempt in attempts:
        with pytest.raises((TypeError, ValueError) if rank == who else RankMismatchError):
            attempt()
    with pytest.raises(RankMismatchError, match="rank 2: two_shot; rank 3: bf16" if rank > 1 else "rank [23]: .*ranks"):
        one_call(gradients="bf16(two_shot)" if rank == 3 else "two_shot", replicas="allreduce")


@pytest.mark.thorough
@on_ranks(4)
def test_replicas_that_set_another_counter_are_told_so_on_all_ranks(rank: int) -> None:
    mesh = meshes(2, 2)
    handle = compress(sharded(mesh), mesh, gradients="quantize(two_shot, rounding='stochastic')")
    before = fnddp.state_dict(handle.sync_state)
    later = {key: value + (1 + rank // 2) * key.startswith("replicated") for key, value in before.items()}
    with pytest.raises(RankMismatchError, match="ranks disagree about state"):
        handle.sync_state = fnddp.load_state_dict(handle.sync_state, later)
    assert fnddp.state_dict(handle.sync_state) == before


@pytest.mark.parametrize("compares", ["shards", "replicas"])
@on_ranks(2, pytest.param(4, marks=pytest.mark.thorough))
def test_a_state_that_does_not_fit_on_one_rank_is_an_error_on_all_axes(rank: int, compares: str) -> None:
    mesh = meshes(dist.get_world_size() // 2, 2)
    others = {"shards": {"replicas": "allreduce"}, "replicas": {"gradients": "error_feedback(quantize(two_shot))"}}
    handle = compress(sharded(mesh["shard"]), mesh, **ALL_AXES | others[compares])  # only one axis has a counter
    fits, checkpoint = handle.sync_state, handle.sync_checkpoint()
    saved, before = checkpoint.state_dict(), bits(fits)
    for wrong, says in (
        ({"shards": {}, "replicas": ()}, "for this model has"),
        ({"shards": fits["shards"]}, r"must have the keys \['shards', 'replicas'\], got \['shards'\]"),
        (None, r"must have the keys .*, got \[\]"),
    ):
        with pytest.raises(ValueError, match=says):
            handle.sync_state = fits if rank else wrong  # type: ignore[assignment]
    with pytest.raises(ValueError, match="does not fit"):
        checkpoint.load_state_dict({**saved, "shards/parts": saved["shards/parts"] if rank else []})
    with pytest.raises(ValueError, match="no pipeline state for this rank"):
        checkpoint.load_state_dict(saved if rank else {})
    assert bits(handle.sync_state) == before
    checkpoint.load_state_dict(saved)


@pytest.mark.thorough
@on_ranks(4)
def test_one_handle_for_all_axes(rank: int) -> None:
    """It is the two others: bits, bytes of the plan, state."""
    mesh = meshes(2, 2)
    ours, other = (sharded(mesh["shard"], reshard_after_forward=False) for _ in range(2))
    handle = compress(ours, mesh, **ALL_AXES)
    shards = compress_shards(other, ALL_AXES["gradients"], ALL_AXES["weights"])
    compress_replicas(other, ALL_AXES["replicas"], mesh["replicate"])
    for model in (ours, other):
        train(model, batches(3))
    assert torch.equal(local(ours), local(other))
    with WireCounter() as counter:
        loss(ours, batches(1)[0]).backward()
    stats = handle.sync_stats()
    assert counter.wire_bytes == sum(axis.wire_bytes for axis in handle.plan.axes)
    assert counter.wire_bytes == stats["gradients_bytes"] + stats["weights_bytes"] + stats["replicas_bytes"]
    assert (stats["steps"], stats["failed_steps"]) == (shards.steps + 1, 0)
    lines = handle.plan.show({name: Link.parse("1gbit:1ms") for name in ("gradients", "weights", "replicas")})
    assert [line.split()[0] for line in lines.splitlines()] == ["axis", "gradients", "weights", "replicas"]
    handle.sync_state = handle.sync_state
    parts: Any = Net().named_modules()
    groups = {name: dict(each.named_parameters(name)) for name, each in parts if isinstance(each, nn.Linear)}
    options = {"world_size": {"shards": 2, "replicas": 2}, **ALL_AXES}
    live = compress(sharded(mesh["shard"]), mesh, **ALL_AXES).plan
    planned = str(plan_axes(groups, **options))  # without any rank, as the first ones of a node
    assert (planned == str(live)) == (mesh.get_local_rank("shard") == 0)

    with pytest.raises(TypeError, match="give a pipeline for gradients, weights or replicas"):
        compress(sharded(mesh["shard"]), mesh)
    with pytest.raises(TypeError, match="nothing averages gradients of 'layers.0' between the replicas"):
        compress(sharded(mesh["shard"]), mesh, gradients="two_shot")
    with pytest.raises(TypeError, match="needs a mesh with two named dimensions"):
        compress(sharded(mesh["shard"]), mesh["shard"], replicas="allreduce")
    with pytest.raises(TypeError, match=r"'layers.0' is sharded over the ranks \[0, 1, 2, 3\], but the last dimension"):
        compress(sharded(), mesh, gradients="two_shot")


@pytest.mark.parametrize("weights", [None, "quantize(allgather)", "ef21(quantize(allgather, bits=4))"])
@on_ranks(2, pytest.param(4, marks=pytest.mark.thorough))
def test_a_plan_is_of_one_micro_batch(rank: int, weights: str | None) -> None:
    """With weights that are sharded again after the forward, over as many ranks or over fewer, or not.

    Of three, gradients travel with the last, and weights with each, but for differences, which travel once.
    """
    n, (x,) = dist.get_world_size(), batches(1)
    mesh = meshes(1, n)
    for options in ({}, {"reshard_after_forward": False}, {"reshard_after_forward": 2})[: 2 if n == 2 else 3]:
        model = sharded(mesh["shard"], **options)
        handle = compress(model, mesh, gradients="quantize(two_shot, bits=4)", weights=weights)
        loss(model, x).backward()
        for micro in (1,) if options.get("reshard_after_forward") == 2 else (1, 3):  # sent in each backward, too
            change(model, by=lambda p: 1.01 * p)
            with WireCounter() as counter:
                with handle.no_sync():
                    for _ in range(micro - 1):
                        loss(model, x).backward()
                loss(model, x).backward()
            sizes = {axis.name: axis.wire_bytes for axis in handle.plan.axes}
            times = 1 if weights and "ef21" in weights else micro
            assert counter.wire_bytes == sizes["gradients"] + times * sizes["weights"], (options, micro)
            stats = handle.sync_stats()
            assert (stats["gradients_bytes"], stats["weights_bytes"]) == (sizes["gradients"], sizes["weights"])


def test_a_plan_of_parameters_that_share_a_name_is_refused() -> None:
    """Between replicas, leaves are keyed by name: those of one group would have taken the place of the other's."""
    layers = {f"layers.{i}": dict(nn.Linear(8, 8).named_parameters()) for i in range(2)}
    with pytest.raises(ValueError, match="groups 'layers.0' and 'layers.1' both have a parameter 'weight'; name each"):
        plan_axes(layers, world_size={"shards": 2, "replicas": 2})


def _compressed(*shape: int) -> tuple[Any, Any]:
    mesh = meshes(*shape)
    model = sharded(mesh["shard"])
    return model, compress(model, mesh, gradients=ALL_AXES["gradients"], replicas="allreduce")


def _saves(rank: int, folder: str) -> Tensor:
    model, handle = _compressed(2, 2)
    train(model, batches(3))
    save(folder, model, sync=handle)
    return mean_residual(handle.sync_state["shards"])


def _loads(rank: int, folder: str) -> Tensor:
    model, handle = _compressed(2, 1)
    with pytest.raises(ValueError, match="for another number of shards"):  # the state between replicas is of others
        load(folder, model, sync=handle)
    model, handle = _compressed(1, 2)
    load(folder, model, sync=handle)
    residual = mean_residual(handle.sync_state["shards"])
    train(model, batches(1))
    return residual


def mean_residual(state: Any) -> Tensor:
    own = torch.cat([each.flatten() for group in state.values() for each in group.residual.values()])
    return sum(everyones(own)) / dist.get_world_size()  # type: ignore[return-value]


@pytest.mark.thorough
def test_other_numbers_of_ranks_load_it(gloo: Callable[..., list[Any]], tmp_path: Path) -> None:
    """No residual is lost: their mean is that of the ranks that saved them, of other shards of parameters."""
    saved, *_ = gloo(4, _saves, str(tmp_path))
    for loaded in gloo(2, _loads, str(tmp_path)):
        torch.testing.assert_close(loaded, saved)
        assert loaded.abs().max() > 0


BOTH: dict[str, Any] = {"world_size": {"shards": 2, "replicas": 2}}
REFUSED_PLANS: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "world_size must be": ({"world_size": {"nodes": 2}}, ValueError),
    "world_size must be {": ({"world_size": {"shards": 0}}, ValueError),
    "group 'head' must have parameters": ({"head": {}}, ValueError),
    "group 'scale' must have parameters": ({"scale": {"s": torch.empty(())}}, ValueError),
    "world_size of 'shards' must be an int, got 2.5": ({"world_size": {"shards": 2.5}}, TypeError),
    "world_size of 'shards' must be an int, got True": ({"world_size": {"shards": True}}, TypeError),
    "outer and 'workers' in world_size need each other, got None and {": ({"world_size": {"workers": 2}}, ValueError),
    "need each other, got local_sgd": ({"outer": "local_sgd(every=2)"}, ValueError),
    "unknown name 'nosuch'": ({"outer": "nosuch"}, ValueError),
    "clip_by_global_norm needs whole leaves": (BOTH | {"replicas": "clip_by_global_norm(allreduce, 1.0)"}, TypeError),
    "is weighted, but shards take the plain mean": (BOTH | {"replicas": "weighted(allreduce)"}, TypeError),
    "shards are weighted, but allreduce is not": (BOTH | {"gradients": "weighted(two_shot)"}, TypeError),
    "a pipeline for each pattern": ({"gradients": {"a": "quantize(two_shot)", "*": "two_shot"}}, TypeError),
}


@pytest.mark.parametrize("says", REFUSED_PLANS)
def test_plans_that_cannot_be_are_refused(says: str):
    given, error = REFUSED_PLANS[says]
    groups = {key: each for key, each in given.items() if key in ("head", "scale")}
    options = {key: each for key, each in given.items() if key not in groups}
    with pytest.raises(error, match=re.escape(says)):
        plan_axes({"layers.0": {"weight": torch.empty(64, 64, device="meta")}, **groups}, **options)
