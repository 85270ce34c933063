"""The examples of integrations run as their docstrings say, where their peer is installed."""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_examples import TORCHRUN, said, start

EXAMPLES = Path(__file__).parent.parent / "examples" / "integrations"


class Example(NamedTuple):
    """What to put before its name (the ranks come last), the peer that it needs, and what it says, once."""

    launcher: tuple[str, ...]
    peer: str
    says: str


SAYS = {
    "distributed_checkpoint.py": Example(
        TORCHRUN, "torch", "both resumed runs have the same parameters to the bit: yes"
    ),
    "fsdp_replicas.py": Example(
        (*TORCHRUN[:-1], "4"), "torch", "the resumed run has the same parameters to the bit: yes"
    ),
    "huggingface_gpt2.py": Example(TORCHRUN, "transformers", "the resumed run has the same parameters to the bit: yes"),
    "lightning_digits.py": Example((), "lightning", "the resumed run has the same parameters to the bit: yes"),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", SAYS)
def test_on_ranks(name: str) -> None:
    launcher, peer, says = SAYS[name]
    if find_spec(peer) is None:
        pytest.skip(f"needs {peer}")
    text = said(start(*launcher, EXAMPLES / name, warnings="default"))  # the peers' are theirs
    assert text.count(says) == 1
    assert f"world size {launcher[-1] if launcher else 2}" in text


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)
