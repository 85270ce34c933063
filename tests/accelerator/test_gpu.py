"""The tests of tests/gpu on the device, which they take for that of the machine, in both orders of streams."""

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
@pytest.mark.parametrize("last", ORDERS)
def test_the_tests_of_a_gpu_pass(tmp_path, built, last):
    command = [sys.executable, "-m", "pytest", "tests/gpu/test_accelerator.py", "-p", "no:cacheprovider"]
    command += ["--basetemp", str(tmp_path / "tests")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{built}", "FNDDP_TEST_LAST": last}
    said = tmp_path / "said"
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
    assert re.fullmatch(r"\d+ passed in .*", said.read_text().splitlines()[-1]), "a test was skipped"
