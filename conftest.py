"""What doctests and tests share; files whose peer is not installed cannot be imported, and have no doctests."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch.distributed as dist

_PEERS = {
    "integrations/huggingface.py": "accelerate",  # with the next two in `fnddp[test]`
    "integrations/lightning.py": "lightning",
    "integrations/torchft.py": "torchft",
    "kernels/blocks.py": "triton",
    "kernels/formats.py": "triton",
}

collect_ignore_glob = [f"fnddp/{files}" for files, peer in _PEERS.items() if find_spec(peer) is None]


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """Let a test that fails leave no process group to those behind it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
