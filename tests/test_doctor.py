"""`fnddp doctor` and `fnddp trace`: what they find on ranks of this machine and of launchers, and what they say."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fnddp import Link, Sync
from fnddp.cli import diagnosis, examination, launcher, main
from fnddp.cli.examination import Findings
from fnddp.cli.failures import WrongArgument
from fnddp.cli.launch import RankError
from fnddp.cli.launcher import RankInfo
from fnddp.cost.step import Compute, Step
from fnddp.simulate.ranks import run_threads
from fnddp.simulate.tune import MEAN, SIXTEEN_BITS, Outcome
from fnddp.wire.groups import LAUNCHERS
from tests.terminals import complaints

SECONDS = 120
MODEL = """
import torch
from torch import nn

def small():
    return nn.Linear(64, 32), torch.ones(2, 64), lambda output: output.square().mean()
"""
VARIABLES = [name for names in LAUNCHERS.values() for name in names]


@pytest.fixture(autouse=True)
def _started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "TORCHELASTIC_RUN_ID", "SLURM_JOB_NAME", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "models.py").write_text(MODEL)
    return f"{tmp_path / 'models.py'}:small"


@pytest.mark.timeout(2 * SECONDS)
def test_doctor_on_ranks_of_its_own(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--model", model, "--device", "cpu"]) == 0
    said, errors = capsys.readouterr()
    assert complaints(errors) == []
    for expected in (
        "installed: python ",
        "ranks: 2, started here, on ",
        "ok: versions and devices are the same on all ranks",
        "ok: means are equal on all ranks, to the bit: allreduce, bf16(two_shot)",
        "link between all ranks: ",
        " ns/B)",
        "can pay here",
    ):
        assert expected in said
    assert "PROBLEM" not in said
    for pipeline in (MEAN, *SIXTEEN_BITS, *examination.COMPRESSED):
        assert pipeline in said


@pytest.mark.timeout(2 * SECONDS)
def test_doctor_on_the_ranks_of_an_mpi(model: str, python: str) -> None:
    """As mpirun starts them: nothing says where they meet, but all are on one host."""
    command = [python, "-m", "fnddp", "doctor", "--model", model, "--device", "cpu", "--json"]
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "MASTER_PORT": str(29600 + os.getpid() % 1000),
                "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=SECONDS) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], ended
    found = json.loads(ended[0][0])
    assert ended[1][0] == ""  # the first one reports
    assert len(found["hosts"]) == 2
    assert (found["disagreement"], found["unequal"], found["device"]) == (None, [], "cpu")
    assert found["links"]["between all ranks"]["bandwidth"] > 0
    assert [each["pipeline"] for each in found["pipelines"]] == [MEAN, *SIXTEEN_BITS, *examination.COMPRESSED]


@pytest.mark.timeout(2 * SECONDS)
def test_doctor_under_torchrun(model: str, python: str) -> None:
    """One rank tells what all have found."""
    launch = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = subprocess.run(
        [*launch, "-m", "fnddp", "doctor", "--model", model, "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
        env={**os.environ, "PYTHON_EXEC": python},
    ).stdout
    for expected in (
        "installed: python ",
        "ranks: 2, started by torchrun, on ",
        "ok: versions and devices are the same on all ranks",
        "ok: means are equal on all ranks, to the bit: allreduce, bf16(two_shot)",
        "link between all ranks: ",
        " ns/B)",
        "can pay here",
    ):
        assert said.count(expected) == 1, said


@pytest.mark.timeout(2 * SECONDS)
def test_doctor_ends_quietly_when_nobody_reads_on(model: str) -> None:
    doctor = f"{sys.executable} -m fnddp doctor --ranks 1 --device cpu --model {model}"
    done = subprocess.run(
        ["bash", "-c", f"{doctor} | head -n 1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert (done.returncode, done.stderr) == (141, "")
    assert done.stdout.startswith("installed: python ")


def test_a_failure_is_told_by_every_rank_and_a_wrong_argument_once_on_each_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, ...]] = []
    for at in (None, RankInfo("SLURM", 0, 4, 0), RankInfo("SLURM", 1, 4, 1), RankInfo("SLURM", 2, 4, 0)):
        monkeypatch.setattr(launcher, "rank_info", lambda at=at: at)
        codes = [launcher.stopped("fnddp doctor", code, "no") for code in (1, 2)]
        assert codes == [1, 2]
        told.append(tuple(capsys.readouterr().err.splitlines()))
    ours = "fnddp doctor: no"
    assert told == [(ours, ours), (ours, ours), ("fnddp doctor: rank 1: no",), ("fnddp doctor: rank 2: no",) * 2]


def test_ranks_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")  # where nobody listens, and this rank is not the first one
    meeting = launcher.joined(RankInfo("SLURM", 1, 2, 1), "gloo", timeout=timedelta(seconds=2))
    with pytest.raises(RankError, match=r"^2 ranks did not meet at 127\.0\.0\.1:1: .*\n.*GLOO_SOCKET_IFNAME"):
        meeting.__enter__()


@pytest.mark.timeout(2 * SECONDS)
def test_trace_writes_both_timelines(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "step.json"
    assert main.main(["trace", "fp16(allreduce)", "--model", model, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for expected in (
        "measured",
        "predicted",
        "all ranks have measured at once",
        "exposed",
        f"wire {2 * (64 * 32 + 32):,} B",
        f"Wrote {out}",
    ):
        assert expected in said
    events = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    measured = {event["name"]: event for event in events if event["pid"] != "predicted by fnddp"}
    predicted = {event["name"]: event for event in events if event["pid"] == "predicted by fnddp"}
    both = {"fnddp slot 0 encode", "fnddp c0 launch", "fnddp c0 wait", "fnddp slot 1 decode"}
    assert both <= set(measured)
    assert both | {"forward", "backward", "fnddp c0 all_reduce"} <= set(predicted)
    assert predicted["forward"]["ts"] == pytest.approx(measured["fnddp step"]["ts"], abs=0.01)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1", "RANK": "0"}, None),
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}, RankInfo("the environment", 3, 4, 1)),
        (
            {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x", "SLURM_NTASKS": "2"},
            RankInfo("torchrun", 3, 4, 1),
        ),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}, RankInfo("SLURM", 5, 8, 1)),
        ({"SLURM_NTASKS": "8"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, RankInfo("Open MPI", 1, 2, 0)),
        ({"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}, RankInfo("MPI", 0, 2, 0)),
    ],
)
def test_places(variables: dict[str, str], place: RankInfo | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launcher.rank_info() == place


def test_a_launcher_that_says_too_little(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(WrongArgument, match="WORLD_SIZE=2, but RANK is not set"):
        launcher.rank_info()
    assert main.main(["doctor"]) == 2
    assert "RANK is not set" in capsys.readouterr().err
    with pytest.raises(WrongArgument, match=r"must meet somewhere: set MASTER_ADDR .*scontrol show hostnames"):
        launcher.joined(RankInfo("SLURM", 0, 2, 0), "gloo").__enter__()


def outcome(pipeline: str, seconds: float) -> Outcome:
    return Outcome(pipeline, 1, 1, Step((), Compute(forward_seconds=seconds), (), 0.0, 0.0), ())


def findings(**seconds: float) -> Findings:
    usual = {MEAN: 3.0, **dict.fromkeys(SIXTEEN_BITS, 2.0), examination.COMPRESSED[0]: 1.0}
    costs = [replace_seconds(outcome(text, 0.0), taken) for text, taken in {**usual, **seconds}.items()]
    return Findings(["here", "there"], None, [], {"between hosts": Link.parse("1gbit")}, costs)


def replace_seconds(each: Outcome, taken: float) -> Outcome:
    from fnddp.cost.step import Span

    return replace(each, step=replace(each.step, spans=(Span("forward", 0, 0.0, taken),)))


def test_verdicts() -> None:
    best = examination.COMPRESSED[0]
    assert diagnosis.verdict(findings()).startswith(
        f"Compression can pay here: {best}, 2.00x as fast as fp16(allreduce)"
    )
    assert "nothing beats it: fp16(allreduce), 1.50x" in diagnosis.verdict(findings(**{best: 1.99}))
    nothing = findings(**dict.fromkeys([best, *SIXTEEN_BITS], 2.99))
    assert diagnosis.verdict(nothing).startswith("Nothing can pay here: allreduce leaves")


def test_all_ranks_measure_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share cores take longer than one of them alone, while the others wait."""
    all_at_once = threading.Barrier(2)

    def measured(loss: Any, params: Any, *batch: Any) -> Compute:
        all_at_once.wait(SECONDS / 2)
        return Compute()

    def cost(sync: Sync, *_: Any) -> Outcome:
        all_at_once.wait(SECONDS / 2)
        return outcome(repr(sync), 1.0)

    monkeypatch.setattr(examination, "measure_backward", measured)
    monkeypatch.setattr(examination, "cost", cost)
    begun = replace(findings(), costs=[])
    every = run_threads(2, lambda _: list(examination._predicted(begun, "digits", "cpu"))[-1], seconds=SECONDS)
    assert [len(found.costs) for found in every] == [len((MEAN, *SIXTEEN_BITS, *examination.COMPRESSED))] * 2


def test_problems_are_said() -> None:
    wrong = replace(findings(), disagreement="ranks disagree about torch: rank 0: 2.13; rank 1: 2.12", unequal=[MEAN])
    assert not wrong.is_sound
    said = "\n".join(diagnosis.told(wrong, RankInfo("SLURM", 0, 2, 0), "cpu"))
    assert "PROBLEM: ranks disagree about torch: rank 0: 2.13; rank 1: 2.12" in said
    assert f"PROBLEM: means are not equal on all ranks: {MEAN}" in said
    assert "ranks: 2, started by SLURM, on here, there; gloo" in said
    assert "link between hosts: 1 Gbit/s" in said
