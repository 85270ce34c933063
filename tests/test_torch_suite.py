"""Some of torch's own tests of its DistributedDataParallel, on two ranks. All of them: tests/torch_suite/run.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.torch_suite.expected_failures import EXPECTED_FAILURES

pytestmark = pytest.mark.thorough

SUITE = Path(__file__).parent / "torch_suite"
QUICK = (
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_join_model_equivalence",
    "test_undefined_grad_parity_unused_parameters",
)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the tests are those of torch 2.13")
def test_torchs_own_tests(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SUITE / "run.py", "--together", "--limit", "300", "--logs", tmp_path, *QUICK],
        env={**os.environ, "DDP_CLASS": "fnddp:DistributedDataParallel", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    logs = "\n".join(path.read_text() for path in tmp_path.iterdir())
    assert done.returncode == 0, f"{done.stdout}\n{logs}"
    assert done.stdout.splitlines()[-1] == f"{len(QUICK)} passed, 0 failed"


def test_names_are_in_the_baseline() -> None:
    baseline = (SUITE / "baseline.txt").read_text().split()
    assert len(set(baseline)) == len(baseline)
    assert {*QUICK, *EXPECTED_FAILURES} <= {*baseline}
