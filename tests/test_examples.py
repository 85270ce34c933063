"""The examples run as their docstrings say: alone, on ranks under torchrun, and with the peers that they need."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.forks import Scripts

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(240)]

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
# With a peer: which one, and on how many ranks (0: the example starts two itself).
WITH_PEERS = {
    "integrations/distributed_checkpoint.py": ("torch", 2),
    "integrations/fsdp_axes.py": ("torch", 4),
    "integrations/fsdp_replicas.py": ("torch", 4),
    "integrations/huggingface_gpt2.py": ("transformers", 2),
    "integrations/lightning_digits.py": ("lightning", 0),
}
# One process, whatever the ranks: what it is asked, what it says.
SIMULATED = {
    "convergence.py": ("--quick", "runs, 0.0 hours of CPU"),
    "one_bit.py": ("--quick", "steps of gradients wait"),
    "outer_convergence.py": ("--quick", "6 runs on"),
}
ELSEWHERE = {"kill_and_rejoin.py", "machines/ray_train.py", "machines/train.py"}  # test_torchft.py, test_machines.py
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SECONDS = 200


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("name", SAYS)
def test_alone_and_on_ranks(name: str, ranks: int) -> None:
    text = Scripts(EXAMPLES / name, ranks=ranks).said(SECONDS)
    assert text.count(SAYS[name]) == 1  # rank 0 alone speaks
    assert f"world size {ranks or 1}" in text


@pytest.mark.parametrize("name", WITH_PEERS)
def test_with_peers(name: str) -> None:
    peer, ranks = WITH_PEERS[name]
    if find_spec(peer) is None:
        pytest.skip(f"needs {peer}")
    text = Scripts(EXAMPLES / name, ranks=ranks, strict=False).said(SECONDS)  # the peers' warnings are theirs
    assert len(re.findall("resumed runs? ha(s|ve) the same parameters to the bit: yes", text)) == 1
    assert f"world size {ranks or 2}" in text


@pytest.mark.parametrize("name", SIMULATED)
def test_simulated(name: str) -> None:
    option, says = SIMULATED[name]
    assert says in Scripts(EXAMPLES / name, option).said(SECONDS)


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
    files = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert files == {*SAYS, *WITH_PEERS, *SIMULATED, *ELSEWHERE}
