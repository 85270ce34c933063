"""A forgotten init_process_group is noticed under every launcher; else each rank would train alone, silently."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fnddp
from fnddp import allreduce, fp16
from fnddp.wire import groups

PARAMS = {"w": torch.ones(3, 2)}
USES: dict[str, Callable[[], object]] = {
    "call": lambda: allreduce(PARAMS, allreduce.init(PARAMS)),
    "jit": lambda: fnddp.jit(fp16(allreduce))(PARAMS, fp16(allreduce).init(PARAMS)),
    "value_and_grad": lambda: fnddp.value_and_grad(lambda p: p["w"].sum(), allreduce)(PARAMS, allreduce.init(PARAMS)),
    "module": lambda: fnddp.DistributedDataParallel(nn.Linear(3, 2)),
}


@pytest.fixture(autouse=True)
def _started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*(size for _, size, _ in groups.LAUNCHERS.values()), "SLURM_PROCID", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_it_is_noticed(use: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")  # a world of one is no mistake
    USES[use]()
    monkeypatch.setenv(variable, "4")
    monkeypatch.setenv("SLURM_PROCID", "2")
    message = f"the launcher started 4 ranks, but torch.distributed is not initialized ({variable}=4)"
    with pytest.raises(RuntimeError, match=re.escape(message)) as raised:
        USES[use]()
    assert "call torch.distributed.init_process_group() first, or unset" in str(raised.value)


@pytest.mark.parametrize("job", [{}, {"SLURM_PROCID": "0", "SLURM_JOB_NAME": "interactive"}])
def test_a_shell_in_an_allocation_is_no_rank(job: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_NTASKS": "4", **job}.items():
        monkeypatch.setenv(name, value)
    USES["call"]()
