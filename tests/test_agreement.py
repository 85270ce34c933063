"""`verify`: a difference on one rank is the same named error on all of them."""

from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import fnddp
from fnddp import RankMismatchError, allreduce, error_feedback, fp16, from_hook, powersgd, verify
from fnddp.laws import bits, gather
from fnddp.simulation.ranks import run_threads
from fnddp.wire.protocol import CollectiveError
from tests.ranks import on_ranks

SYNC = error_feedback(powersgd(fp16(allreduce), rank=2))


def tree(**changes: Any) -> dict[str, Any]:
    return {"fc.weight": torch.ones(12, 20), "fc.bias": torch.ones(12), **changes}


def state(**changes: Any) -> Any:
    made = SYNC.init(tree())
    return made._replace(**{name: change(getattr(made, name)) for name, change in changes.items()})


LEAF, STATE = "leaf 'fc.weight': ranks 0, 2: float32[12, 20] on cpu", "state 'inner.q.fc.weight'"
DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {  # what rank 1 has, and what all ranks raise
    "pipeline": ({"sync": fnddp.parse("bf16(allreduce)")}, f"pipeline: ranks 0, 2: {SYNC}; rank 1: bf16(allreduce)"),
    "missing": (
        {"grads": {"fc.weight": torch.ones(12, 20)}},
        "leaf 'fc.bias': ranks 0, 2: float32[12] on cpu; rank 1: leaf 'fc.weight' in its place",
    ),
    "shape": ({"grads": tree(**{"fc.weight": torch.ones(20, 12)})}, f"{LEAF}; rank 1: float32[20, 12] on cpu"),
    "dtype": ({"grads": tree(**{"fc.weight": torch.ones(12, 20).double()})}, f"{LEAF}; rank 1: float64[12, 20] on cpu"),
    "structure": (
        {"state": state().inner},
        "state 'residual.fc.bias': ranks 0, 2: float32[12]; rank 1: state 'q.",
    ),
    "value": (
        {"state": state(inner=lambda inner: inner._replace(q={"fc.weight": inner.q["fc.weight"] * 1.000001}))},
        f"{STATE}: ranks 0, 2: float32[20, 2] with digest",
    ),
}


def outcome(rank: int, changes: dict[str, Any]) -> str:
    given = {"sync": SYNC, "grads": tree(), "state": state(), **(changes if rank == 1 else {})}
    try:
        verify(given["sync"], given["grads"], given["state"])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "agreed"


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_raises_on_all_ranks(what):
    changes, message = DIFFERENCES[what]
    messages = run_threads(3, outcome, changes)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"RankMismatchError: ranks disagree about {message}")


def test_a_text_that_cannot_be_read_on_a_rank_is_an_error_on_all():
    others, own = run_threads(2, outcome, {"sync": "nosuch"})
    assert own.startswith("ValueError: parse: unknown name 'nosuch'")
    assert others.startswith(f"RankMismatchError: ranks disagree about set-up: rank 0: done; rank 1: failed with {own}")


class Marked(NamedTuple):
    value: fnddp.Replicated[torch.Tensor]


def test_agreement(gloo):
    own = {"state": state(residual=lambda each: {path: leaf + 1 for path, leaf in each.items()})}  # local: may differ
    for same in (own, {"grads": dict(reversed(tree().items()))}):
        assert run_threads(3, outcome, same) == ["agreed"] * 3
    assert gloo(2, outcome, own) == ["agreed"] * 2
    assert outcome(1, own) == "agreed"  # without a process group
    in_a_column = torch.ones(2, 2)[:1, :1].T  # one element, with a stride of 2
    for value in torch.ones(2, dtype=torch.complex64).conj(), torch.empty(2, device="meta"), in_a_column:
        verify(allreduce, tree(), Marked(value))


@on_ranks(2)
def test_hooks_with_states_agree(rank: int) -> None:
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    for hook in (from_hook(powerSGD_hook, state), from_hook(partial(fp16_compress_hook), dist.group.WORLD)):
        verify(error_feedback(hook), tree())


LATER = "error_feedback(warmup(bf16(allreduce), steps=5))"  # whose first steps send other bytes


def require_mean(model: nn.Module, rank: int) -> None:
    model.zero_grad()
    model(torch.ones(1, 2) * (rank + 1)).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad.tolist() == [[1.5, 1.5]]


MIXED = [torch.nn.parallel.distributed._MixedPrecision(reduce_dtype=each) for each in (torch.float16, torch.bfloat16)]
FROZEN = [nn.Sequential(nn.Linear(4, 2), nn.Linear(2, n, bias=False).requires_grad_(False)) for n in (2, 3)]
SET_UPS: list[tuple[str, list[Any], str]] = [  # an argument, its values on the two ranks, and what both raise
    ("module", [nn.Linear(4, 2), nn.Linear(4, 3)], r"leaf 'weight': rank 0: float32\[2, 4\] .*rank 1: float32\[3, 4\]"),
    ("bucket_cap_mb", [1, 2], "options: rank 0: .*buckets of 1 MiB.*; rank 1: .*buckets of 2 MiB"),
    ("static_graph", [False, True], "options: rank 0: .*static_graph=False.*; rank 1: .*static_graph=True"),
    ("skip_all_reduce_unused_params", [False, True], "options: rank 0: .*unused_params=False.*; rank 1: .*=True"),
    ("backend", [None, "inductor"], "options: .*backend=inductor"),
    ("forward_sync_buffers", [False, True], "options: rank 0: .*sync_buffers=False.*; rank 1: .*sync_buffers=True"),
    ("module", FROZEN, r"tensor '1.weight': rank 0: float32\[2, 2\]; rank 1: float32\[3, 2\]"),
    ("module", [nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False)], "tensor 'running_mean': .*: nothing"),
    ("mixed_precision", MIXED, "pipeline: rank 0: fp16.*rank 1: bf16"),
]


