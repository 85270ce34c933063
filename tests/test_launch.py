"""Ranks as processes: what rank 0 yields arrives, and a rank that fails is named."""

import os
import re
import signal
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from fnddp.cli.launch import RankError, run_ranks


def talks(words: list[str]) -> Iterator[str]:
    """The other ranks end first, and yield nothing."""
    yield from words if dist.get_rank() == 0 else ()


def fails(how: str) -> Iterator[str]:
    yield f"rank {dist.get_rank()} is here"
    if dist.get_rank() == 1:
        if how == "raise":
            raise ArithmeticError("cannot go on")
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()  # where the other rank finds its connection broken


@pytest.mark.timeout(60)
def test_what_rank_0_yields() -> None:
    assert list(run_ranks(2, talks, ["a", "b"])) == ["a", "b"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "rank 1 raised ArithmeticError: cannot go on\n  at .*test_launch.py:.*, in fails: raise"),
        ("exit", re.escape("rank 1 exited with code 3 before it was done")),
        ("crash", re.escape("rank 1 was ended by SIGSEGV (Segmentation fault)")),
    ],
)
def test_a_failed_rank_is_named(how: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        list(run_ranks(2, fails, how))
