"""Segments that Inductor compiles: the same numbers, and memory that it may not take for others'."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fnddp
from fnddp import LoweringError, allreduce, laws, lower
from fnddp.run.backends import segments_of
from tests.ranks import on_ranks

pytestmark = pytest.mark.thorough

LOW_RANK = fnddp.error_feedback(fnddp.powersgd(fnddp.fp16(allreduce), rank=2))


@pytest.mark.timeout(600)
@on_ranks(2, seconds=590)
def test_inductor_gives_what_python_gives(rank: int) -> None:
    """To rounding: it may fuse a product and a sum. A 16-bit wire makes a step of its own of that, once in a while."""
    models: list[nn.Module] = []
    for backend in (None, "inductor"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20))
        models.append(fnddp.DistributedDataParallel(model, sync=LOW_RANK, backend=backend))
    compiled: list[int] = []  # graphs so far, after each step
    for step in range(5):
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(2 * step + rank))
        for model in models:
            model.zero_grad()
            model(x).square().mean().backward()
        compiled.append(counters["stats"]["unique_graphs"])
        for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-3, atol=1e-6)
    assert compiled[2] == compiled[4] > 0  # in the first steps only, although the plan runs in every step
    assert "run by inductor" in str(models[1].plan)


def test_backends_that_do_not_fit() -> None:
    grads = {"w": torch.ones(2, 2)}
    for use in (
        lambda **options: lower(allreduce, grads, **options),
        lambda **options: fnddp.jit(allreduce, **options)(grads, ()),
        lambda **options: fnddp.value_and_grad(lambda params: params["w"].sum(), allreduce, **options)(grads, ()),
    ):
        with pytest.raises(ValueError, match="backend must be None or 'inductor', got 'onnx'"):
            use(backend="onnx")
    with pytest.raises(LoweringError, match="cannot be lowered"):  # and nothing else may run it then
        fnddp.jit(fnddp.fp16(allreduce, check=True), backend="inductor")(grads, ())


def test_torch_compile_takes_segments_for_different_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes no more than eight versions of one."""
    given: list[Any] = []

    def compiled(run: Any, **_: Any) -> Any:
        given.append(run)
        return run

    monkeypatch.setattr(torch, "compile", compiled)
    model = {f"{i}": torch.empty(40, 30, device="meta") for i in range(6)}
    plan = lower(LOW_RANK, model, world_size=2, bucket_cap_mb=0.001, first_bucket_mb=0.001, backend="inductor")
    segments_of(plan)
    segments_of(plan)
    assert len(given) > 8
    assert len({id(run.__code__) for run in given}) == len({run.__code__.co_name for run in given}) == len(given)


@pytest.mark.parametrize("text", ["error_feedback(topk(allgather, ratio=0.1))", "quantize(two_shot, bits=4)"])
@on_ranks(2)
def test_slices_of_a_buffer_share_no_storage_for_inductor(rank: int, text: str) -> None:
    """Else it computes each element of a buffer from all that is written there; and what is held stays as it is."""
    shared: list[int] = []

    def compiled(run: Any, **_: Any) -> Any:
        def checked(*inputs: Any) -> Any:
            storages = [each.untyped_storage()._cdata for each in inputs if isinstance(each, Tensor) and each.numel()]
            shared.append(len(storages) - len(set(storages)))
            return run(*inputs)

        return checked

    sync = fnddp.parse(text)
    grads = [
        {**laws.model(rank, step), "scale": torch.tensor(1.0 + rank), "empty": torch.empty(0, 3)} for step in range(4)
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fnddp.run.backends.torch.compile", compiled)
        given = {}
        for backend in (None, "inductor"):
            step, state = fnddp.jit(sync, backend=backend), sync.init(grads[0])
            given[backend] = []
            for each in grads:
                mean, state = step(each, state)
                given[backend].append(mean)  # and held
    assert shared
    assert not any(shared)
    torch.testing.assert_close(given["inductor"], given[None], rtol=0, atol=0)
