"""`fnddp doctor` and `fnddp trace`: what they find on ranks of this machine and of launchers, and what they say."""

import json
import os
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fnddp import Link
from fnddp.cli import examination, launch, main
from fnddp.cli.examination import Findings
from fnddp.cli.failures import WrongArgument
from fnddp.cli.launch import RankError, RankInfo, Ranks
from fnddp.cost.estimate import Compute
from fnddp.simulation.ranks import run_threads
from fnddp.simulation.tune import MEAN, SIXTEEN_BITS
from tests.hosts import complaints, free_port
from tests.test_tune import outcome
from tests.workloads import SMALL

SECONDS = 120
pytestmark = pytest.mark.usefixtures("started_by_hand")


@pytest.mark.timeout(2 * SECONDS)
def test_doctor_on_ranks_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--model", SMALL, "--device", "cpu"]) == 0
    said, errors = capsys.readouterr()
    assert complaints(errors) == []
    for expected in (
        "installed: python ",
        "ranks: 2, started ",
        "ok: versions and devices are the same on all ranks",
        "ok: means are equal on all ranks, bit for bit: allreduce, bf16(two_shot)",
        "link between all ranks: ",
        ' here: sync="auto" ',
    ):
        assert said.count(expected) == 1, expected
    assert "PROBLEM" not in said
    for pipeline in (MEAN, *SIXTEEN_BITS, *examination.COMPRESSED):
        assert pipeline in said


def test_every_rank_reports_a_failure_and_each_host_a_wrong_argument_once(capsys, monkeypatch) -> None:
    ours = "fnddp doctor: no\n"
    for at, failure, wrong in (
        (None, ours, ours),
        (RankInfo("SLURM", 0, 4, 0), ours, ours),
        (RankInfo("SLURM", 1, 4, 1), "fnddp doctor: rank 1: no\n", ""),
        (RankInfo("SLURM", 2, 4, 0), "fnddp doctor: rank 2: no\n", "fnddp doctor: rank 2: no\n"),
    ):
        monkeypatch.setattr(launch, "rank_info", lambda at=at: at)
        for code, said in ((1, failure), (2, wrong)):
            assert launch.print_error_once("fnddp doctor", code, "no") == code
            assert capsys.readouterr().err == said


@pytest.mark.timeout(2 * SECONDS)
def test_trace_writes_both_timelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "step.json"
    assert main.main(["trace", "switch({0: allreduce, 3: fp16(allreduce)})", "--model", SMALL, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    wire = f"wire {2 * (64 * 32 + 32):,} B"
    for expected in ("measured", "predicted", "all ranks have measured at once", "exposed", wire, f"Wrote {out}"):
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
        ("", None),
        ("WORLD_SIZE=1 RANK=0", None),
        ("WORLD_SIZE=4 RANK=3 LOCAL_RANK=1", RankInfo("the environment", 3, 4, 1)),
        ("WORLD_SIZE=4 RANK=3 LOCAL_RANK=1 TORCHELASTIC_RUN_ID=x SLURM_NTASKS=2", RankInfo("torchrun", 3, 4, 1)),
        ("SLURM_NTASKS=8 SLURM_PROCID=5 SLURM_LOCALID=1", RankInfo("SLURM", 5, 8, 1)),
        ("SLURM_NTASKS=8", None),
        ("OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1", RankInfo("Open MPI", 1, 2, 0)),
        ("PMI_SIZE=2 PMI_RANK=0 MPI_LOCALRANKID=0", RankInfo("MPI", 0, 2, 0)),
    ],
)
def test_places_are_read_from_the_variables_of_launchers(variables, place, monkeypatch) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    assert launch.rank_info() == place


def test_ranks_that_cannot_meet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main.main(["doctor"]) == 2
    assert "WORLD_SIZE=2, but RANK is not set" in capsys.readouterr().err
    with pytest.raises(WrongArgument, match=r"need an address to meet at: set MASTER_ADDR .*scontrol show hostnames"):
        launch.joined(RankInfo("SLURM", 0, 2, 0), "cpu").__enter__()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")  # where nobody listens, and this rank is not the first one
    meeting = launch.joined(RankInfo("SLURM", 1, 2, 1), "cpu", timeout=timedelta(seconds=2))
    with pytest.raises(RankError, match=r"^2 ranks did not meet at 127\.0\.0\.1:1: .*\n.*GLOO_SOCKET_IFNAME"):
        meeting.__enter__()


