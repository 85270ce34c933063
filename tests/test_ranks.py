"""The test bed itself: a failing rank and a hanging rank are reported, with every rank's traceback."""

import time

import pytest
import torch
import torch.distributed as dist

from fnddp.simulate.ranks import RankFailed, run_threads


def total(rank: int) -> float:
    value = torch.tensor(float(rank + 1))
    dist.all_reduce(value)
    return value.item()


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one's own words")


def test_a_failure_names_the_rank(gloo):
    for run in (run_threads, gloo):
        with pytest.raises(RankFailed, match="rank 1: (.|\n)*rank one's own words") as caught:
            run(2, fail_on_one)
        assert isinstance(caught.value.errors[1], ValueError)


def late_on_one(rank: int) -> float:
    if rank == 1:
        time.sleep(0.6)
    return total(rank)


def test_a_late_rank_is_told_of_and_does_not_meet_the_next_ranks():
    with pytest.raises(RankFailed, match="rank 1: ran for 0.3 s") as caught:
        run_threads(2, late_on_one, seconds=0.3)
    assert isinstance(caught.value.errors[0], TimeoutError)
    assert run_threads(2, total) == [3, 3]
