"""PowerSGD in one round a step, and with refreshed queries: against numpy, and where warm queries alone stall."""

import numpy as np
import pytest
import torch

import fnddp
from fnddp import allreduce, error_feedback, powersgd
from fnddp.core.sync import Sync
from fnddp.simulate.ranks import run_threads
from tests.traces import check_laws

FORMS = [
    "error_feedback(powersgd(fp16(allreduce), rank=2, alternate=True))",
    "powersgd(two_shot, rank=2, refresh=2)",
    "powersgd(error_feedback(fp16(allreduce)), rank=2, min_compression_rate=0, alternate=True, refresh=3)",
]


def few(rank: int, step: int) -> dict[str, torch.Tensor]:
    """A matrix of each kind, and what is not compressed. Lowering takes long, so no more."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    conv = torch.randn(8, 3, 3, 3, generator=generator).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(14, 9, generator=generator, dtype=torch.complex64)
    return {"conv": conv, "weight": weight, "bias": torch.randn(5, generator=generator), "count": torch.tensor(rank)}


@pytest.mark.parametrize("text", FORMS)
def test_laws(text):
    check_laws(2, fnddp.parse(text), few)


GRADS = {"w": torch.empty(64, 32), "b": torch.empty(64)}


def plan_after(sync: Sync, steps: int) -> fnddp.Plan:
    state = sync.init(GRADS)
    for _ in range(steps):
        _, state = sync({path: torch.ones_like(leaf) for path, leaf in GRADS.items()}, state)
    return fnddp.lower(sync, GRADS, state=state, world_size=2)


def test_alternating_takes_one_round():
    """P and what is not compressed, then Q and that: on average half of PowerSGD's factors."""
    sync = powersgd(allreduce, rank=2, alternate=True)
    even, odd = plan_after(sync, 0), plan_after(sync, 1)
    assert (even.rounds, len(even.collectives), even.wire_bytes) == (1, 1, 4 * (2 * 64 + 64))
    assert (odd.rounds, len(odd.collectives), odd.wire_bytes) == (1, 1, 4 * (2 * 32 + 64))
    both = plan_after(powersgd(allreduce, rank=2), 0)
    assert (both.rounds, both.wire_bytes) == (2, 4 * (2 * 64 + 2 * 32 + 64))


def test_a_state_without_options_is_saved_as_before():
    assert list(fnddp.state_dict(powersgd(allreduce).init(GRADS))) == ["replicated/q.w", "replicated/step"]


# Refreshing


def minimum(sync: Sync, steps: int = 150) -> float:
    """What descent makes of (a - 1)^2 / 2 + a^2 (b - 1)^2 / 2, two elements of a matrix, whose least is 0."""
    x = torch.zeros(8, 8)
    state = sync.init({"x": x})
    for _ in range(steps):
        a, b = x[0, 0], x[1, 1]
        grad = torch.zeros(8, 8)
        grad[0, 0], grad[1, 1] = (a - 1) + a * (b - 1) ** 2, a**2 * (b - 1)
        mean, state = sync({"x": grad}, state)
        x = x - 0.2 * mean["x"]
    a, b = float(x[0, 0]), float(x[1, 1])
    return (a - 1) ** 2 / 2 + a**2 * (b - 1) ** 2 / 2


@pytest.mark.parametrize("seed", range(3))
def test_powersgd_stalls_where_refreshed_queries_converge(seed):
    """At x = 0 only a has a gradient, so whatever the first query was, the second is a's column, exactly.

    P is then zero in b's row, P_hat too, and Q keeps to a's column: b never moves, though its residual grows forever.
    """
    for make in (powersgd, lambda inner, **options: error_feedback(powersgd(inner, **options))):
        assert minimum(make(allreduce, min_compression_rate=0, seed=seed)) == pytest.approx(0.25, abs=1e-6)
        assert minimum(make(allreduce, min_compression_rate=0, seed=seed, refresh=20)) < 1e-8
    both = powersgd(allreduce, min_compression_rate=0, seed=seed, alternate=True, refresh=20)
    assert minimum(error_feedback(both)) < 1e-8


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_queries_become_leading_singular_vectors(dtype, alternate):
    """Of the mean over ranks, as numpy's SVD has them; the mean of that exchange is exact, and nothing is left."""
    sync = error_feedback(powersgd(allreduce, rank=3, min_compression_rate=0, refresh=4, alternate=alternate))
    generator = torch.Generator().manual_seed(0)
    exact = torch.promote_types(dtype, torch.float64)
    u, _ = torch.linalg.qr(torch.randn(20, 12, generator=generator, dtype=exact))
    v, _ = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=exact))
    target = ((u * torch.tensor([9.0, 7, 5, *[0.5] * 9])) @ v.mH).to(dtype)

    def body(rank: int) -> None:
        grads = {"w": (rank + 0.5) * target}
        mean, state = sync(grads, sync.init(grads))
        torch.testing.assert_close(mean["w"], target, rtol=1e-2, atol=1e-2)  # bfloat16's own rounding
        assert state.residual["w"].eq(0).all()
        _, _, rows = np.linalg.svd((target if dtype.is_complex else target.float()).numpy())
        leading = torch.from_numpy(rows[:3]).mH  # [columns, rank]
        basis, _ = torch.linalg.qr(state.inner.q["w"])
        torch.testing.assert_close(basis @ basis.mH, leading @ leading.mH, rtol=0, atol=1e-3)
        if alternate:
            p_hat, _ = torch.linalg.qr(state.inner.p["w"])
            compute = target if dtype.is_complex else target.float()
            torch.testing.assert_close(p_hat @ (p_hat.mH @ compute @ basis), compute @ basis, rtol=0, atol=1e-3)

    run_threads(2, body)
