"""Memory against numpy written from the papers, against torch's own SGD, and what each promises of what is lost."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fnddp
from fnddp import allgather, allreduce, ef21, error_feedback, momentum_correction, shared_momentum, sign, topk, two_shot
from fnddp.core.sync import Sync
from fnddp.laws import gather
from fnddp.simulate.ranks import run_threads

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # float32 arithmetic, some ten steps deep
STEPS = 12


def numpy_topk(x: np.ndarray, k: int) -> np.ndarray:
    kept = np.zeros_like(x)
    largest = np.argsort(-np.abs(x))[:k]
    kept[largest] = x[largest]
    return kept


def gradient(rank: int, step: int, size: int = 12) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + step))


def outputs(sync: Sync) -> list[torch.Tensor]:
    rank = dist.get_rank()
    state = sync.init({"w": gradient(rank, 0)})
    means: list[torch.Tensor] = []
    for step in range(STEPS):
        mean, state = sync({"w": gradient(rank, step)}, state)
        means.append(mean["w"])
    return means


def papers_ef21(n: int, k: int, eta: float) -> list[np.ndarray]:
    """EF21, Algorithm 2, and EF21-SGDM, Algorithm 1, which differ in eta, for all ranks at once, from zero."""
    g, v = np.zeros((n, 12)), np.zeros((n, 12))
    estimates: list[np.ndarray] = []
    for step in range(STEPS):
        for i in range(n):
            v[i] = (1 - eta) * v[i] + eta * gradient(i, step).double().numpy()
            g[i] += numpy_topk(v[i] - g[i], k)
        estimates.append(g.mean(0))
    return estimates


def papers_dgc(n: int, k: int, masking: bool) -> list[np.ndarray]:
    """Deep gradient compression, Algorithms 1 and 4, without clipping, for all ranks at once."""
    u, v = np.zeros((n, 12)), np.zeros((n, 12))
    means: list[np.ndarray] = []
    for step in range(STEPS):
        sent = np.zeros((n, 12))
        for i in range(n):
            u[i] = 0.9 * u[i] + gradient(i, step).double().numpy()
            v[i] = v[i] + u[i]
            sent[i] = numpy_topk(v[i], k)
            mask = sent[i] != 0
            v[i][mask] = 0
            if masking:
                u[i][mask] = 0
        means.append(sent.mean(0))
    return means


def papers_one_bit_adam(n: int, k: int) -> list[np.ndarray]:
    """The momentum of 1-bit Adam's compression stage, Algorithm 1, for all ranks at once, from zero."""
    m, e = np.zeros(12), np.zeros((n, 12))
    means: list[np.ndarray] = []
    for step in range(STEPS):
        sent = np.zeros((n, 12))
        for i in range(n):
            x = 0.9 * m + 0.1 * gradient(i, step).double().numpy() + e[i]
            sent[i] = numpy_topk(x, k)
            e[i] = x - sent[i]
        m = sent.mean(0)
        means.append(m)
    return means


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
@pytest.mark.parametrize("n", [1, 3])
def test_means_are_the_papers(n, sync, paper):
    for got in run_threads(n, lambda rank: outputs(sync)):
        for mine, theirs in zip(got, paper(n, 3), strict=True):
            torch.testing.assert_close(mine.double(), torch.from_numpy(theirs), **CLOSE)


def drift(sync: Sync, dtype: torch.dtype, steps: int = 500) -> float:
    """How far the mean of h is from what all ranks hold of it, relative to it."""
    rank = dist.get_rank()
    state = sync.init({"w": gradient(rank, 0, 64).to(dtype)})
    for step in range(steps):
        _, state = sync({"w": gradient(rank, step, 64).to(dtype)}, state)
    mean = torch.stack(gather(state.h["w"])).double().mean(0)
    return float((mean - state.mean_h["w"]).norm() / mean.norm())


def test_the_mean_estimate_drifts_by_float32_roundings_only():
    """By the root of the number of steps: 6e-8 * 500 ** 0.5 is 1.3e-6. What a 16-bit sum rounds stays for good."""
    for dtype in (torch.float32, torch.bfloat16):
        assert max(run_threads(3, lambda rank, dtype=dtype: drift(ef21(topk(allgather, k=20)), dtype))) < 5e-6
    assert min(run_threads(3, lambda rank: drift(ef21(fnddp.bf16(allreduce)), torch.float32))) > 1e-3


def test_uncompressed_shared_momentum_is_that_of_torchs_sgd_and_adam():
    """The optimizer behind it has none: of SGD the steps are the same, of Adam the first moment."""

    def body(rank: int) -> None:
        ours, sgd, adam = (torch.zeros(12, requires_grad=True) for _ in range(3))
        behind = fnddp.without_momentum(torch.optim.SGD([ours], lr=0.1, momentum=0.9), beta=0.9)
        sgd_of, adam_of = torch.optim.SGD([sgd], lr=0.1, momentum=0.9), torch.optim.Adam([adam], lr=0.1)
        for step, mean in enumerate(outputs(shared_momentum(allreduce))):
            ours.grad, sgd.grad = mean, sum(gradient(other, step) for other in range(2)) / 2
            adam.grad = sgd.grad.clone()
            for optimizer in (behind, sgd_of, adam_of):
                optimizer.step()
            torch.testing.assert_close(ours, sgd, **CLOSE)
            torch.testing.assert_close(mean, adam_of.state[adam]["exp_avg"], **CLOSE)

    run_threads(2, body)


