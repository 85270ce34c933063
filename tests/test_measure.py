"""The measurements for a GPU run to the end on a CPU; their numbers mean nothing there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[1]


def test_measure_runs_without_a_gpu(tmp_path):
    out = tmp_path / "trace.json"
    command = [sys.executable, "tests/gpu/measure.py", "--device", "cpu", "--quick", "--ranks", "2", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    sections = [line for line in done.stdout.splitlines() if line.lstrip().startswith(("(a)", "(b)", "(c)", "(d)"))]
    assert [section.lstrip()[1] for section in sections] == ["a", "b", "c", "d"]
    assert "median of 3 paired ratios" in done.stdout
    names = {event.get("name", "") for event in json.loads(out.read_text())["traceEvents"]}
    assert "fnddp c0 launch" in names
