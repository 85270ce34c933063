"""`weighted(inner)` is `inner` of gradients times n w / W; without a valid weight on a rank the step fails on all."""

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import DistributedDataParallel, StepFailedError, allreduce, error_feedback, fp16, weighted
from fnddp.laws import bits
from fnddp.wire.c10d import C10d
from tests.ranks import on_ranks

NAN = float("nan")
INNER = [
    *("allreduce", "error_feedback(bf16(allreduce))", "powersgd(allreduce, rank=1, min_compression_rate=0)"),
    "partition({'o*': error_feedback(every(2, powersgd(allreduce))), '*': warmup(bf16(allreduce), steps=2)})",
    *("partition({'own': none, '*': two_shot})", "fp16(allreduce, check=True)"),  # the last one without a plan
]
WEIGHTS: list[tuple[Any, Any]] = [(3, 1), (0, 2.5), (1e300, 1e300), (torch.tensor(2), 0.3), (5, 0)]
INVALID: list[tuple[Any, str]] = [  # and what errors call it
    *((None, "none"), ("3", "'3'"), (NAN, "nan"), (math.inf, "inf"), (-1, "-1"), (1j, "1j"), (10**5000, "a int")),
    *((1.1e300, r"1\.1e\+300"), ([3], r"\[3\]"), (torch.ones(2), r"tensor\(\[1\., 1\.\]\)")),
]


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {"own": torch.randn(2, generator=generator), "w": torch.randn(6, 4, generator=generator)}


