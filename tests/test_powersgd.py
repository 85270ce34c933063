"""PowerSGD against numpy from the papers, torch's own hook, and the paper's bytes; and where warm queries stall."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import fnddp
from fnddp import allreduce, error_feedback, fp16, from_hook, powersgd, warmup
from fnddp.laws import LOWERED
from fnddp.plan.passes import simplify
from fnddp.plan.period import period
from fnddp.simulation.ranks import run_threads
from tests.pipelines import METHODS, grads
from tests.ranks import on_ranks


class NumpyPowerSGD:
    """Algorithms 1 and 2 of the paper for one matrix of all ranks: `[n, rows, columns]`, in double precision."""

    def __init__(self, query: np.ndarray) -> None:
        self.q, self.memory = query, np.zeros(())

    def step(self, gradients: np.ndarray) -> np.ndarray:
        delta = gradients + self.memory
        sent = self.sent(delta)
        # the local form of the memory: what this rank's own factor says, not the aggregate
        self.memory = delta - sent
        return sent.mean(0)

    def sent(self, delta: np.ndarray) -> np.ndarray:
        p_hat, _ = np.linalg.qr((delta @ self.q).mean(0))
        local_q = delta.transpose(0, 2, 1) @ p_hat
        self.q = local_q.mean(0)
        return p_hat @ local_q.transpose(0, 2, 1)


class NumpyACP(NumpyPowerSGD):
    """Alternate compressed PowerSGD: P in even steps, and Q in odd ones."""

    p: np.ndarray | None = None

    def sent(self, delta: np.ndarray) -> np.ndarray:
        if self.p is None:
            q_hat, _ = np.linalg.qr(self.q)
            self.p = (delta @ q_hat).mean(0)
            return delta @ q_hat @ q_hat.T
        p_hat, _ = np.linalg.qr(self.p)
        self.p, self.q = None, (delta.transpose(0, 2, 1) @ p_hat).mean(0)
        return p_hat @ (p_hat.T @ delta)


@pytest.mark.parametrize("paper", [NumpyPowerSGD, NumpyACP])
@pytest.mark.parametrize("option", METHODS)
@pytest.mark.parametrize("rank_of_matrix", [1, 2, 3])
@on_ranks(1, 3, threads=True)
def test_powersgd_with_error_feedback_is_the_papers(rank, paper, option, rank_of_matrix):
    options = {"orthogonalization": option, "min_compression_rate": 0, "alternate": paper is NumpyACP}
    sync = error_feedback(powersgd(allreduce, rank_of_matrix, **options))
    paths = ["fc.weight", "out.weight", "conv.weight"]

    def wide(rank: int, step: int = 0) -> dict[str, Tensor]:  # so that rounding is the same on any machine
        return {path: leaf.double() for path, leaf in grads("model", rank, step).items()}

    state = sync.init(wide(rank))
    papers = {path: paper(state.inner.q[path].numpy()) for path in paths}
    for step in range(6):
        mean, state = sync(wide(rank, step), state)
        for path in paths:
            of_ranks = [wide(r, step)[path].flatten(1).numpy() for r in range(dist.get_world_size())]
            for want, got in (
                (papers[path].step(np.stack(of_ranks)), mean[path]),
                (papers[path].memory[rank], state.residual[path]),
            ):
                torch.testing.assert_close(got.flatten(1), torch.from_numpy(want), rtol=0, atol=1e-9)


GRADS = {"w": torch.empty(64, 32), "b": torch.empty(64)}


def test_alternating_takes_one_round():
    """P and what is not compressed, then Q and that: on average half of PowerSGD's factors."""
    plans = [each.plan for each in period(powersgd(allreduce, rank=2, alternate=True), GRADS, world_size=2)]
    assert {plan.wire_bytes for plan in plans} == {4 * (2 * 64 + 64), 4 * (2 * 32 + 64)}
    assert [(plan.rounds, len(plan.collectives)) for plan in plans] == [(1, 1)] * 2
    both = fnddp.lower(powersgd(allreduce, rank=2), GRADS, world_size=2)
    assert (both.rounds, both.wire_bytes) == (2, 4 * (2 * 64 + 2 * 32 + 64))


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@on_ranks(2, threads=True)
def test_queries_become_leading_singular_vectors(rank: int, dtype, alternate) -> None:
    """Of the mean over ranks, as numpy's SVD has them; the mean of that exchange is exact, and nothing is left."""
    sync = error_feedback(powersgd(allreduce, rank=3, min_compression_rate=0, refresh=4, alternate=alternate))
    generator = torch.Generator().manual_seed(0)
    exact = torch.promote_types(dtype, torch.float64)
    u, _ = torch.linalg.qr(torch.randn(20, 12, generator=generator, dtype=exact))
    v, _ = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=exact))
    target = ((u * torch.tensor([9.0, 7, 5, *[0.5] * 9])) @ v.mH).to(dtype)

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


