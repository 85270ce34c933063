"""The table of tests/test_ways.py on the device, whose host does not wait: failures are in test_failures.py."""

import tempfile
from typing import Any

import pytest
import torch.distributed as dist

from tests.accelerator.conftest import ORDERS
from tests.test_ways import EVENTS, run_row
from tests.ways import WAYS, Way

pytestmark = pytest.mark.thorough

NAMES = ["module", "register", "value_and_grad", "jit", "own", "compress_shards", "compress_replicas", "own_matrices"]
FAILURES = {"a failure at each point", "an error in the update", "a dead wire", "a thread that evaluates"}


def check(rank: int, device: str, name: str, events: list[str]) -> None:
    folder: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Way, "device", device)
        run_row(rank, name, folder[0], events)


@pytest.mark.parametrize("last", ORDERS)
@pytest.mark.parametrize("name", [*NAMES, "diloco"])
def test_each_event_leaves_a_way_in_as_it_was_or_is_refused(ranks: Any, last: str, name: str) -> None:
    ranks(WAYS[name].ranks, last, check, name, [event for event in EVENTS if event not in FAILURES])
