"""A step that torch.compile has compiled whole gives the numbers of an eager one, on each rank."""

import pytest
import torch
from torch import Tensor

import fnddp
from fnddp.core.tree import flatten_any
from fnddp.laws import gather
from tests.pipelines import EXAMPLES
from tests.ranks import on_ranks

FIRST_RING = [
    "error_feedback(quantize(two_shot))",  # Inductor's loop split left out ends of leaves
    "error_feedback(bf16(allreduce))",  # Inductor left out casts, and with them the residual
    "topk(qsgd(allgather), k=5, chunk=32)",  # gcc read a sign into products of int32 that overflow
]
TRACED = [text for text in EXAMPLES.values() if fnddp.parse(text).traceable]


@pytest.mark.parametrize(
    "text",
    [*FIRST_RING, *(pytest.param(text, marks=pytest.mark.thorough) for text in TRACED)],
)
@on_ranks(2)
def test_compiled_equals_eager(rank: int, text: str) -> None:
    sync = fnddp.parse(text)
    random = torch.Generator().manual_seed(rank)
    shapes = {"weight": (30, 20), "bias": (317,)}
    inputs = {name: torch.randn(*shape, generator=random) for name, shape in shapes.items()}

    def step(inputs: dict[str, Tensor], state: object, i: Tensor) -> object:
        return sync({name: x * i for name, x in inputs.items()}, state)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    eager_state = compiled_state = sync.init(inputs)
    for i in (1, 2, 4):
        expected, eager_state = step(inputs, eager_state, torch.tensor(float(i)))
        mean, compiled_state = compiled(inputs, compiled_state, torch.tensor(float(i)))
        # Inductor's products and sums differ from eager ones in their last bits.
        for got, want in zip(
            flatten_any((mean, compiled_state))[0], flatten_any((expected, eager_state))[0], strict=True
        ):
            if isinstance(got, Tensor):
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
        for name, each in mean.items():
            if sync.agrees and each is not None:
                assert torch.equal(*gather(each)), name
