"""tests/gpu on the device, which torch finds as it finds those of others: by an entry point in PYTHONPATH."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator.build import build, missing
from tests.accelerator.conftest import ORDERS

ROOT = Path(__file__).parents[2]
NEEDS_A_CLOCK = "not run_behind_backward"  # overlap, in a profile of kernels


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("last", ORDERS)
def test_what_is_for_gpus_passes(last):
    if (reason := missing()) is not None:
        pytest.skip(reason)
    path = os.pathsep.join([str(ROOT), str(build())])
    environment = {**os.environ, "PYTHONPATH": path, "FNDDP_TEST_LAST": last}
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-k", NEEDS_A_CLOCK, "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "skipped" not in done.stdout
