"""Runs torch's own DDP tests, which ship in its wheel, against a class that takes its place, on gloo and the CPU.

DDP_CLASS=fnddp:DistributedDataParallel WORLD_SIZE=2 python tests/torch_suite/run.py
DDP_CLASS=fnddp:DistributedDataParallel WORLD_SIZE=2 python tests/torch_suite/run.py test_ddp_join_model_equivalence

Without DDP_CLASS it runs torch's own class. Without names it runs all tests of baseline.txt: those that torch's own
class passes in this way with two ranks (torch 2.13); behind a name is why fnddp's class fails it. It needs expecttest,
hypothesis and numpy.

Prints the tests that failed, and 'N passed, N failed' last; unittest's own report goes to standard error. The exit
status is 1 if a test has failed that another class than torch's is not expected to fail.
"""

import os
import sys
import tempfile
import unittest
from pathlib import Path

import shim


def cases(names: list[str]) -> unittest.TestSuite:
    shim.run_on_cpu()
    shim.replace_ddp(os.environ.get("DDP_CLASS"))
    import torch.multiprocessing
    from torch.testing._internal.distributed import distributed_test

    class TestDistBackendWithSpawn(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)  # which need not import torch

    return unittest.TestSuite(map(TestDistBackendWithSpawn, names))


def main() -> int:
    baseline = (Path(__file__).parent / "baseline.txt").read_text().splitlines()
    reasons = dict(line.partition(": ")[::2] for line in baseline)
    names = sys.argv[1:] or [*reasons]
    os.environ.pop("CI", None)  # there torch's runner wants a package that writes reports
    with tempfile.TemporaryDirectory(prefix="torch_suite_", ignore_cleanup_errors=True) as folder:
        os.environ["TEMP_DIR"] = folder
        result = unittest.TextTestRunner(verbosity=2).run(cases(names))
    failed = [test.id().rpartition(".")[2] for test, _ in (*result.failures, *result.errors, *result.skipped)]
    expected = {name for name in failed if reasons.get(name) and "DDP_CLASS" in os.environ}
    for name in failed:
        print(f"FAIL {name}" + (f" (expected: {reasons[name]})" if name in expected else ""))
    print(f"{len(names) - len(failed)} passed, {len(failed)} failed")
    return int(not set(failed) <= expected)


if __name__ == "__main__":
    sys.exit(main())
