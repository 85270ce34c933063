"""Some of torch's own tests of its DistributedDataParallel, on two ranks. All of them: tests/torch_suite/run.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.thorough

SUITE = Path(__file__).parent / "torch_suite"
QUICK = (
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_build_debug_param_to_name_mapping",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_join_model_equivalence",
    "test_undefined_grad_parity_unused_parameters",
)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the tests are those of torch 2.13")
def test_torchs_own_tests() -> None:
    done = subprocess.run(
        [sys.executable, SUITE / "run.py", *QUICK],
        env={**os.environ, "DDP_CLASS": "fnddp:DistributedDataParallel", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.splitlines()[-1] == f"{len(QUICK)} passed, 0 failed"
