"""Rotations of blocks: orthonormal in all shapes and dtypes, and what they do to outliers, NaN and 16 bits."""

import math
from functools import partial

import pytest
import torch

from fnddp import Sync, allreduce, error_feedback, lloyd_max, quantize, rotate, two_shot
from fnddp.core.tree import Leaves
from fnddp.laws import run
from tests.test_passes import Applied

ROUNDINGS = 8  # of sums over a block, in the dtype of the leaf


def seen_of(make: partial[rotate], grads: Leaves) -> Leaves:
    """Return what the inner pipeline is given, after a check that all comes back."""
    got: Leaves = {}
    back, _ = make(Applied(send=lambda leaves: got.update(leaves) or leaves))(grads, ())
    for path, leaf in grads.items():
        assert (back[path].dtype, back[path].stride()) == (leaf.dtype, leaf.stride())
        eps = torch.finfo(leaf.dtype).eps if leaf.is_floating_point() or leaf.is_complex() else 0.0
        torch.testing.assert_close(back[path], leaf, rtol=0, atol=ROUNDINGS * eps * 4)
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("block", [2, 8, 32, 256])
def test_norms_stay_in_each_dtype_and_size(block: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(0, 3), (), (1,), (block - 1,), (block,), (block + 1,), (3, block), (5, 7, 11), (2, 3, 4, 5)]
    grads = {f"{i}": torch.randn(size, generator=generator, dtype=torch.float64) for i, size in enumerate(sizes)}
    grads = {path: leaf.to(dtype) for path, leaf in grads.items()}
    grads["last"] = torch.randn(4, 8, 3, 3, generator=generator).to(dtype).contiguous(memory_format=torch.channels_last)
    got = seen_of(partial(rotate, block=block), grads)
    for path, leaf in grads.items():
        has_blocks = leaf.numel() * (2 if dtype.is_complex else 1) >= block
        assert torch.equal(got[path], leaf) is not has_blocks, path
        # Sums of squares of a few hundred elements.
        torch.testing.assert_close(got[path].norm().double(), leaf.norm().abs().double(), rtol=0.01, atol=0)


def test_what_fills_no_block_and_integers_stay_as_they_are() -> None:
    grads = {"w": torch.arange(45.0), "count": torch.arange(40), "flag": torch.ones(40, dtype=torch.bool)}
    got = seen_of(partial(rotate, block=16), grads)
    is_same = [torch.equal(got["w"][i : i + 16], grads["w"][i : i + 16]) for i in (0, 16, 32)]
    assert is_same == [False, False, True]
    assert all(torch.equal(got[path], grads[path]) for path in ("count", "flag"))


@pytest.mark.parametrize("block", [2, 32, 1024])
def test_an_element_is_spread_evenly_over_its_block_and_signs_differ_by_seed(block: int) -> None:
    whole = torch.eye(block)
    got = seen_of(partial(rotate, block=block), {"w": whole})["w"]
    torch.testing.assert_close(got.abs(), torch.full_like(whole, block**-0.5), rtol=1e-6, atol=0)
    torch.testing.assert_close(got @ got.T, whole, rtol=0, atol=1e-5)
    # The first column has the random signs alone; without them a block of equal elements would be one outlier.
    signs = got[:, 0].sign()
    assert block == 2 or abs(signs.mean()) < 0.5
    seeds = [seen_of(partial(rotate, block=block, seed=seed), {"w": whole})["w"][:, 0].sign() for seed in range(8)]
    assert torch.equal(seeds[0], signs)
    assert len({tuple(each.tolist()) for each in seeds}) > min(2, block // 2)


@pytest.mark.parametrize("codec", [quantize(two_shot, bits=4), lloyd_max(two_shot, bits=2)], ids=str)
def test_outliers_cost_less_in_few_bits(codec: Sync) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    x[:, 5] += 30.0  # one in each block of the codec
    for dtype in torch.float32, torch.float64, torch.bfloat16:
        grads = {"w": x.to(dtype)}
        lost = [float((sync(grads, ())[0]["w"] - grads["w"]).norm()) for sync in (codec, rotate(codec))]
        assert lost[1] < lost[0] / 2


def test_sums_of_a_block_do_not_overflow_in_16_bits() -> None:
    grads = {"w": torch.full((64,), 60000.0, dtype=torch.float16)}
    mean, _ = rotate(allreduce)(grads, ())
    torch.testing.assert_close(mean, grads, rtol=1e-3, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_its_whole_block_and_nowhere_else(bad: float) -> None:
    x = torch.randn(64)
    x[40] = bad
    mean, _ = rotate(allreduce, block=16)({"w": x}, ())
    assert not mean["w"][32:48].isfinite().any()
    assert mean["w"][:32].isfinite().all()
    assert mean["w"][48:].isfinite().all()
    mean, _ = rotate(quantize(two_shot, bits=4), block=16)({"w": x}, ())
    assert not mean["w"].isfinite().all()


CODEC = quantize(two_shot, bits=2)


@pytest.mark.parametrize("sync", [error_feedback(rotate(CODEC)), rotate(error_feedback(CODEC))], ids=str)
def test_memory_outside_and_inside_makes_up_for_what_few_bits_lose(sync: Sync) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(8, 37, generator=generator) for _ in range(30)]
    means, state = run(sync, lambda _, step: {"w": grads[step]}, 0, range(30))
    missing = sum(grads) - sum(mean["w"] for mean in means)
    # A rotation keeps norms, so a residual of rotated leaves is as long as what is missing.
    torch.testing.assert_close(missing.norm(), state.residual["w"].norm(), rtol=1e-4, atol=0)
