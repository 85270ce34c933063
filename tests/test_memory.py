"""Memory against numpy written from the papers, against torch's own SGD, and what each promises of what is lost."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fnddp
from fnddp import allgather, allreduce, ef21, error_feedback, momentum_correction, shared_momentum, sign, topk, two_shot
from fnddp.adapters.handle import biased_without_memory, warn_without_memory
from fnddp.core.sync import Sync
from fnddp.kernels.int8 import from_int8, to_int8
from fnddp.laws import gather, run
from tests.ranks import on_ranks
from tests.rings import one_of

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # float32 arithmetic, some ten steps deep
STEPS = 12


def gradient(rank: int, step: int, size: int = 12) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + step))


def outputs(sync: Sync, steps: int = STEPS, of: Callable[[int, int], torch.Tensor] = gradient) -> Any:
    """Return the means of all steps, and the last state."""
    means, state = run(sync, lambda *at: {"w": of(*at)}, dist.get_rank() if dist.is_initialized() else 0, range(steps))
    return [mean["w"] for mean in means], state


def numpy_topk(x: np.ndarray, k: int) -> np.ndarray:
    """The largest of each row."""
    least = np.sort(np.abs(x), axis=1)[:, -k, None]
    return np.where(np.abs(x) >= least, x, 0)


def of_ranks(n: int, step: int) -> np.ndarray:
    return np.stack([gradient(rank, step).double().numpy() for rank in range(n)])


def papers_ef21(n: int, k: int, eta: float) -> Iterator[np.ndarray]:
    """EF21, Algorithm 2, and EF21-SGDM, Algorithm 1, which differ in eta, for all ranks at once, from zero."""
    g, v = np.zeros((n, 12)), np.zeros((n, 12))
    for step in range(STEPS):
        v = (1 - eta) * v + eta * of_ranks(n, step)
        g = g + numpy_topk(v - g, k)
        yield g.mean(0)


def papers_dgc(n: int, k: int, masking: bool) -> Iterator[np.ndarray]:
    """Deep gradient compression, Algorithms 1 and 4, without clipping, for all ranks at once."""
    u, v = np.zeros((n, 12)), np.zeros((n, 12))
    for step in range(STEPS):
        u = 0.9 * u + of_ranks(n, step)
        v = v + u
        sent = numpy_topk(v, k)
        v[sent != 0] = 0
        if masking:
            u[sent != 0] = 0
        yield sent.mean(0)


def papers_one_bit_adam(n: int, k: int) -> Iterator[np.ndarray]:
    """The momentum of 1-bit Adam's compression stage, Algorithm 1, for all ranks at once, from zero."""
    m, e = np.zeros(12), np.zeros((n, 12))
    for step in range(STEPS):
        x = 0.9 * m + 0.1 * of_ranks(n, step) + e
        sent = numpy_topk(x, k)
        m, e = sent.mean(0), x - sent
        yield m


SPARSE = topk(allgather, k=3)


@pytest.mark.parametrize(
    ("sync", "paper"),
    [
        (ef21(SPARSE), partial(papers_ef21, eta=1.0)),
        (ef21(SPARSE, eta=0.3), partial(papers_ef21, eta=0.3)),
        (momentum_correction(SPARSE), partial(papers_dgc, masking=True)),
        (momentum_correction(SPARSE, masking=False), partial(papers_dgc, masking=False)),
        (shared_momentum(error_feedback(SPARSE)), papers_one_bit_adam),
    ],
    ids=lambda part: str(part) if isinstance(part, Sync) else "paper",
)
@on_ranks(1, 3, threads=True)
def test_means_are_the_papers(rank, sync, paper):
    for mine, theirs in zip(outputs(sync)[0], paper(dist.get_world_size(), 3), strict=True):
        torch.testing.assert_close(mine.double(), torch.from_numpy(theirs), **CLOSE)