def test_ranks_of_one_host_meet_there() -> None:
    """As those of mpirun, which names no address."""
    variables = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_PORT": str(free_port())}
    with patch.dict(os.environ, variables), launch.joined(RankInfo("Open MPI", 0, 1, 0), "cpu"):
        assert os.environ["MASTER_ADDR"] == "127.0.0.1"
        assert dist.get_world_size() == 1


def findings(**seconds: float) -> Findings:
    usual = {MEAN: 3.0, **dict.fromkeys(SIXTEEN_BITS, 2.0), examination.COMPRESSED[0]: 1.0}
    costs = [outcome(text, taken) for text, taken in {**usual, **seconds}.items()]
    return Findings(["here", "there"], None, [], {"between hosts": Link.parse("1gbit")}, costs)


BEST, FOUR = examination.COMPRESSED[:2]
HALF = SIXTEEN_BITS[0]
LITTLE = f'No compression saves a tenth of a step here: sync="auto" takes {HALF}, 1.00x as fast as the plain mean'


def compressed(seconds: float) -> dict[str, float]:
    return dict.fromkeys([BEST, *SIXTEEN_BITS], seconds)


@pytest.mark.parametrize(
    ("chosen", "seconds", "said"),
    [
        (BEST, {}, f'Compression can pay here: sync="auto" takes {BEST}, 3.00x as fast as the plain mean'),
        (BEST, {FOUR: 0.5}, f"3.00x as fast as the plain mean. Faster: {FOUR}, 2.00x as fast as that; whether your"),
        (HALF, compressed(2.99), f"{LITTLE}; it does not know how much communication backward hides"),
        (HALF, compressed(4.0), f"Faster: {MEAN}, 1.33x as fast as that"),
        (MEAN, compressed(2.99), 'No compression saves a tenth of a step here: sync="auto" takes allreduce'),
    ],
)
def test_the_verdict_is_what_auto_takes_and_what_is_faster(chosen, seconds, said) -> None:
    assert said in examination.verdict(replace(findings(**seconds), chosen=chosen))


@pytest.mark.parametrize("at", [None, RankInfo("torchrun", 0, 2, 0)])
def test_ranks_of_a_launcher_are_not_told_to_use_one(at: RankInfo | None, capsys: pytest.CaptureFixture[str]) -> None:
    examination.show(replace(findings(), hosts=["here", "here"]), Ranks(at, 2), "transformer")
    said = " ".join(capsys.readouterr().out.split())
    assert "fnddp plan auto --ranks N --link 200mbit --model transformer" in said
    assert ("run fnddp doctor under torchrun" in said) == (at is None)


def test_all_ranks_measure_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share cores take longer than one of them alone, while the others wait."""
    all_at_once = threading.Barrier(2, timeout=SECONDS / 2)

    def once(made: Any) -> Any:
        all_at_once.wait()
        return made

    monkeypatch.setattr(examination, "measure_backward", lambda *_: once(Compute()))
    monkeypatch.setattr(examination, "cost", lambda sync, *_: once(outcome(repr(sync), 1.0)))
    run_threads(2, lambda _: [*examination.predicted(Link(1e3), "digits", "cpu")], seconds=SECONDS)


def test_problems_are_reported() -> None:
    wrong = replace(findings(), disagreement="ranks disagree about torch: rank 0: 2.13; rank 1: 2.12", unequal=[MEAN])
    assert not wrong.is_sound
    said = "\n".join(examination.lines(wrong, Ranks(RankInfo("SLURM", 0, 2, 0), 2)))
    assert "PROBLEM: ranks disagree about torch: rank 0: 2.13; rank 1: 2.12" in said
    assert f"PROBLEM: means are not equal on all ranks: {MEAN}" in said
    assert "ranks: 2, started by SLURM, on here, there; gloo" in said
    assert "link between hosts: 1 Gbit/s" in said
