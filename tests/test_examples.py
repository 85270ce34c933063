"""The examples run as their docstrings say: alone, and on two ranks under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import Scripts

pytestmark = pytest.mark.thorough

EXAMPLES = Path(__file__).parent.parent / "examples"
SAYS = {
    "accumulation.py": "accumulated gradients are those of the whole batch: yes",
    "diloco.py": "resumed in the middle of an exchange, with the same parameters to the bit: yes",
    "drop_in.py": "torch's class gives the same parameters and buffers to the bit: yes",
    "functional.py": "of the test set",
    "existing_ddp.py": "the resumed run has the same parameters to the bit: yes",
    "module.py": "the module resumed with the same parameters to the bit: yes",
    "own_transform.py": "sampled(allreduce, 0.1) keeps the laws",
    "topk.py": "error_feedback(largest(0.05)) keeps the laws; 64 MiB are 6,710,888 bytes",
    "two_shot.py": "error_feedback(int8_two_shot()) keeps the laws; 64 MiB are 17,843,200 bytes",
    "uneven.py": "all ranks have the same parameters to the bit: yes",
}
# One process, whatever the ranks: what it is asked, what it says.
SIMULATED = {"convergence.py": ("--quick", "4 runs"), "outer_convergence.py": ("--quick", "6 runs on")}
ELSEWHERE = {"kill_and_rejoin.py"}  # test_torchft.py, where its peer is installed
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SECONDS = 200


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", SAYS)
def test_alone(name: str) -> None:
    text = Scripts(EXAMPLES / name).said(SECONDS)
    assert SAYS[name] in text
    assert "world size 1" in text


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", SIMULATED)
def test_simulated(name: str) -> None:
    option, says = SIMULATED[name]
    assert says in Scripts(EXAMPLES / name, option).said(SECONDS)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", SAYS)
def test_on_ranks(name: str) -> None:
    text = Scripts(EXAMPLES / name, ranks=2).said(SECONDS)
    assert text.count(SAYS[name]) == 1  # rank 0 alone speaks
    assert "world size 2" in text


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("launcher", "size"), [((), 1), (TORCHRUN, 2)])
def test_as_their_docstrings_say(launcher: tuple[str, ...], size: int) -> None:
    """By Python and torchrun themselves, of which all take seconds to start."""
    name = "module.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    command = [sys.executable, *launcher, EXAMPLES / name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(SAYS[name]) == 1
    assert f"world size {size}" in done.stdout


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*SAYS, *SIMULATED, *ELSEWHERE}
