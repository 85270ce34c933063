"""What doctests and tests share; files whose peer is not installed cannot be imported, and have no doctests."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

_PEERS = {
    "integrations/huggingface.py": "accelerate",  # with the next two in `fnddp[test]`
    "integrations/lightning.py": "lightning",
    "integrations/torchft.py": "torchft",
} | {
    f"kernels/{file.name}": "triton"
    for file in (Path(__file__).parent / "fnddp/kernels").glob("*.py")
    if "import triton\n" in file.read_text()
}

collect_ignore = [f"fnddp/{file}" for file, peer in _PEERS.items() if find_spec(peer) is None]


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """Let a test that fails leave no process group to those behind it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
