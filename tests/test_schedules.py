"""Schedules: which pipeline runs when, what a step without an update leaves alone, and what is measured on the way."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import allgather, allreduce, error_feedback, every, measure, topk
from fnddp.laws import bits
from tests.models import Parts, batch, loss_of, make_model
from tests.ranks import on_ranks
from tests.test_passes import Applied

# A leaf without an update, in the adapters (see also test_adapters.py)


@pytest.mark.parametrize("option", [None, "gradient_as_bucket_view", "static_graph"])
@on_ranks(2)
def test_what_has_no_update_has_no_gradient(rank: int, option: str | None) -> None:
    """So that no optimizer moves it."""
    sync = error_feedback(every(3, allreduce))
    if option is None:
        model: Any = fnddp.DistributedDataParallel(make_model(), sync=sync, bucket_cap_mb=0.01)
    else:
        model = TorchDDP(make_model(), bucket_cap_mb=0.01, **{option: True})
        fnddp.register(model, sync)
    for step in range(6):
        model.zero_grad(set_to_none=step > 2)
        loss_of(model(batch(rank, step))).backward()
        assert [p.grad is not None for p in model.parameters()] == [step % 3 == 2] * 6


@on_ranks(2)
def test_unused_leaves_keep_what_they_have(rank: int) -> None:
    model = fnddp.DistributedDataParallel(Parts(), sync=every(2, allreduce))
    use = "ab" if rank == 0 else "a"
    model.module.c.weight.grad = kept = torch.ones(8, 16)
    for step in range(4):
        loss_of(model(batch(rank, step), use)).backward()
        assert model.module.c.weight.grad is kept
        others = [p for name, p in model.module.named_parameters() if not name.startswith("c")]
        assert [p.grad is None for p in others] == [step % 2 == 0] * len(others)


def draws(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {"w": torch.randn(24, 16, generator=generator), "b": torch.randn(24, generator=generator)}


def test_a_transform_that_loses_leaves_is_an_error_and_not_a_skip():
    sync, grads = Applied(send=lambda leaves: {}), {"w": torch.ones(2)}
    for run in (sync, fnddp.jit(sync), lambda grads, _: fnddp.lower(sync, grads, world_size=2)):
        with pytest.raises(ValueError, match="return all"):
            run(grads, ())
    reads = Applied(send=lambda leaves: {} if leaves["w"].any() else leaves)  # so it has no plan
    with pytest.raises(ValueError, match="return all"):
        fnddp.jit(reads)(grads, ())


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "Returning: exchange must return Exchange.mean, sent, state., got None"),
        (
            fnddp.Exchange({"w": torch.ones(2)}, {"w": torch.ones(2)}, (0, 1)),
            "exchange returned a state of another structure",
        ),
    ],
)
def test_what_a_transform_returns_is_checked(made, message):
    class Returning(Applied):
        def exchange(self, leaves: Any, state: Any) -> Any:
            return made

    with pytest.raises((TypeError, ValueError), match=message):
        fnddp.jit(Returning())({"w": torch.ones(2)}, 0)


def test_switch_holds_one_residual_for_all_stages():
    lossy = [error_feedback(fnddp.powersgd(allreduce, rank=rank)) for rank in (2, 1, 2)]
    sync = fnddp.switch({2: lossy[2], 0: lossy[0], 1: lossy[1]})
    state = sync.init(draws(0, 0))
    assert [key for key in fnddp.state_dict(state) if "residual" in key] == [
        "local/stages.0.residual.b",
        "local/stages.0.residual.w",
    ]
    assert [stage.inner.q["w"].shape[1] for stage in state.stages.values()] == [2, 1, 2]
    expected, memory = [each.init(draws(0, 0)) for each in lossy], None
    for step in range(4):
        mean, state = sync(draws(0, step), state)
        stage = min(step, 2)
        if memory is not None:
            expected[stage] = expected[stage]._replace(residual=memory)
        want, expected[stage] = lossy[stage](draws(0, step), expected[stage])
        memory = expected[stage].residual
        assert bits(mean) == bits(want)
        assert bits(state.stages["0"].residual) == bits(memory)
    assert state.step == 2


@given(scale=st.floats(2**-20, 2**20), max_norm=st.floats(2**-10, 2**10))
def test_clipping_is_torchs(scale: float, max_norm: float):
    params = [nn.Parameter(torch.zeros_like(leaf)) for leaf in draws(0, 0).values()]
    for p, leaf in zip(params, draws(0, 0).values(), strict=True):
        p.grad = scale * leaf
    grads = {**{str(i): p.grad.clone() for i, p in enumerate(params)}, "count": torch.tensor([7])}
    done = fnddp.clip_by_global_norm(allreduce, max_norm=max_norm).exchange(grads, ())
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    assert bits(done.mean) == bits(done.sent)
    assert done.mean.pop("count").tolist() == [7]
    for p, mean in zip(params, done.mean.values(), strict=True):
        torch.testing.assert_close(mean, p.grad, rtol=1e-6, atol=0)


@on_ranks(3, threads=True)
def test_what_is_measured_is_the_error_and_the_cosine_to_the_exact_mean(rank: int) -> None:
    def flat(leaves: dict[str, Tensor]) -> Tensor:
        return torch.cat([leaves[path].flatten() for path in sorted(leaves)]).double()

    sync = measure(topk(allgather, ratio=0.25), every_steps=3)
    state = sync.init(draws(rank, 0))
    for step in range(5):
        before, (mean, state) = state, sync(draws(rank, step), state)
        if step % 3:
            assert bits((state.error, state.cosine)) == bits((before.error, before.cosine))
            continue
        own, exact = flat(draws(rank, step)), sum(flat(draws(other, step)) for other in range(3))
        error = (own - flat(sync.inner.exchange(draws(rank, step), ()).sent)).norm() / own.norm()
        cosine = torch.nn.functional.cosine_similarity(flat(mean), exact, dim=0)
        assert [state.error.item(), state.cosine.item()] == pytest.approx([error.item(), cosine.item()], rel=1e-5)


def test_a_lossless_pipeline_measures_nothing_lost_and_zeros_have_no_angle():
    sync = measure(allreduce)
    _, state = sync(draws(0, 0), sync.init(draws(0, 0)))
    assert state.error.item() == 0
    assert state.cosine.item() == pytest.approx(1)
    zeros = {"w": torch.zeros(3)}
    _, state = sync(zeros, sync.init(zeros))
    assert (state.error.item(), state.cosine.item()) == (0, 0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("first", "second"), [("powersgd(allreduce)", "qsgd(allgather)"), ("every(2, allreduce)", "allgather")]
)
def test_stages_of_a_switch_may_have_states_of_other_structures(first, second):
    sync = fnddp.parse(f"switch({{0: {first}, 2: {second}}})")
    fnddp.laws.check(sync, ranks=[2], grads=fnddp.laws.model)
