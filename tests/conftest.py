"""Session-wide resources: one pool of gloo processes, started when the first test asks for it."""

import gc
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings

from fnddp.cli import launch
from fnddp.core.sync import registry
from fnddp.device import accelerator
from fnddp.simulation import ranks
from fnddp.wire.groups import LAUNCHERS
from tests.forks import forks
from tests.ranks import GlooPool
from tests.traces import OnOneCore

# torch_suite changes torch, in processes of its own (see test_torch_suite.py); mutation is run by hand;
# preload is for processes that tests fork, and accelerator/device.py makes a device of the process that imports it.
collect_ignore = ["torch_suite", "mutation", "preload.py", "accelerator/device.py", "typed.py"]

_EITHER = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fnddp", max_examples=60, derandomize=True, **_EITHER)
settings.register_profile("thorough", max_examples=1000, **_EITHER)  # --hypothesis-profile=thorough
settings.load_profile("fnddp")


@pytest.fixture(scope="session")
def _pools() -> Iterator[list[GlooPool]]:
    pools: list[GlooPool] = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def gloo(_pools: list[GlooPool]) -> Callable[..., list]:
    """`gloo(n, fn, *arguments)`: the results of `fn(rank, *arguments)` on n gloo processes."""
    if not _pools or not _pools[-1].alive:
        _pools.append(GlooPool())
    return _pools[-1].run


@pytest.fixture(scope="session", autouse=True)
def _ranks_start_quickly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # For commands that a test calls within this process. (Those that it starts as processes spawn theirs.)
        patch.setattr(launch, "fresh", forks)
        # Ranks that are threads share a core.
        patch.setattr(ranks, "threading", SimpleNamespace(Thread=OnOneCore))
        yield


@pytest.fixture
def started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever started pytest."""
    for name in (*chain(*LAUNCHERS.values()), "TORCHELASTIC_RUN_ID", "SLURM_JOB_NAME", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def own_transforms() -> Iterator[None]:
    import_module("fnddp.api")  # registers the package's names, which would be forgotten
    known = dict(registry)
    yield
    registry.clear()
    registry.update(known)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # ranks share two cores


def pytest_collection_finish() -> None:
    gc.freeze()  # torch is a million objects, which the collector would look through again and again


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "needs an accelerator; torch finds none on this machine"
    for item in items:
        if item.get_closest_marker("gpu") is not None and accelerator() is None:
            item.add_marker(pytest.mark.skip(reason=reason))