@on_ranks(1, 2)
def test_torchs_powersgd_hook(rank: int) -> None:
    steps, start = 8, 2
    shapes = {"a": (12, 20), "b": (7,), "c": (8, 4, 3, 3), "d": (5, 2)}  # b is a vector; d would not shrink

    def gradients(step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * rank + step)
        return {path: torch.randn(shape, generator=generator) for path, shape in shapes.items()}

    hook = from_hook(powerSGD_hook, PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=start))
    ours = warmup(error_feedback(powersgd(allreduce, rank=2)), steps=start)
    state = ours.init(gradients(0))
    with torch.random.fork_rng():  # the queries that torch's hook will draw
        torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
        for q in state.inner.inner.q.values():
            q.copy_(torch.randn(1, *q.shape)[0])
    for step in range(steps):
        theirs, _ = hook(gradients(step), ())
        mean, state = ours(gradients(step), state)
        torch.testing.assert_close(mean, theirs, rtol=2e-3, atol=2e-4)  # float32, and their memory is another


# The paper's table of ResNet18: shapes, how many there are, KiB of one, and its compression at rank 1.
PAPER = {
    "layer4.conv2": ((512, 512, 3, 3), 3, 9216, 461),
    "layer4.conv1": ((512, 256, 3, 3), 1, 4608, 419),
    "layer3.conv2": ((256, 256, 3, 3), 3, 2304, 230),
    "layer3.conv1": ((256, 128, 3, 3), 1, 1152, 209),
    "layer2.conv2": ((128, 128, 3, 3), 3, 576, 115),
    "layer4.shortcut": ((512, 256, 1, 1), 1, 512, 171),
    "layer2.conv1": ((128, 64, 3, 3), 1, 288, 105),
    "layer1": ((64, 64, 3, 3), 4, 144, 58),
    "layer3.shortcut": ((256, 128, 1, 1), 1, 128, 85),
    "layer2.shortcut": ((128, 64, 1, 1), 1, 32, 43),
    "linear": ((10, 512), 1, 20, 9.8),
    "conv1": ((64, 3, 3, 3), 1, 6.75, 19),
    "vectors": ((9610,), 1, 37.5, 1),
}
RESNET18 = {f"{name}.{i}": shape for name, (shape, n, _, _) in PAPER.items() for i in range(n)}


def sent_by(sync: fnddp.Sync, shapes: dict[str, tuple[int, ...]]) -> int:
    gradients = {path: torch.empty(shape, device="meta") for path, shape in shapes.items()}
    return fnddp.lower(sync, gradients, world_size=2).wire_bytes


def test_resnet18_golden_bytes() -> None:
    dense = sent_by(allreduce, RESNET18)
    assert dense == 4 * 11_173_962
    assert round(24 * dense / 2**20) == 1023
    compressed = powersgd(allreduce, rank=1, min_compression_rate=0)
    for path, (shape, _, kib, factor) in PAPER.items():
        assert sent_by(allreduce, {path: shape}) / 1024 == pytest.approx(kib, rel=0.01)
        assert kib * 1024 / sent_by(compressed, {path: shape}) == pytest.approx(factor, rel=0.01)
    for r, total, mib_per_epoch in ((1, 243, 4.2), (2, 136, 7.5), (4, 72, 14.2)):
        sent = sent_by(powersgd(allreduce, r, min_compression_rate=0), RESNET18)
        assert round(dense / sent) == total
        assert 24 * sent / 2**20 == pytest.approx(mib_per_epoch, abs=0.05)
        assert sent_by(error_feedback(powersgd(fp16(allreduce), r, min_compression_rate=0)), RESNET18) == sent // 2


# Small matrices of one shape are multiplied together.

STACKED = [
    "error_feedback(powersgd(bf16(allreduce), rank=2))",
    "error_feedback(powersgd(allreduce, rank=3, alternate=True, refresh=4))",
    "powersgd(fp16(allreduce), rank=1, warm_start=False, orthogonalization='qr')",
    "error_feedback(powersgd(allreduce, rank=2, orthogonalization='gram_schmidt'), residual='int8')",
]
SHAPES = {"a": (24, 18), "b": (7,), "c": (24, 2, 3, 3), "d": (40, 30), "e": (24, 18), "f": (40, 30)}


def alike(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {path: torch.randn(shape, generator=generator).to(dtype) for path, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("text", STACKED)
def test_laws_hold_for_matrices_that_are_multiplied_together(text: str, dtype: torch.dtype) -> None:
    if dtype.is_complex and "int8" in text:
        pytest.skip("residuals in int8 are real")
    sync = fnddp.parse(text)
    plan = fnddp.lower(sync, alike(0, dtype=dtype), world_size=2)
    assert "stack" in {operation.function for segment in plan.segments for operation in segment.operations}
    for law in LOWERED:  # the others run no plan
        run_threads(2, law, sync, partial(alike, dtype=dtype))


@pytest.mark.parametrize("keeps_bits", [True, False])
def test_residuals_of_a_stack_are_one_operation_if_its_bits_stay_the_same(keeps_bits, monkeypatch) -> None:
    monkeypatch.setattr(simplify, "_keeps_bits", lambda *_: keeps_bits)
    plan = fnddp.lower(fnddp.parse(STACKED[0]), alike(0), world_size=2)
    made = Counter(each.function for segment in plan.segments for each in segment.operations)
    assert made["baddbmm"] == (2 if keeps_bits else 0)  # of a, c and e; of d and f
    assert made["mm"] == 0
