"""Runs torch's own DDP tests, which ship in its wheel, against a class that takes its place, on gloo and the CPU.

DDP_CLASS=fnddp:DistributedDataParallel WORLD_SIZE=2 python tests/torch_suite/run.py -j 2
DDP_CLASS=fnddp:DistributedDataParallel WORLD_SIZE=2 python tests/torch_suite/run.py test_ddp_join_model_equivalence

Without DDP_CLASS it runs torch's own class. Without names it runs all tests of baseline.txt: those that torch's own
class passes in this way with two ranks (torch 2.13). It needs expecttest, hypothesis and numpy.

Prints a line for each test, and 'N passed, N failed' last. The exit status is 1 if a test has failed that is not in
expected_failures.py.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from expected_failures import EXPECTED_FAILURES

HERE = Path(__file__).parent


class Outcome(NamedTuple):
    """How tests went that one process ran."""

    names: Sequence[str]
    passed: bool
    seconds: float
    output: str

    def line(self) -> str:
        why = "" if self.passed else "".join(f" (expected: {expected()[n]})" for n in self.names if n in expected())
        return f"{'pass' if self.passed else 'FAIL'} {self.seconds:6.1f} s  {', '.join(self.names)}{why}"


def expected() -> dict[str, str]:
    """Tests that may fail, and why."""
    return EXPECTED_FAILURES if "DDP_CLASS" in os.environ else {}


def run(names: Sequence[str], limit: float) -> Outcome:
    """Runs tests in a session of their own, which ends with them. Ranks are forked where they are several."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torch_suite_", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, HERE / "case.py", "-v", *(f"TestDistBackendWithSpawn.{name}" for name in names)],
            # In CI torch's runner wants a package that writes reports.
            env={
                **{key: value for key, value in os.environ.items() if key != "CI"},
                "TEMP_DIR": folder,
                "RANKS_ARE": "spawned" if len(names) == 1 else "forked",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and the ranks
            output = process.communicate()[0] + f"\nkilled after {limit:.0f} s\n"
    last = output.splitlines()[-1] if output else ""
    passed = process.returncode == 0 and f"Ran {len(names)} test" in output and "skipped" not in last
    return Outcome(names, passed, time.monotonic() - began, output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="tests; all of baseline.txt if there are none")
    parser.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="how many run at a time")
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="for each test")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="gets what failed tests have printed")
    parser.add_argument("--together", action="store_true", help="all in one process, which imports torch only once")
    options = parser.parse_args()
    names = options.names or (HERE / "baseline.txt").read_text().split()
    together = [names] if options.together else [[name] for name in names]

    failed: list[str] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(lambda each: run(each, options.limit), together):
            print(outcome.line(), flush=True)
            if outcome.passed:
                continue
            failed += outcome.names
            if options.logs is not None:
                options.logs.mkdir(parents=True, exist_ok=True)
                (options.logs / f"{outcome.names[0]}.log").write_text(outcome.output)
    print(f"{len(names) - len(failed)} passed, {len(failed)} failed")
    return int(not set(failed) <= expected().keys())


if __name__ == "__main__":
    sys.exit(main())