def test_an_optimizer_without_its_momentum():
    w = [torch.zeros(2, requires_grad=True)]
    s = (0.5 / 1.5) ** 0.5
    for kind, decay in ((torch.optim.Adam, 0.3), (torch.optim.AdamW, 0.3 / s)):
        (group,) = fnddp.without_momentum(kind(w, lr=0.1, weight_decay=0.3), beta=0.5).param_groups
        assert (group["lr"], group["weight_decay"]) == pytest.approx((0.1 * s, decay))
        assert group["betas"] == (0.0, 0.999)
    (group,) = fnddp.without_momentum(torch.optim.SGD(w, lr=0.1, momentum=0.75, dampening=0.5), 0.9).param_groups
    assert (group["lr"], group["momentum"], group["dampening"]) == (0.2, 0.0, 0.0)
    groups = [{"params": [torch.zeros(2, requires_grad=True)]} for _ in range(2)]
    rate = torch.tensor(0.1)
    done = fnddp.without_momentum(torch.optim.AdamW(groups, lr=rate), beta=0.5)
    assert [group["lr"].item() for group in done.param_groups] == pytest.approx([0.1 * s] * 2)
    assert rate == 0.1
    second = [dict(groups[0]), {**groups[1], "nesterov": True, "momentum": 0.9}]
    for other in (torch.optim.SGD(second, lr=0.1, momentum=0.5), torch.optim.RMSprop(w)):
        before = [group["momentum"] for group in other.param_groups]
        with pytest.raises(TypeError, match=f"without Nesterov's momentum, got {type(other).__name__}"):
            fnddp.without_momentum(other, beta=0.9)
        assert [group["momentum"] for group in other.param_groups] == before
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\), got 1"):
        fnddp.without_momentum(torch.optim.AdamW(w), beta=1)


def test_a_gradient_that_is_not_finite_leaves_no_trace_behind_skip_nonfinite():
    sync = fnddp.skip_nonfinite(shared_momentum(error_feedback(sign(allgather))))

    def body(rank: int) -> None:
        state = sync.init({"w": gradient(rank, 0)})
        for step, bad in enumerate((False, True, False)):
            before = state
            mean, state = sync({"w": gradient(rank, step) / (0 if bad and rank == 1 else 1)}, before)
            assert mean["w"].isfinite().all() != bad
            assert torch.equal(state.inner.momentum["w"], before.inner.momentum["w"]) == bad

    run_threads(2, body)


def test_a_clip_inside_is_kept_and_one_outside_is_not():
    clip = fnddp.clip_by_global_norm
    for sync, kept in (
        (shared_momentum(clip(allreduce, 1.0)), [1, 0.9, 0.81]),
        (clip(shared_momentum(allreduce), 1.0), [1, 1, 1]),
    ):
        state, means = sync.init({"w": torch.zeros(1)}), list[float]()
        for each in (100.0, 0.0, 0.0):
            mean, state = sync({"w": torch.tensor([each])}, state)
            means.append(mean["w"].item())
        assert means == pytest.approx(kept, rel=1e-4)


def test_momentum_is_wider_than_gradients():
    sync, grads = shared_momentum(allreduce, beta=0.999), {"w": torch.ones(1, dtype=torch.bfloat16)}
    state = sync.init(grads)
    for _ in range(3000):
        mean, state = sync(grads, state)
        mean["w"].zero_()  # an output is the caller's
    assert state.momentum["w"].item() == pytest.approx(1 - 0.999**3000, rel=1e-4)  # in bfloat16 it stops at 0.25


@pytest.mark.parametrize("n", [1, 4])
def test_one_bit_with_both_residuals_loses_nothing(n):
    run_threads(n, both_residuals)


def both_residuals(rank: int) -> None:
    n, steps, size = dist.get_world_size(), 6, 21
    sync = error_feedback(sign(two_shot(server_memory=True)))
    state = sync.init({"w": torch.empty(size)})
    total = torch.zeros(size, dtype=torch.float64)
    for step in range(steps):
        mean, state = sync({"w": gradient(rank, step, size)}, state)
        total += mean["w"].double()
    workers = torch.stack(gather(state.residual["w"])).double().mean(0)
    servers = torch.cat(gather(state.inner.residual["w"])).double()[:size]  # each owns a chunk
    assert servers.abs().max() > 0
    exact = sum(gradient(other, step, size).double() for other in range(n) for step in range(steps)) / n
    torch.testing.assert_close(total + workers + servers, exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "memory",
    [error_feedback, ef21, partial(momentum_correction, momentum=0.0)],
    ids=["error_feedback", "ef21", "momentum_correction"],
)
def test_small_gradients_of_16_bits_add_up(memory):
    sync = memory(topk(allgather, k=1))
    grads = {"w": torch.tensor([1.0, 0.001], dtype=torch.bfloat16)}
    state, total = sync.init(grads), torch.zeros(2)
    for _ in range(3000):
        mean, state = sync(grads, state)
        total += mean["w"].float()
    assert total[1] == pytest.approx(3, abs=1)


@pytest.mark.parametrize("text", ["bf16(allgather)", "bf16(two_shot)", "bf16(sign(allgather))"])
def test_a_cast_of_what_carries_rounds_nothing_but_what_travels(text):
    sync = error_feedback(fnddp.parse(text))

    def rank_errs_by(rank: int) -> float:
        grads = {"w": torch.randn(50, generator=torch.Generator().manual_seed(rank))}
        state, total = sync.init(grads), torch.zeros(50)
        for _ in range(200):
            mean, state = sync(grads, state)
            total += mean["w"]
        left = allreduce({"w": 200 * grads["w"] - state.residual["w"]}, ())[0]["w"]
        return (total - left).abs().max().item()

    assert max(run_threads(3, rank_errs_by)) < 1e-3
