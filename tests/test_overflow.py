"""A step in which a gradient is infinite or NaN: memory stays as it was on all ranks, and training goes on after it."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import fnddp
from fnddp import error_feedback, every, from_hook
from fnddp.core import tree
from fnddp.core.sync import REMEMBERED, State
from fnddp.device import Accelerator, Device
from fnddp.kernels.keep import KEEP, KEEP_INTO
from fnddp.laws import bits, weight_of
from fnddp.run.nonfinite import has_nonfinite
from tests.pipelines import EXAMPLES
from tests.ranks import on_ranks
from tests.rings import one_of

STEPS = 12
SHAPES = {"a.weight": (12, 20), "a.bias": (317,), "b.weight": (9, 31)}  # no multiples of a block


LIKE = {path: torch.ones(shape) for path, shape in SHAPES.items()}


def memory(state: State) -> dict[str, Tensor]:
    return {path: part for path, marks, part in tree.annotated_items(state) if REMEMBERED in marks}


REMEMBERING = [text for text in EXAMPLES.values() if memory(fnddp.parse(text).init(LIKE))]
MORE = [
    "error_feedback(every(2, powersgd(allreduce, rank=2)))",  # of which no rank sees what another one has got
    "partition({'a.*': error_feedback(every(4, topk(allgather, k=3))), '*': error_feedback(fp16(allreduce))})",
    "error_feedback(sign(two_shot, scale='none'))",  # whose mean shows no NaN
    "error_feedback(natural(two_shot))",  # whose payloads have no fractions
    "error_feedback(switch({0: allreduce, 5: none}))",  # which leaves it on one rank
    "error_feedback(random_block(allreduce, block=3))",  # nor does this, where it is not drawn
    "error_feedback(quantize(bf16(two_shot), bits=4, rounding='stochastic'))",
    "error_feedback(fp8(allgather), residual='int8')",
    "error_feedback(rotate(quantize(two_shot, bits=4), block=8))",
    "rotate(error_feedback(quantize(two_shot, bits=4)), block=8)",
    "powersgd(allreduce, rank=3, refresh=3)",
    "quantize(two_shot(server_memory=True), bits=4)",
]


@pytest.mark.parametrize("text", one_of(3, [*REMEMBERING, *MORE]))
@on_ranks(2, threads=True)
def test_memory_stays_as_it_was(rank: int, text: str) -> None:
    """One element of one leaf on one rank; of `every` in steps that send, and in those that do not."""
    sync = fnddp.parse(text)
    if not sync.ops:
        pytest.skip("nothing is reduced")
    run, state = fnddp.jit(sync), sync.init(LIKE)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        grads = {path: torch.randn(shape, generator=generator) for path, shape in SHAPES.items()}
        is_bad = step in (3, 6)
        if is_bad and rank == 1:
            grads["a.weight"][3, 4] = math.inf if step == 3 else math.nan
        before = {path: part.clone() for path, part in memory(state).items()}
        mean, state = run(grads, state, weight=weight_of(sync))
        for path, part in memory(state).items():
            assert part.isfinite().all(), (step, path)
            if is_bad and path in before:
                torch.testing.assert_close(part, before[path], rtol=0, atol=0, msg=f"{step}: {path}")
        # Memory still has what must not be applied: of several optimizers a scaler skips all.
        got = [leaf for leaf in mean.values() if leaf is not None]
        assert all(bool(leaf.isfinite().all()) is not is_bad for leaf in got if leaf.numel())


@on_ranks(2, threads=True)
def test_gradients_of_the_caller_stay_as_they_were(rank: int) -> None:
    """Means of `none` are the gradients themselves."""
    sync = fnddp.parse("partition({'a': none, '*': error_feedback(bf16(allreduce))})")
    grads = {"a": torch.ones(3), "b": torch.full((3,), math.inf)}
    mean, _ = fnddp.jit(sync)(grads, sync.init(grads))
    assert torch.equal(grads["a"], torch.ones(3))
    assert not mean["a"].isfinite().all()


@on_ranks(2)
def test_what_a_pipeline_without_a_plan_does_not_send_stays_out_of_its_memory(rank: int) -> None:
    sync = error_feedback(every(2, from_hook(allreduce_hook)))
    model = fnddp.DistributedDataParallel(nn.Linear(3, 2), sync=sync)
    for step in range(4):
        model.zero_grad()
        before = memory(model.sync_state)
        factor = math.inf if (rank, step) == (1, 2) else 1.0  # of a step that sends nothing
        (model(torch.ones(1, 3)).sum() * factor).backward()
        assert model.plan is None
        assert step != 2 or bits(memory(model.sync_state)) == bits(before)
        assert all(part.isfinite().all() for part in memory(model.sync_state).values())
        assert all((p.grad is None) == (step % 2 == 0) for p in model.parameters())


@pytest.mark.parametrize("found", [True, False])
@pytest.mark.parametrize("over", [None, "old", "new"])
def test_memory_is_kept_to_the_bit(found: bool, over: str | None) -> None:
    """Of each dtype, with strides of its own, and next values that are parts of one tensor."""
    odd = [math.nan, math.inf, -math.inf, -0.0, 0.0, 1.5, -3e38, 1e-45]
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.complex64)
    for dtype in dtypes:
        old = [torch.tensor(odd, dtype=torch.float64).nan_to_num_(7, 8, 9).to(dtype), *torch.ones(3, 2, dtype=dtype)]
        if dtype.is_floating_point:
            old[0] = torch.tensor(odd, dtype=torch.float64).to(dtype)
        new = [part.roll(1, 0) for part in old[:1]] + list(torch.zeros(2, 3, dtype=dtype).mT)
        wanted = bits([part.clone() for part in (old if found else new)])
        out = {"old": old, "new": new}.get(over or "")
        if out is None:
            out = KEEP(old, new, torch.tensor(found))
        else:
            KEEP_INTO(old, new, torch.tensor(found), out=out)
        assert bits(out) == wanted


@pytest.mark.parametrize("kind", [Device, Accelerator])
def test_nan_and_infinity_are_found_among_the_largest_numbers(kind: type[Device]) -> None:
    """In payloads of several dtypes at once. Sums of the largest numbers would be infinite."""
    device = kind(torch.device("cpu"))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.complex64):
        x = torch.full((1000,), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
        least = torch.full((3,), -torch.finfo(torch.float64).max, dtype=torch.float64)
        others = [least, torch.arange(3), torch.empty(0)]
        assert not has_nonfinite([x, *others], device)
        for odd in (math.nan, math.inf, -math.inf):
            spoilt = x.clone()
            spoilt[77] = odd
            assert has_nonfinite([x, spoilt, *others], device)
    assert has_nonfinite([torch.arange(3)], device) is False
