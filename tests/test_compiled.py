"""Steps and segments of plans that torch.compile has compiled give the numbers of eager ones, on each rank."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fnddp
from fnddp.core.tree import flatten_any
from fnddp.laws import gather, weight_of
from fnddp.torch_private import functional_collectives as _functional
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
# Nothing is computed in these that is not in others: Inductor would compile it again, in each of their phases.
WITHOUT = ("all_reduce", "all_gather", "bucketize", "hierarchical", "none", "unreduced", "warmup", "every", "switch")
WITHOUT += ("partition", "squared", "measure", "weighted", "shared_momentum", "momentum_correction")
BY_EAGER = {EXAMPLES[name] for name in WITHOUT}
COMPILED = [(text, "aot_eager" if text in BY_EAGER else "inductor") for text in ONCE_WRONG + TRACED]
COMPILED += [(text, "plan") for text in ONCE_WRONG]


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


@pytest.mark.parametrize(("text", "how"), one_of(len(COMPILED), COMPILED))
@on_ranks(2, seconds=240)  # of a compiler
def test_compiled_equals_eager(rank: int, text: str, how: str) -> None:
    sync, inputs = fnddp.parse(text), inputs_of(rank)

    def step(inputs: dict[str, Tensor], state: object, i: Tensor, run: Any = sync) -> Any:
        return run({name: x * i for name, x in inputs.items()}, state, weight=weight_of(sync))

    torch._dynamo.reset()
    if how == "plan":
        compiled: Any = partial(step, run=fnddp.jit(sync, backend="inductor"))
    else:
        compiled = torch.compile(step, fullgraph=True, backend=how)
    eager_state = compiled_state = sync.init(inputs)
    for i in (1, 2, 4):
        expected, eager_state = step(inputs, eager_state, torch.tensor(float(i)))
        mean, compiled_state = compiled(inputs, compiled_state, torch.tensor(float(i)))
        assert_alike(sync, (mean, compiled_state), (expected, eager_state))


REORDERED = [  # of each kind of collective, and in several rounds
    *("allgather", "bucketize(quantize(two_shot))", "error_feedback(powersgd(bf16(allreduce), rank=2))"),
    *(EXAMPLES["partition"], EXAMPLES["clip_by_global_norm"], EXAMPLES["weighted"]),
]


def whole_numbers(rank: int, rows: int) -> Tensor:
    """Whose products have the same bits in any order of adding up."""
    return torch.randint(-3, 4, (rows, 32), generator=torch.Generator().manual_seed(rank)).float()


@pytest.mark.parametrize("text", one_of(len(REORDERED), REORDERED))
@on_ranks(2, seconds=240)
def test_compiled_on_ranks_with_other_shapes_of_data_equals_eager(rank: int, text: str) -> None:
    """A compiler's schedule depends on the sizes of the data: collectives once came in another order on each rank."""
    sync, names = fnddp.parse(text), ["bias", *(f"{i}.weight" for i in range(5))]

    def step(state: object, x: Tensor) -> object:
        gradients: dict[str, Tensor] = {}
        for name in reversed(names):
            gradients[name] = x.mT @ x / 4096
            x = torch.where(x > 1, x - 3, x + 1).roll(1, -1)
        return sync({name: gradients[name] for name in names}, state, weight=weight_of(sync))

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    state = sync.init({name: torch.empty(32, 32) for name in names})
    x = whole_numbers(rank, 3000 if rank else 8)
    assert_alike(sync, compiled(state, x), step(state, x))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
@on_ranks(2, seconds=240)
def test_no_compiler_merges_drops_or_reorders_collectives(rank: int, backend: str) -> None:
    """In a graph with two pipelines and a collective of its own, on a rank that uses one leaf and one mean alone.

    Gradients of the others are the same zeros there, and parameters that require grad make a compiler look for those.
    """
    pipelines = fnddp.parse("allgather"), fnddp.parse("bucketize(quantize(two_shot))")
    group = dist.group.WORLD.group_name
    params = {name: whole_numbers(i, 32).requires_grad_() for i, name in enumerate("abcd")}

    def loss_of(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return sum(((x @ p).sum() for p in list(params.values())[: 1 if rank else None]), torch.zeros(()))

    def step(params: dict[str, Tensor], x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        gradients, loss = torch.func.grad_and_value(loss_of)(params, x)
        for sync in pipelines:
            loss = _functional.wait_tensor(_functional.all_reduce(loss, "sum", group))
            gradients, _ = sync(gradients, ())
        return {name: params[name] - scale * gradients[name] + loss for name in (["a"] if rank else params)}

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for rows in (8, 16, 24):  # the last two in a graph of any size
        given = params, whole_numbers(rank, rows * (1 + 9 * rank)), torch.tensor(0.5)
        torch.testing.assert_close(compiled(*given), step(*given), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("text", ["allreduce", "qsgd(allgather)", "error_feedback(fp16(two_shot))"])
@on_ranks(4, seconds=240)
def test_compiled_over_pairs_of_ranks(rank: int, text: str) -> None:
    """The groups are named in the graph. What Inductor makes of it is in the test above."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    sync, inputs = fnddp.parse(text).over(pairs[rank // 2]), inputs_of(rank)
    torch._dynamo.reset()
    compiled = torch.compile(sync, fullgraph=True, backend="aot_eager")
    eager_state = compiled_state = sync.init(inputs)
    for _ in range(2):
        expected, eager_state = sync(inputs, eager_state)
        mean, compiled_state = compiled(inputs, compiled_state)
        got, wanted = flatten_any((mean, compiled_state))[0], flatten_any((expected, eager_state))[0]
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        if text == "allreduce":
            partner = inputs_of(rank ^ 1)
            torch.testing.assert_close(mean, {name: (x + partner[name]) / 2 for name, x in inputs.items()})
