"""The examples of integrations run as their docstrings say, where their peer is installed."""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.forks import Scripts
from tests.test_examples import SECONDS

pytestmark = pytest.mark.thorough

EXAMPLES = Path(__file__).parent.parent / "examples" / "integrations"


class Example(NamedTuple):
    """On how many ranks it is started (0: it starts them itself), the peer that it needs, and what it says, once."""

    ranks: int
    peer: str
    says: str


RESUMED = "the resumed run has the same parameters to the bit: yes"
SAYS = {
    "distributed_checkpoint.py": Example(2, "torch", "both resumed runs have the same parameters to the bit: yes"),
    "fsdp_axes.py": Example(4, "torch", RESUMED),
    "fsdp_replicas.py": Example(4, "torch", RESUMED),
    "huggingface_gpt2.py": Example(2, "transformers", RESUMED),
    "lightning_digits.py": Example(0, "lightning", RESUMED),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", SAYS)
def test_on_ranks(name: str) -> None:
    ranks, peer, says = SAYS[name]
    if find_spec(peer) is None:
        pytest.skip(f"needs {peer}")
    text = Scripts(EXAMPLES / name, ranks=ranks, strict=False).said(SECONDS)  # the peers' warnings are theirs
    assert text.count(says) == 1
    assert f"world size {ranks or 2}" in text


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)