@on_ranks(2)
def test_ranks_that_differ(rank: int) -> None:
    for name, values, says in SET_UPS:
        given = {"module": nn.Linear(4, 2), name: values[rank]}
        before = bits(list(given["module"].parameters()))
        with pytest.raises(RankMismatchError, match=f"ranks disagree about {says}"):
            fnddp.DistributedDataParallel(**given)
        assert bits(list(given["module"].parameters())) == before
    model = fnddp.DistributedDataParallel(nn.Linear(4, 2), bucket_cap_mb=1 + rank, init_sync=False)  # nobody looks
    assert gather(model.bucket_bytes_cap) == [2**20, 2**21]


@on_ranks(2)
def test_ranks_that_set_another_pipeline_each(rank: int) -> None:
    model = fnddp.DistributedDataParallel(nn.Linear(2, 1, bias=False), sync=LATER)
    require_mean(model, rank)
    before = bits([list(model.parameters()), model.sync_state])
    with pytest.raises(RankMismatchError, match=r"ranks disagree about pipeline: rank 0: fp16\(allreduce\); rank 1"):
        model.sync = fnddp.parse("bf16(allreduce)" if rank == 1 else "fp16(allreduce)")
    assert model.sync == fnddp.parse(LATER)
    assert bits([list(model.parameters()), model.sync_state]) == before
    require_mean(model, rank)


ALONE = {"sync_state": "setting the state of error_feedback", "sync": r"sync='bf16\(allreduce\)'"}


@pytest.mark.parametrize("name", ALONE)
@on_ranks(2)
def test_a_rank_that_alone_sets_a_state_or_a_pipeline_is_told(rank: int, name: str) -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = fnddp.DistributedDataParallel(nn.Linear(2, 1, bias=False), sync=LATER, process_group=group)
    require_mean(model, rank)
    if rank == 0:
        later = model.sync_state._replace(inner=model.sync_state.inner._replace(step=5))
        says = f"{ALONE[name]}.* could not compare .* All ranks must make this call"
        with pytest.raises(CollectiveError, match=says):
            setattr(model, name, later if name == "sync_state" else "bf16(allreduce)")
        assert model.sync.over(None) == fnddp.parse(LATER)
        assert model.sync_state.inner.step == 1
    dist.barrier()


@on_ranks(2, 3)
def test_functions_of_one_size_in_another_order_on_a_rank_are_an_error_on_all(rank: int) -> None:
    """Functions share messages, which have one size: one's would be taken for the other's."""
    first, second = [fnddp.jit(fp16(allreduce)) for _ in range(2)]
    n = dist.get_world_size()
    for step in range(4):
        grads = {"w": torch.full((6,), float(rank))}
        if step == 2:
            with pytest.raises(RankMismatchError, match="ranks ended steps of different functions at the same time"):
                (second if rank == 1 else first)(grads, ())
        for run, factor in ((first, 1), (second, 2)):
            mean, _ = run({"w": factor * grads["w"]}, ())
            assert mean["w"].tolist() == [factor * (n - 1) / 2] * 6


@on_ranks(2)
def test_functions_that_a_rank_first_calls_in_another_order_or_with_another_dtype(rank: int) -> None:
    functions = [fnddp.jit(text) for text in ("fp16(allreduce)", "clip_by_global_norm(fp16(allreduce), max_norm=9)")]
    grads = {"w": torch.full((6,), float(rank))}
    with pytest.raises(RankMismatchError, match="ranks ended steps of different functions"):
        functions[rank](grads, ())
    with pytest.raises(RankMismatchError, match="or with leaves of different shapes or dtypes"):
        functions[0]({"w": grads["w"].double()} if rank == 1 else grads, ())
    for run in (*functions, fnddp.jit(fp16(allreduce))):
        for _ in range(2):
            assert run(grads, ())[0]["w"].tolist() == [0.5] * 6


@on_ranks(2)
def test_models_in_another_order_on_a_rank_wait_for_each_other_until_the_timeout(rank: int) -> None:
    """They have messages of their own, which cannot be taken for each other's."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    models = [fnddp.DistributedDataParallel(nn.Linear(6, 5), sync=fp16(allreduce), process_group=group) for _ in "ab"]
    losses = [model(torch.ones(2, 6)).sum() for model in models]
    with pytest.raises(CollectiveError, match="Another rank has failed, left, or not called backward"):
        losses[rank].backward()
    assert all(p.grad is None for p in models[rank].parameters())
    dist.barrier()
