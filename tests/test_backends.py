"""Who runs the segments of a plan: the same numbers from Inductor, and CUDA graphs where nothing moves."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fnddp
from fnddp import LoweringError, allreduce, lower
from fnddp.ir.program import Received, Sent
from fnddp.run.backends import Captured, segments_of
from fnddp.run.memory import Buffer
from tests.ranks import on_ranks

pytestmark = pytest.mark.thorough

LOW_RANK = fnddp.error_feedback(fnddp.powersgd(fnddp.fp16(allreduce), rank=2))
META = {"w": torch.empty(40, 30, device="meta"), "b": torch.empty(30, device="meta")}


@pytest.mark.timeout(600)
@on_ranks(2, seconds=590)
def test_inductor_gives_what_python_gives(rank: int) -> None:
    """To rounding: it may fuse a product and a sum. A 16-bit wire makes a step of its own of that, once in a while."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("fnddp").addHandler(handler)
    models: list[nn.Module] = []
    for backend in (None, "inductor"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20))
        models.append(fnddp.DistributedDataParallel(model, sync=LOW_RANK, backend=backend))
    for step in range(4):
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(2 * step + rank))
        for model in models:
            model.zero_grad()
            model(x).square().mean().backward()
        for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-3, atol=1e-6)
    logging.getLogger("fnddp").removeHandler(handler)
    compiled = [text for text in told if text.startswith("compiled ")]
    plan = models[1].plan
    assert len(compiled) == (rank == 0)  # once, although the plan runs in every step
    assert "run by inductor" in str(plan)


@on_ranks(2)
def test_ranks_agree_about_it(rank: int) -> None:
    """Numbers that are computed on all ranks from the same means must be the same."""
    backend = "inductor" if rank else None
    with pytest.raises(fnddp.RankMismatchError, match="backend=inductor"):
        fnddp.DistributedDataParallel(nn.Linear(2, 2), backend=backend)
    with pytest.raises(fnddp.RankMismatchError, match="ranks disagree about the backend: rank 0: None; rank 1: induct"):
        fnddp.register(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), allreduce, backend=backend)


GRADS = {"w": torch.ones(2, 2)}
USES = {
    "lower": lambda **options: lower(allreduce, GRADS, **options),
    "jit": lambda **options: fnddp.jit(allreduce, **options)(GRADS, ()),
    "value_and_grad": lambda **options: fnddp.value_and_grad(lambda params: params["w"].sum(), allreduce, **options)(
        GRADS, ()
    ),
}


@pytest.mark.parametrize("use", USES)
def test_backends_that_do_not_fit(use: str) -> None:
    with pytest.raises(ValueError, match="backend must be None or one of 'inductor', 'cudagraphs', got 'onnx'"):
        USES[use](backend="onnx")
    with pytest.raises(ValueError, match="backend='cudagraphs' needs gradients on CUDA devices, got some on cpu"):
        USES[use](backend="cudagraphs")


def test_a_pipeline_without_a_plan_is_an_error_then() -> None:
    sync = fnddp.fp16(allreduce, check=True)
    assert fnddp.jit(sync)(GRADS, ())[0]["w"].tolist() == [[1, 1], [1, 1]]
    with pytest.raises(LoweringError, match="cannot be lowered"):
        fnddp.jit(sync, backend="inductor")(GRADS, ())


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
    assert len(given) > 20
    assert len({id(run.__code__) for run in given}) == len({run.__code__.co_name for run in given}) == len(given)


@pytest.mark.parametrize(
    "text",
    [
        "allreduce",
        "error_feedback(fp16(allreduce))",
        "error_feedback(topk(allgather, ratio=0.1))",
        "quantize(two_shot, bits=4)",
    ],
)
@on_ranks(2)
def test_what_lies_in_one_buffer_shares_no_storage_for_inductor(rank: int, text: str) -> None:
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
        {
            "w": torch.randn(40, 30, generator=draws),
            "b": torch.randn(30, generator=draws),
            "scale": torch.randn((), generator=draws),
            "empty": torch.empty(0, 3),
        }
        for draws in (torch.Generator().manual_seed(10 * step + rank) for step in range(4))
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


@pytest.mark.parametrize("views_apart", [False, True])
def test_whoever_holds_memory_of_a_buffer_is_seen(views_apart: bool) -> None:
    grads = {
        "w": torch.ones(6, 5),
        "scale": torch.tensor(2.0),
        "empty": torch.empty(0, 3),
        "half": torch.ones(3).half(),
    }
    for sync in (allreduce, fnddp.parse("quantize(two_shot, bits=4)"), fnddp.parse("sign(allgather)")):
        for collective in lower(sync, grads, world_size=2).collectives:
            buffer = Buffer(collective, views_apart=views_apart)
            for kind in (Sent, Received):
                for position, payload in enumerate(collective.payloads):
                    view = buffer.view(kind(collective.index, position))
                    assert view.dtype == payload.dtype
                    assert not buffer.is_held
                    if view.numel():
                        held = view.data
                        assert buffer.is_held
                        del held
            held = buffer.receive[:1]
            assert buffer.is_held
            del held
            assert not buffer.is_held


def test_only_what_fills_buffers_is_captured() -> None:
    """The next replay would write over all else, or the graph would hold a gradient's memory."""
    for sync, expected in ((allreduce, [True, False]), (fnddp.fp16(allreduce), [True, False]), (LOW_RANK, None)):
        plan = lower(sync, META, world_size=2, backend="cudagraphs")
        captured = [isinstance(segment.run, Captured) for segment in segments_of(plan)]
        assert captured == [bool(each.operations) and not each.outputs for each in plan.segments]
        assert expected is None or captured == expected


class Recorded:
    """Stands for CUDA graphs: replays on the inputs of the capture, and writes over its own results."""

    def __init__(self) -> None:
        self.captures = self.replays = self.runs = 0

    def run(self, x: Tensor, n: int) -> Sequence[Tensor]:
        self.runs += 1
        return (x * n,)

    def capture(self, run: Any, inputs: Sequence[Any]) -> Any:
        self.captures += 1
        (result,) = (torch.empty_like(inputs[0]),)  # nothing is computed while a graph is captured

        def replay() -> None:
            self.replays += 1
            result.copy_(inputs[0] * inputs[1])

        return replay, (result,)


def test_a_graph_is_replayed_where_its_inputs_lie() -> None:
    of = Recorded()
    segment = Captured(of.run, of.capture)
    places = [torch.empty(2) for _ in range(2)]

    def runs(place: int, value: float, n: int = 3) -> tuple[int, int, int]:
        places[place].fill_(value)
        (result,) = segment(places[place], n)
        assert result.tolist() == [value * n] * 2
        return of.runs, of.captures, of.replays

    assert runs(0, 1.0) == (1, 0, 0)
    assert runs(0, 2.0) == (1, 1, 1)  # it has not moved: captured, and replayed, since a capture computes nothing
    assert runs(0, 3.0) == (1, 1, 2)
    assert runs(1, 4.0) == (2, 1, 2)  # it has
    assert runs(0, 5.0) == (2, 1, 3)
    assert runs(1, 6.0) == (2, 2, 4)  # and lies there again
    assert runs(1, 7.0, n=4) == (3, 2, 4)  # numbers are constants of a graph
    assert runs(1, 8.0, n=3) == (3, 2, 5)


def test_inputs_that_always_move_are_not_captured_for_ever() -> None:
    of = Recorded()
    segment = Captured(of.run, of.capture)
    for n in range(10):
        x = torch.ones(2)
        for _ in range(2):
            assert segment(x, n)[0].tolist() == [n, n]
    assert of.captures == 4