class Given(nn.Module):
    """A module whose gradients are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.w = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(6, 4))

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        return sum((p * grads[name]).sum() for name, p in self.named_parameters())


def by_class(sync: Any) -> Any:
    model = DistributedDataParallel(Given(), sync=sync)

    def run(grads: Any, state: Any, weight: Any) -> Any:
        model.zero_grad()
        with nullcontext() if weight is None else model.weight(weight):
            model(grads).backward()
        return {name: p.grad for name, p in model.module.named_parameters()}, model.sync_state

    return run


WAYS = {"class": by_class, "jit": fnddp.jit, "call": lambda sync: sync}


def by_hand(inner: Any, rank: int, step: int, state: Any) -> tuple[Any, Any]:
    """Return `inner` of scaled gradients; those of weight 0 count as zeros, though `weighted` gets NaN."""
    first, second = map(float, WEIGHTS[step])
    scale = torch.tensor((first, second)[rank] / ((first + second) / 2), dtype=torch.float64).float()
    return inner({name: g * scale if inner.reduces(name) else g for name, g in gradients(rank, step).items()}, state)


@pytest.mark.parametrize("way", ["class", "jit"])  # for calls it is law 11
@pytest.mark.parametrize("text", INNER)
@on_ranks(2)
def test_a_weighted_mean_is_the_plain_mean_of_scaled_gradients_to_the_bit(rank: int, text: str, way: str) -> None:
    inner = fnddp.parse(text)
    run, state = WAYS[way](weighted(inner)), inner.init(gradients(0, 0))
    for step, weights in enumerate(WEIGHTS):
        want, after = by_hand(inner, rank, step, state)
        factor = {name: NAN if not weights[rank] and inner.reduces(name) else 1.0 for name in want}
        grads = {name: factor[name] * g for name, g in gradients(rank, step).items()}
        assert bits(run(grads, state, weight=weights[rank])) == bits((want, after)), step
        state = after


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("text", [INNER[1], INNER[-1]])
@on_ranks(2)
def test_a_step_without_a_valid_weight_on_all_ranks_fails_and_loses_nothing(rank: int, text: str, way: str) -> None:
    inner, everyone = fnddp.parse(text), way == "call"  # which has no vote, so all ranks name all
    run, state = WAYS[way](weighted(inner)), inner.init(gradients(0, 0))
    for step, (given, shown) in enumerate(INVALID):
        error, says = {
            (False, 0): (StepFailedError, f"rank 1 failed with ValueError: weight: .* this rank gave {shown}"),
            (False, 1): (ValueError, f"this rank gave {shown}"),
        }.get((everyone, rank), (ValueError, f"on each rank, but rank 1 gave {shown}"))
        with pytest.raises(error, match=says):
            run(gradients(rank, 99), state, weight=3 if rank == 0 else given)
        with pytest.raises(ValueError, match="all ranks gave 0, so there is no mean"):
            run(gradients(rank, 99), state, weight=0)
        step %= len(WEIGHTS)
        want = by_hand(inner, rank, step, state)
        assert bits(run(gradients(rank, step), state, weight=WEIGHTS[step][rank])) == bits(want)
        state = want[1]


def line(sync: Any = "weighted(allreduce)", part: nn.Module | None = None) -> DistributedDataParallel:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return DistributedDataParallel(layer if part is None else nn.Sequential(layer, part), sync=sync)


@on_ranks(2)
def test_a_block_weighs_backwards_that_begin_in_it_and_what_no_sync_accumulated(rank: int) -> None:
    model, x = line(), torch.full((1, 1), rank + 1.0)
    loss = model(x).sum()  # not in the block: only the backward counts
    with model.weight(7), model.weight(1 + 2 * rank):
        with model.no_sync():
            model(x).sum().backward()
        loss.backward()
    assert model.module.weight.grad.item() == 2 * (1 * 1 + 2 * 3) / 4
    with pytest.raises(ZeroDivisionError), model.weight(1):
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="gave none"):
        model(x).sum().backward()


@on_ranks(2)
def test_models_and_parts_of_one_backward_have_weights_of_their_own(rank: int) -> None:
    part = line()
    first, second, plain = line(part=part), line("weighted(error_feedback(fp16(allreduce)))"), line("allreduce")
    models, x = (first, part, second, plain), torch.full((1, 1), rank + 1.0)
    for step in range(3):
        for model in models:
            model.zero_grad()
        of_part = nullcontext() if (rank, step) == (1, 1) else part.weight(3 - 2 * rank)
        fails = pytest.raises(ValueError if rank else StepFailedError, match="gave none")
        with fails if step == 1 else nullcontext(), first.weight(1 + 2 * rank), of_part, second.weight(1):
            sum(model(x).sum() for model in (first, second, plain)).backward()
        if step != 1:
            assert [p.grad.item() for p in first.parameters()] == [1.75, 1.25]
            assert [model.module.weight.grad.item() for model in (second, plain)] == [1.5, 1.5]


@on_ranks(2, 3)
def test_ranks_without_inputs_have_the_weight_0_within_join(rank: int) -> None:
    counts, n = [5, 2, 3], torch.distributed.get_world_size()
    model, want = line(), 1.0
    for step in range(max(counts[:n])):
        left = [(1 + other, 1.0 + other + step) for other in range(n) if step < counts[other]]
        want -= 0.1 * sum(weight * grad for weight, grad in left) / sum(weight for weight, _ in left)
    with model.join():
        for step in range(counts[rank]):
            model.zero_grad()
            with model.weight(1 + rank):
                model(torch.full((1, 1), 1.0 + rank + step)).sum().backward()
            with torch.no_grad():
                model.module.weight -= 0.1 * model.module.weight.grad
    torch.testing.assert_close(model.module.weight.item(), want)


@pytest.mark.thorough
@on_ranks(2, seconds=300)
def test_torch_compile_takes_tensors_and_numbers_as_weights(rank: int) -> None:
    sync = weighted(error_feedback(fp16(allreduce)))
    grads, state = gradients(rank, 0), sync.init(gradients(rank, 0))

    @partial(torch.compile, backend="aot_eager", fullgraph=True)  # torch's "eager" leaves no_grad on after an error
    def step(grads: Any, state: Any, weight: Any) -> Any:
        return sync(grads, state, weight=weight)

    for weight in (1.0 + 2 * rank, float(rank)):
        want, _ = sync(grads, state, weight=weight)
        for given in (torch.tensor(weight), weight, int(weight)):
            mean, _ = step({name: g if weight else g * NAN for name, g in grads.items()}, state, given)
            torch.testing.assert_close(mean, want)
    for bad in (*map(torch.tensor, (-1.0, NAN, 0.0)), -1, None):
        with pytest.raises(RuntimeError, match="weight: one is negative or not finite, or all ranks gave 0"):
            step(grads, state, bad)


@on_ranks(2)
def test_the_plan_sends_the_weight_ahead_of_gradients(rank: int) -> None:
    plan = fnddp.lower(weighted(fp16(allreduce)), gradients(0, 0), world_size=2)
    assert [each.wire_bytes for each in plan.collectives] == [8, 52]
    assert "all_reduce sum float64[1] over 2 ranks, 8 B, ahead of gradients: weight" in str(plan)
    seen = list[str]()

    class Noting(C10d):
        def start(self, kind: Any, send: Tensor, *rest: Any) -> Any:
            seen.append(f"{kind.name} of {send.dtype}")
            return super().start(kind, send, *rest)

    model = DistributedDataParallel(Given(), sync=weighted(fp16(allreduce)), wire=Noting())
    for p in model.module.parameters():
        p.register_hook(lambda _: seen.append("gradient"))
    for _ in range(2):
        seen.clear()
        with model.weight(1):
            model(gradients(rank, 0)).backward()
        assert seen == ["all_reduce of torch.float64", "gradient", "gradient", "all_reduce of torch.float16"]


REFUSED: dict[str, Any] = {
    r"must be outermost; write weighted\(error_feedback\(": "error_feedback(weighted(allreduce))",
    r"must be outermost; write weighted\(partition\(": "partition({'a': weighted(allreduce), '*': allreduce})",
    r"must be outermost; write weighted\(switch\(": "switch({0: weighted(allreduce), 2: allreduce})",
    "takes sum over ranks, and only a mean can be weighted": "weighted(all_reduce(op='sum'))",
    "over several process groups": "weighted(partition({'a': allreduce, '*': all_reduce(group='7')}))",
    "does not name the process group": lambda: weighted(fnddp.from_hook(allreduce_hook, None)),
    "value_and_grad: .* cannot take a weight": lambda: fnddp.value_and_grad(Given(), weighted(allreduce)),
    "register: .* needs a weight in each step": lambda: fnddp.register(TorchDDP(Given()), weighted(allreduce)),
    r"allreduce takes no weight; write weighted\(allreduce\)": lambda: [
        way(allreduce)(gradients(0, 0), (), weight=2) for way in WAYS.values()
    ],
}


@on_ranks(1)
def test_what_takes_no_weight_or_cannot_be_weighted_is_refused_by_name(rank: int) -> None:
    for says, made in REFUSED.items():
        with pytest.raises(TypeError, match=says):
            fnddp.parse(made) if isinstance(made, str) else made()
    for run in (weighted(allreduce), fnddp.jit(weighted(allreduce))):
        with pytest.raises(ValueError, match=r"leaf 'count' is torch.int64, which cannot be scaled"):
            run({"count": torch.tensor([1])}, (), weight=2)
