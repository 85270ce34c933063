"""Ranks that tests and commands start, whose failures are named, and ranks of launchers, which must be connected."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fnddp
from fnddp import allreduce, fp16
from fnddp.cli.failures import WrongArgument
from fnddp.cli.launch import RankError, run_ranks
from fnddp.simulation.ranks import RankFailed, run_threads


def fails(how: str) -> Iterator[str]:
    yield f"rank {dist.get_rank()} is here"
    if dist.get_rank() == 1:
        if how == "raise":
            raise ArithmeticError("cannot go on")
        if how == "refuse":
            raise WrongArgument("--ranks: too many")
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()  # where the other rank finds its connection broken


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "rank 1 raised ArithmeticError: cannot go on\n  at .*test_launch.py:.*, in fails: raise"),
        ("refuse", "^--ranks: too many$"),
        ("exit", re.escape("rank 1 exited with code 3 before it was done")),
        ("crash", re.escape("rank 1 was ended by SIGSEGV (Segmentation fault)")),
    ],
)
def test_a_failed_rank_is_named(how: str, message: str) -> None:
    with pytest.raises(WrongArgument if how == "refuse" else RankError, match=message):
        list(run_ranks(2, fails, how))


# A forgotten init_process_group is noticed under every launcher; else each rank would train alone, silently.

PARAMS = {"w": torch.ones(3, 2)}
USES: dict[str, Callable[[], object]] = {
    "call": lambda: allreduce(PARAMS, allreduce.init(PARAMS)),
    "jit": lambda: fnddp.jit(fp16(allreduce))(PARAMS, fp16(allreduce).init(PARAMS)),
    "value_and_grad": lambda: fnddp.value_and_grad(lambda p: p["w"].sum(), allreduce)(PARAMS, allreduce.init(PARAMS)),
    "module": lambda: fnddp.DistributedDataParallel(nn.Linear(3, 2)),
}


@pytest.mark.usefixtures("started_by_hand")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_world_without_a_process_group(use: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")  # a world of one is no mistake
    USES[use]()
    monkeypatch.setenv(variable, "4")
    monkeypatch.setenv("SLURM_PROCID", "2")
    message = f"the launcher started 4 ranks, but torch.distributed is not initialized ({variable}=4)"
    with pytest.raises(RuntimeError, match=re.escape(message)) as raised:
        USES[use]()
    assert "call torch.distributed.init_process_group() first, or unset" in str(raised.value)


@pytest.mark.usefixtures("started_by_hand")
@pytest.mark.parametrize("job", [{}, {"SLURM_PROCID": "0", "SLURM_JOB_NAME": "interactive"}])
def test_a_shell_in_an_allocation_is_no_rank(job: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_NTASKS": "4", **job}.items():
        monkeypatch.setenv(name, value)
    USES["call"]()


def total(rank: int) -> float:
    value = torch.tensor(float(rank + 1))
    dist.all_reduce(value)
    return value.item()


def late_on_one(rank: int) -> float:
    if rank == 1:
        time.sleep(0.6)
    return total(rank)


def test_a_late_rank_is_told_of_and_does_not_meet_the_next_ranks():
    with pytest.raises(RankFailed, match="TimeoutError: ran for 0.3 s") as caught:
        run_threads(2, late_on_one, seconds=0.3)
    assert isinstance(caught.value.errors[0], TimeoutError)
    assert run_threads(2, total) == [3, 3]
