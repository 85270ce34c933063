"""A checkpoint resumes to the bit, on other numbers of ranks too."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import fnddp
from fnddp import DistributedDataParallel as DDP
from fnddp.adapters.checkpoint import shares
from fnddp.laws import bits
from tests.drop_in.models import SMALL, assert_equal_on_ranks, step
from tests.test_register import COMPRESSED, batch, make_model

CHECKPOINTED = f"warmup({COMPRESSED}, steps=1)"


def wrapped_for_checkpoint() -> DDP:
    return DDP(make_model(), sync=fnddp.parse(CHECKPOINTED), **SMALL)


def save(rank: int, folder: str) -> dict[str, Any]:
    model = wrapped_for_checkpoint()
    for i in range(3):
        step(model, batch(rank, i))
    dcp.save({"model": model.state_dict(), "sync": model.sync_checkpoint()}, checkpoint_id=folder)
    saved = {key: copy.deepcopy(value) for key, value in fnddp.state_dict(model.sync_state).items()}
    for i in range(3, 6):
        step(model, batch(rank, i))
    return {"saved": saved, "later": (bits(model.state_dict()), bits(model.sync_state))}


def load(rank: int, folder: str, saved_world_size: int | None, steps: int) -> dict[str, Any]:
    model = wrapped_for_checkpoint()
    state = model.state_dict()
    dcp.load({"model": state, "sync": model.sync_checkpoint(saved_world_size)}, checkpoint_id=folder)
    model.load_state_dict(state)
    loaded = {key: copy.deepcopy(value) for key, value in fnddp.state_dict(model.sync_state).items()}
    for i in range(3, 3 + steps):
        step(model, batch(rank, i))
    assert_equal_on_ranks(model.state_dict())
    return {"saved": loaded, "later": (bits(model.state_dict()), bits(model.sync_state))}


@pytest.mark.parametrize("n", [1, 2])
def test_a_checkpoint_resumes_to_the_bit(gloo, tmp_path, n):
    saved = gloo(n, save, str(tmp_path))
    loaded = gloo(n, load, str(tmp_path), None, 3)
    for before, after in zip(saved, loaded, strict=True):
        assert list(after["saved"]) == list(before["saved"])
        assert bits(after["saved"]) == bits(before["saved"])
        assert after["later"] == before["later"]


@pytest.mark.parametrize(("n", "then"), [(4, 2), (2, 4), (2, 3), (3, 2), (1, 2)])
def test_a_checkpoint_for_another_number_of_ranks_keeps_the_mean_of_residuals(gloo, tmp_path, n, then):
    before = [result["saved"] for result in gloo(n, save, str(tmp_path))]
    after = [result["saved"] for result in gloo(then, load, str(tmp_path), n, 2)]
    for key, value in before[0].items():
        if key.startswith("replicated/"):
            assert all(bits([ranks[key]]) == bits([value]) for ranks in after), key
        else:
            want, got = (torch.stack([ranks[key] for ranks in all_ranks]).mean(0) for all_ranks in (before, after))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)  # the order of a sum


SIZES = st.integers(1, 64)


@given(size=SIZES, saved_size=SIZES)
def test_shares_keep_the_mean(size, saved_size):
    each = [shares(rank, size, saved_size) for rank in range(size)]
    for mine in each:
        assert sum(mine.values()) == pytest.approx(1)
        assert all(share > 0 for share in mine.values())
        assert set(mine) <= set(range(saved_size))
    for saved in range(saved_size):
        assert sum(mine.get(saved, 0) for mine in each) == pytest.approx(size / saved_size)
    if size == saved_size:
        assert each == [{rank: 1.0} for rank in range(size)]
