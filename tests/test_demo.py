"""`fnddp demo`: what it reports, and that however it ends it says so and leaves nothing behind."""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.image import imread

from fnddp import allreduce, fp16, parse
from fnddp.cli import main, picture, report
from fnddp.cli.train import Result
from tests.hosts import complaints

DEMO = ("-m", "fnddp", "demo")
PIPELINES = ("allreduce", "error_feedback(powersgd(fp16(allreduce), rank=2))")
PARAMETERS = 85_002
SECONDS = 150  # for a demo of a few steps, on a machine that is busy with other things


def start(*arguments: object) -> subprocess.Popen[str]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a foreground process group of its own, as in a terminal
        )
    finally:
        signal.signal(signal.SIGINT, before)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    with process:  # or a later test warns of what a failure leaves open
        try:
            out, err = process.communicate(timeout=SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def descendants(pid: int) -> list[int]:
    try:
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [one for child in map(int, below) for one in (child, *descendants(child))]


def is_connected(pid: int) -> bool:
    try:
        return any("pt_gloo_runloop" in path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/comm"))
    except (FileNotFoundError, ProcessLookupError):
        return False


def blocks_interrupts(pid: int) -> bool:
    (blocked,) = re.findall(r"^SigBlk:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(blocked, 16) >> signal.SIGINT - 1 & 1)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.thorough
@pytest.mark.timeout(2 * SECONDS)
def test_reports_bytes_losses_and_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a" / "b"
    assert main.main(["demo", "--ranks", "2", "--steps", "30", "--out", str(out), *PIPELINES]) == 0
    said = capsys.readouterr().out
    for expected in (*PIPELINES, "340,008", "5,436", "the same on all ranks", str(out)):
        assert expected in said
    assert said.count("62.5x") == 1  # rank 0 alone reports
    assert sorted(path.name for path in out.iterdir()) == ["curves.png", "results.json"]
    assert min(imread(out / "curves.png").shape[:2]) > 500
    results = json.loads((out / "results.json").read_text())
    assert (results["ranks"], results["steps"], results["parameters"]) == (2, 30, PARAMETERS)
    plain, low_rank = results["pipelines"]
    assert parse(plain["pipeline"]) == allreduce
    assert plain["bytes_per_step"] == 4 * PARAMETERS
    assert plain["bytes_total"] == 4 * PARAMETERS * 30
    # fp16 factors of rank 2 for 256x64, 256x256 and 10x256, and the biases
    assert low_rank["bytes_per_step"] == 2 * (2 * (256 + 64 + 256 + 256 + 10 + 256) + 256 + 256 + 10)
    assert low_rank["reduction"] == pytest.approx(62.5, abs=0.1)
    for pipeline in (plain, low_rank):
        assert len(pipeline["loss_by_step"]) == len(pipeline["bytes_sent_by_step"]) == 30
        assert pipeline["loss_by_step"][-1] < pipeline["loss_by_step"][0]
        assert 0.2 < pipeline["test_accuracy"] <= 1


@pytest.mark.thorough
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    ("kill", "number", "ends_with", "says"),
    [
        (os.killpg, signal.SIGINT, 130, ["fnddp demo: interrupted; all ranks have been stopped"]),
        (os.kill, signal.SIGKILL, -signal.SIGKILL, []),
    ],
)
def test_no_process_stays(
    tmp_path: Path, kill: Callable[[int, int], None], number: int, ends_with: int, says: list[str]
) -> None:
    training = start(*DEMO, "--steps", 1_000_000, "--out", tmp_path / "out")
    try:
        until(lambda: sum(is_connected(pid) for pid in descendants(training.pid)) == 2)
        processes = descendants(training.pid)
        assert [pid for pid in processes if blocks_interrupts(pid)] == [*filter(is_connected, processes)]
        kill(training.pid, number)
        training.wait(timeout=SECONDS)
        until(lambda: not any(map(is_alive, processes)))
    finally:
        code, _, errors = finish(training)
    assert (code, complaints(errors)) == (ends_with, says)
    assert list(tmp_path.iterdir()) == []


def test_missing_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "fnddp.cli.digits", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main.main(["demo"]) == 1
    assert "needs sklearn" in (errors := capsys.readouterr().err)
    assert "pip install 'fnddp[demo]'" in errors


def test_a_run_that_diverged_or_sent_nothing_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diverged = Result(
        pipeline=repr(fp16(allreduce)),
        bytes_per_step=0,
        reduction=None,
        bytes_total=4,
        test_accuracy=0.1,
        step_seconds_median=0.001,
        loss_by_step=[2.3, math.nan, math.inf],
        bytes_sent_by_step=[4, 4, 4],
    )
    report.show([diverged])
    assert "10.00%" in capsys.readouterr().out
    found = {"model": "digits", "ranks": 2, "pipelines": [diverged]}
    picture.write(tmp_path, report.CURVES, lambda: report.curves(found), found)
    (pipeline,) = json.loads((tmp_path / "results.json").read_text())["pipelines"]
    assert pipeline["loss_by_step"] == [2.3, None, None]
    nothing = Result({**diverged, "loss_by_step": [-1.0, -2.0], "bytes_total": 0, "bytes_sent_by_step": [0, 0]})
    report.curves({**found, "pipelines": [nothing]})  # without a warning