@pytest.mark.parametrize(
    ("sync", "dtype", "least", "most"),
    [
        (ef21(topk(allgather, k=20)), torch.float32, 0, 5e-6),
        (ef21(topk(allgather, k=20)), torch.bfloat16, 0, 5e-6),
        (ef21(fnddp.bf16(allreduce)), torch.float32, 1e-3, 1),
    ],
)
@on_ranks(3, threads=True)
def test_the_mean_estimate_drifts_by_float32_roundings_only(rank, sync, dtype, least, most):
    """By the root of the number of steps: 6e-8 * 500 ** 0.5 is 1.3e-6. What a 16-bit sum rounds stays for good."""
    _, state = outputs(sync, 500, lambda *at: gradient(*at, 64).to(dtype))
    mean = torch.stack(gather(state.h["w"])).double().mean(0)
    assert least <= (mean - state.mean_h["w"]).norm() / mean.norm() <= most


@on_ranks(2, threads=True)
def test_uncompressed_shared_momentum_is_that_of_torchs_sgd_and_adam(rank: int) -> None:
    """The optimizer behind it has none: of SGD the steps are the same, of Adam the first moment."""
    ours, sgd, adam = (torch.zeros(12, requires_grad=True) for _ in range(3))
    behind = fnddp.without_momentum(torch.optim.SGD([ours], lr=0.1, momentum=0.9), beta=0.9)
    sgd_of, adam_of = torch.optim.SGD([sgd], lr=0.1, momentum=0.9), torch.optim.Adam([adam], lr=0.1)
    for step, mean in enumerate(outputs(shared_momentum(allreduce))[0]):
        ours.grad, sgd.grad = mean, sum(gradient(other, step) for other in range(2)) / 2
        adam.grad = sgd.grad.clone()
        for optimizer in (behind, sgd_of, adam_of):
            optimizer.step()
        torch.testing.assert_close(ours, sgd, **CLOSE)
        torch.testing.assert_close(mean, adam_of.state[adam]["exp_avg"], **CLOSE)


def test_an_optimizer_without_its_momentum():
    w = [torch.zeros(2, requires_grad=True)]
    s = (0.5 / 1.5) ** 0.5
    for kind, decay in ((torch.optim.Adam, 0.3), (torch.optim.AdamW, 0.3 / s)):
        (group,) = fnddp.without_momentum(kind(w, lr=0.1, weight_decay=0.3), beta=0.5).param_groups
        assert (group["lr"], group["weight_decay"]) == pytest.approx((0.1 * s, decay))
        assert group["betas"] == (0.0, 0.999)
    (group,) = fnddp.without_momentum(torch.optim.SGD(w, lr=0.1, momentum=0.75), 0.9).param_groups
    assert (group["lr"], group["momentum"]) == (0.4, 0.0)
    groups = [{"params": [torch.zeros(2, requires_grad=True)]} for _ in range(2)]
    rate = torch.tensor(0.1)
    done = fnddp.without_momentum(torch.optim.AdamW(groups, lr=rate), beta=0.5)
    assert [group["lr"].item() for group in done.param_groups] == pytest.approx([0.1 * s] * 2)
    assert rate == 0.1
    second = [dict(groups[0]), {**groups[1], "nesterov": True, "momentum": 0.9}]
    damped = torch.optim.SGD(w, lr=0.1, momentum=0.5, dampening=0.5)  # whose first step has none
    for other in (torch.optim.SGD(second, lr=0.1, momentum=0.5), damped, torch.optim.RMSprop(w)):
        before = [group["momentum"] for group in other.param_groups]
        with pytest.raises(TypeError, match=f"without Nesterov's momentum or dampening, got {type(other).__name__}"):
            fnddp.without_momentum(other, beta=0.9)
        assert [group["momentum"] for group in other.param_groups] == before
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\), got 1"):
        fnddp.without_momentum(torch.optim.AdamW(w), beta=1)


def test_momentum_is_wider_than_gradients():
    one = torch.ones(1, dtype=torch.bfloat16)
    _, state = outputs(shared_momentum(allreduce, beta=0.999), 3000, lambda *_: one)
    assert state.momentum["w"].item() == pytest.approx(1 - 0.999**3000, rel=1e-4)  # in bfloat16 it stops at 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 1000])
