"""A reader who follows a gradient meets few files of the library: those with a frame in one steady step."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import allreduce
from tests.ranks import on_ranks

LIMITS = {"module": 15, "register": 12, "value_and_grad": 12}


def files_within(step: Callable[[], Any]) -> list[str]:
    """Return the files of the library with a frame in `step`, forward and backward, on any thread."""
    seen: set[str] = set()
    set_profile = getattr(threading, "setprofile_all_threads", sys.setprofile)  # 3.11: backward runs on this thread

    def note(frame: Any, _: str, __: Any) -> None:
        seen.add(frame.f_code.co_filename)

    set_profile(note)
    try:
        step()
    finally:
        set_profile(None)
    library = Path(fnddp.__file__).parent
    return sorted(str(Path(file).relative_to(library)) for file in seen if Path(file).is_relative_to(library))


def steps_of(adapter: str) -> Callable[[], Any]:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.ones(2, 8)
    if adapter == "value_and_grad":
        params = {name: p.detach() for name, p in model.named_parameters()}
        step = fnddp.value_and_grad(lambda p, x: torch.func.functional_call(model, p, (x,)).sum(), allreduce)
        return lambda: step(params, (), x)
    wrapped = fnddp.DistributedDataParallel(model) if adapter == "module" else TorchDDP(model)
    if adapter == "register":
        fnddp.register(wrapped, allreduce)

    def train() -> None:
        wrapped.zero_grad()
        wrapped(x).sum().backward()

    return train


@pytest.mark.parametrize("adapter", LIMITS)
@on_ranks(2)
def test_a_steady_step_of_the_plain_mean_enters_few_files(rank: int, adapter: str) -> None:
    step = steps_of(adapter)
    for _ in range(12):
        step()
    files = files_within(step)
    assert len(files) <= LIMITS[adapter], files
