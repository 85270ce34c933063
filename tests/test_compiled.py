"""Steps and segments of plans that torch.compile has compiled give the numbers of eager ones, on each rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fnddp
from fnddp.core.tree import flatten_any
from fnddp.laws import gather
from tests.pipelines import EXAMPLES
from tests.ranks import on_ranks
from tests.rings import one_of

ONCE_WRONG = [
    "error_feedback(quantize(two_shot))",  # Inductor's loop split left out ends of leaves
    "error_feedback(bf16(allreduce))",  # Inductor left out casts, and with them the residual
    "topk(qsgd(allgather), k=5, chunk=32)",  # gcc read a sign into products of int32 that overflow
    "cast(lloyd_max(two_shot, block=24), 'bfloat16')",  # Inductor left out the rounding of what is decoded
]
TRACED = [text for text in EXAMPLES.values() if fnddp.parse(text).traceable]


def assert_alike(sync: fnddp.Sync, got: object, want: object) -> None:
    """Inductor's products and sums differ from eager ones in their last bits."""
    for each, expected in zip(flatten_any(got)[0], flatten_any(want)[0], strict=True):
        if isinstance(each, Tensor):
            rtol = 1e-2 if each.dtype == torch.bfloat16 else 1e-3
            torch.testing.assert_close(each, expected, rtol=rtol, atol=1e-4)
    mean, _ = got  # pyright: ignore[reportGeneralTypeIssues]
    for name, each in mean.items():
        if sync.agrees and each is not None:
            assert torch.equal(*gather(each)), name


def inputs_of(rank: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(rank)
    leaves = {"weight": torch.randn(30, 20, generator=random), "bias": torch.randn(317, generator=random)}
    return leaves | {"bias": leaves["bias"].bfloat16()}


@pytest.mark.parametrize(
    "text",
    one_of(len(ONCE_WRONG + TRACED), [*ONCE_WRONG, *TRACED]),
)
@on_ranks(2, seconds=240)  # of a compiler
def test_compiled_equals_eager(rank: int, text: str) -> None:
    sync, inputs = fnddp.parse(text), inputs_of(rank)

    def step(inputs: dict[str, Tensor], state: object, i: Tensor) -> object:
        return sync({name: x * i for name, x in inputs.items()}, state)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    eager_state = compiled_state = sync.init(inputs)
    for i in (1, 2, 4):
        expected, eager_state = step(inputs, eager_state, torch.tensor(float(i)))
        mean, compiled_state = compiled(inputs, compiled_state, torch.tensor(float(i)))
        assert_alike(sync, (mean, compiled_state), (expected, eager_state))


@pytest.mark.parametrize("text", ["allreduce", "qsgd(allgather)", "error_feedback(fp16(two_shot))"])
@on_ranks(4, seconds=240)
def test_compiled_over_pairs_of_ranks(rank: int, text: str) -> None:
    """The groups are named in the graph. What Inductor makes of it is in the test above."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    sync, inputs = fnddp.parse(text).over(pairs[rank // 2]), inputs_of(rank)

    def step(inputs: dict[str, Tensor], state: Any) -> tuple[dict[str, Tensor], Any]:
        return sync(inputs, state)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    eager_state = compiled_state = sync.init(inputs)
    for _ in range(2):
        expected, eager_state = step(inputs, eager_state)
        mean, compiled_state = compiled(inputs, compiled_state)
        got, wanted = flatten_any((mean, compiled_state))[0], flatten_any((expected, eager_state))[0]
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        if text == "allreduce":
            partner = inputs_of(rank ^ 1)
            torch.testing.assert_close(mean, {name: (x + partner[name]) / 2 for name, x in inputs.items()})


@pytest.mark.thorough
@pytest.mark.parametrize("text", ONCE_WRONG)
@on_ranks(2)
def test_plans_for_inductor_equal_eager(rank: int, text: str) -> None:
    sync, inputs = fnddp.parse(text), inputs_of(rank)
    compiled = fnddp.jit(sync, backend="inductor")
    eager_state = compiled_state = sync.init(inputs)
    for i in (1, 2, 4):
        gradients = {name: x * i for name, x in inputs.items()}
        expected, eager_state = sync(gradients, eager_state)
        mean, compiled_state = compiled(gradients, compiled_state)
        assert_alike(sync, (mean, compiled_state), (expected, eager_state))