def test_int8_is_within_half_a_level_of_each_block(size: int, dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    x = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=wide)
    x = torch.view_as_real(x) if dtype.is_complex else x
    x[size // 2 :] *= 1e6  # sets the levels of its own blocks only
    q, scale = to_int8(x)
    assert (q.dtype, q.shape, scale.dtype) == (torch.int8, x.shape, wide.to_real())
    back, half = from_int8(q, scale), scale / 2 * (1 + 1e-3)  # for rounding
    levels = half.repeat_interleave(-(-x.numel() // half.numel()))[: x.numel()].view(x.shape)
    assert ((back - x).abs() <= levels).all()
    assert half.numel() == max(1, -(-x.numel() // 128))
    assert x.numel() == 0 or q.abs().max() == 127


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 3e38])
def test_int8_of_the_smallest_and_largest_numbers_is_finite(size: float) -> None:
    x = torch.tensor([size, -size, size / 3])
    back = from_int8(*to_int8(x))
    assert back.isfinite().all()
    assert ((back - x).abs() <= max(size / 254 * 1.001, 127 * torch.finfo(torch.float32).tiny)).all()


def test_small_residuals_take_a_byte_and_a_scale_for_each_block() -> None:
    grads = {"w": torch.zeros(1000, 128), "b": torch.zeros(100, dtype=torch.bfloat16)}
    wide, small = (error_feedback(sign(allgather), residual=each).init(grads) for each in ("float32", "int8"))
    sizes = [sum(part.nbytes for part in fnddp.state_dict(state).values()) for state in (wide, small)]
    assert sizes == [4 * 128_100, 128_100 + 4 * 1000 + 4 * 1]


@on_ranks(1, 4, threads=True)
def test_one_bit_with_both_residuals_loses_nothing(rank: int) -> None:
    n, steps, size = dist.get_world_size(), 6, 21
    sync = error_feedback(sign(two_shot(server_memory=True)))
    means, state = outputs(sync, steps, lambda *at: gradient(*at, size))
    workers = torch.stack(gather(state.residual["w"])).double().mean(0)
    servers = torch.cat(gather(state.inner.residual["w"])).double()[:size]  # each owns a chunk
    assert servers.abs().max() > 0
    exact = sum(gradient(other, step, size).double() for other in range(n) for step in range(steps)) / n
    torch.testing.assert_close(sum(means).double() + workers + servers, exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "memory",
    one_of(3, [error_feedback, ef21, partial(momentum_correction, momentum=0.0)]),
    ids=["error_feedback", "ef21", "momentum_correction"],
)
def test_small_gradients_of_16_bits_add_up(memory):
    grads = torch.tensor([1.0, 0.001], dtype=torch.bfloat16)
    means, _ = outputs(memory(topk(allgather, k=1)), 3000, lambda *_: grads)
    assert torch.stack(means).float().sum(0)[1] == pytest.approx(3, abs=1)


@pytest.mark.parametrize("text", ["bf16(allgather)", "bf16(two_shot)", "bf16(sign(allgather))"])
@on_ranks(3, threads=True)
def test_a_cast_around_a_carrier_rounds_only_what_travels(rank, text):
    means, state = outputs(error_feedback(fnddp.parse(text)), 200, lambda rank, _: gradient(rank, 0, 50))
    left = allreduce({"w": 200 * gradient(rank, 0, 50) - state.residual["w"]}, ())[0]["w"]
    assert (sum(means) - left).abs().max() < 1e-3


def test_memory_of_ones_own_is_memory(monkeypatch):
    monkeypatch.setattr(fnddp.bucketize, "remembers", True)
    assert biased_without_memory(fnddp.parse("bucketize(topk(allgather, ratio=0.5))")) is None


@pytest.mark.parametrize(
    ("text", "forgets"),
    [
        ("powersgd(quantize(two_shot))", "powersgd"),
        ("warmup(bucketize(topk(allgather, ratio=0.5)), steps=3)", "topk"),
        ("partition({'bias': allreduce, '*': powersgd(allreduce)})", "powersgd"),
        ("error_feedback(powersgd(quantize(two_shot)))", None),
        ("shared_momentum(error_feedback(powersgd(allreduce)))", None),
        ("bucketize(quantize(two_shot))", None),
    ],
)
def test_who_leaves_out_parts_of_gradients_for_good_is_warned_once(text, forgets, caplog):
    warn_without_memory.cache_clear()
    for _ in range(2):
        fnddp.DistributedDataParallel(torch.nn.Linear(4, 4), sync=text)
    said = [each.getMessage() for each in caplog.records if "discards part" in each.getMessage()]
    assert len(said) == (forgets is not None)
    assert all(f"error_feedback({forgets}(...))" in each for each in said)
