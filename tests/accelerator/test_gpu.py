"""The tests of tests/gpu on the device, and the script that measures on a GPU."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.accelerator.conftest import ORDERS

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
SECONDS = 900


@pytest.mark.timeout(SECONDS + 60)
def test_the_tests_of_a_gpu_pass(tmp_path, built):
    command = [sys.executable, "-m", "pytest", "tests/gpu/test_accelerator.py", "-p", "no:cacheprovider"]
    said = run([*command, "--basetemp", str(tmp_path / "tests")], tmp_path, built)
    assert re.fullmatch(r"\d+ passed in .*", said.splitlines()[-1]), "a test was skipped"


@pytest.mark.timeout(SECONDS + 60)
def test_the_script_for_a_gpu_measures_the_device(tmp_path, built):
    run([str(ROOT / "benchmarks" / "on_gpu.sh"), "sim", str(tmp_path / "results")], tmp_path, built)
    rows = [row.split(" | ")[:2] for row in (tmp_path / "results" / "summary.md").read_text().splitlines()[4:]]
    assert rows == [["| codecs", "passed"], ["| digits", "passed"], ["| captured", "passed"]]


def run(command: list[str], folder: Path, built: Path) -> str:
    """Return what `command` prints, where the device is that of the machine. (test_training.py has all orders.)"""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": f"{ROOT}:{built}", "FNDDP_TEST_LAST": ORDERS[0]}
    said = folder / "said"
    with said.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # it says where it is
        process.wait()
    finally:
        with suppress(ProcessLookupError):  # nothing is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, said.read_text()
    return said.read_text()
