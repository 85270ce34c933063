"""`fnddp bench`: the named models and what a run reports. Wrong arguments: test_cli.py. Nothing is timed here."""

import json
import socket
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from fnddp import allreduce, fp16, parse
from fnddp.cli import bench_codecs, bench_report, launch, main
from fnddp.cli.bench_rank import Ratio, Run, Setup, Times, counted
from fnddp.cli.launch import RankInfo, Ranks
from fnddp.cli.models import load, parameters
from fnddp.core.codec import Codec
from fnddp.core.sync import registry
from tests import workloads
from tests.hosts import complaints
from tests.test_network import namespaces, needs_hosts

MODEL = f"{workloads.__file__}:normalized"
PARAMETERS = 64 * 32 + 32 + 2 * 32 + 32 * 10 + 10
LOW_RANK = "error_feedback(powersgd(fp16(allreduce), rank=2))"
# fp16 factors of rank 2 for 32x64 and 10x32, and the vectors
LOW_RANK_BYTES = 2 * (2 * (32 + 64 + 10 + 32) + 32 + 2 * 32 + 10)
BUFFERS = 4 * 2 * 32 + 8  # of BatchNorm, which DDP sends, too: two floats a channel, and a count
SMALL = ("--pairs", "2", "--model", MODEL)


NAMED = {
    "transformer": (52, 10_272_256),
    "deep": (384, 4_239_360),
    "gpt2": (148, 124_439_808),
    "resnet18": (62, 11_173_962),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_models(name: str) -> None:
    problem, shapes = load(name), parameters(name)
    assert {p.device.type for p in shapes.values()} == {"meta"}
    assert (len(shapes), sum(p.numel() for p in shapes.values())) == NAMED[name]
    first, again, other = (problem.batch(rank, 2, torch.Generator()) for rank in (0, 0, 1))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    with torch.device("meta" if name == "gpt2" else "cpu") as device:  # its values are half a gigabyte
        module = problem.make(0)
        problem.loss(module, tuple(part.to(device) for part in first)).backward()
    assert all(p.grad is not None for p in module.parameters())
    assert name == "gpt2" or all(p.grad.isfinite().all() for p in module.parameters())


def test_a_named_language_model_does_not_see_what_it_predicts() -> None:
    module = load("transformer").make(0)
    tokens = torch.arange(64).reshape(1, 64)
    before, after = module(tokens), module(tokens.index_fill(1, torch.tensor([40]), 7))
    same = (before == after).all(-1)[0]
    assert same[:40].all()
    assert not same[40:].any()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("engine", ["ddp", pytest.param("value_and_grad", marks=pytest.mark.thorough)])
def test_a_run(engine: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pipelines, peers = ("allreduce", LOW_RANK, "allreduce"), "ddp,powersgd_hook,none"
    options = ("--engine", engine, "--against", peers, "--out", str(tmp_path / "a" / "b"))
    assert main.main(["bench", *pipelines, *SMALL, *options]) == 0
    said, errors = capfd.readouterr()
    assert complaints(errors) == []
    for expected in (LOW_RANK, "allreduce #2", "powersgd_hook is left out: torch's", "in the same round", "loopback"):
        assert expected in said
    assert min(imread(tmp_path / "a" / "b" / "ratios.png").shape[:2]) > 300
    results = json.loads((tmp_path / "a" / "b" / "results.json").read_text())
    assert (results["parameters"], results["ranks"], results["engine"]) == (PARAMETERS, 2, engine)
    arms = {arm["arm"]: arm for arm in results["arms"]}
    assert list(arms) == ["allreduce", LOW_RANK, "allreduce #2", "ddp", "none"]
    for arm in arms.values():
        assert np.array(arm["seconds_by_rank_and_step"]).shape == (2, 2)
        assert set(arm["ratios"]) == {"ddp", "none"}
        assert arm["link_bytes"] >= 0
    sent = 0 if engine == "value_and_grad" else BUFFERS
    assert arms["allreduce"]["wire_bytes"] == 4 * PARAMETERS + sent
    assert arms[LOW_RANK]["wire_bytes"] == LOW_RANK_BYTES + sent
    assert arms["ddp"]["wire_bytes"] == 4 * PARAMETERS + BUFFERS
    assert arms["none"]["wire_bytes"] == 0


@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_steps_that_are_compiled_are_counted(tmp_path: Path) -> None:
    options = ("--compile", "--against", "ddp", "--ranks", "1", "--out", str(tmp_path))
    assert main.main(["bench", "fp16(allreduce)", *SMALL, *options]) == 0
    arms = json.loads((tmp_path / "results.json").read_text())["arms"]
    assert [arm["wire_bytes"] for arm in arms] == [2 * PARAMETERS, 4 * PARAMETERS + BUFFERS]


@needs_hosts
@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_a_run_over_a_link(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "fresh", lambda: get_context("spawn"))  # as for users
    options = ("--link", "200mbit", "--engine", "register", "--against", "ddp,fp16_hook", "--out", str(tmp_path))
    assert main.main(["bench", "fp16(allreduce)", "auto", *SMALL, *options]) == 0
    (line,) = complaints(capfd.readouterr().err)
    assert line.startswith('sync="auto" takes ')
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["link"] == "200mbit"
    assert [arm["arm"] for arm in results["arms"]][:2] == ["fp16(allreduce)", "auto"]
    for arm in results["arms"]:  # a ring of two sends each byte once; and headers, barriers and acknowledgements
        assert arm["wire_bytes"] < arm["link_bytes"] < arm["wire_bytes"] + 10_000
    assert namespaces() == set()


def test_wrong_arguments_of_launched_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "here"}.items():
        monkeypatch.setenv(name, value)
    for *options, message in (
        ("--codecs", "--codecs times one rank, but torchrun has started 2"),
        ("--link", "1gbit", "--link only shapes ranks that fnddp starts, but torchrun started these"),
        ("--ranks", "3", "--ranks 3, but torchrun has started 2; remove --ranks"),
    ):
        assert main.main(["bench", "allreduce", *options]) == 2
        assert capsys.readouterr().err.startswith(f"fnddp bench: {message}")


def test_which_network_devices_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that lead to other ranks: of a launcher's, loopback on one host, and all others on several."""
    at = RankInfo("torchrun", 0, 2, 0)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    assert counted(["here", "here"], at) == ["lo"]
    assert counted(["here", "there"], at) == ["eth0", "ib0"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0,eth1")
    assert counted(["here", "there"], at) == ["ib0", "eth1"]
    assert counted(["here", "here"], at) == ["lo"]  # what a host sends to itself does not leave it
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # of a host that is made for one rank
    assert counted(["here", "here"], None) == ["eth0"]


SETUP = Setup("tiny", [allreduce, fp16(allreduce)], ["ddp"], ranks=Ranks(None, 1), parameters=1)


def run_of(*steps: list[float], setup: Setup = SETUP, silent: tuple[int, ...] = ()) -> Run:
    times = [Times([taken], 0 if arm in silent else 9, [1] * len(taken)) for arm, taken in enumerate(steps)]
    return Run(setup, times, ["here"], 1)


def test_ratios_are_paired_and_the_slowest_rank_counts() -> None:
    ours = Times([[2.0, 30.0, 1.0], [1.0, 20.0, 3.0]], wire_bytes=0, link_bytes=[10, 30, 20])
    peer = Times([[4.0, 10.0, 1.0], [1.0, 10.0, 1.0]], wire_bytes=0, link_bytes=[1, 1, 1])
    setup = Setup("tiny", [fp16(allreduce)], ["ddp"], ranks=Ranks(None, 2), parameters=1)
    run = Run(setup, [ours, peer], ["here", "here"], 1)
    assert ours.steps == [2, 30, 3]
    assert run.ratio(0, 1) == Ratio(low=1.75, median=3, high=3)  # of 0.5, 3 and 3
    assert run.link_bytes(0) == 10  # of both ranks on one device: half
    assert "through loopback" in bench_report.table(run).legend["link"]
    apart = Run(replace(setup, ranks=Ranks(RankInfo("SLURM", 0, 2, 0), 2)), [ours, peer], ["here", "there"], 1)
    assert apart.link_bytes(0) == 20
    assert "on the first host" in bench_report.table(apart).legend["link"]
    assert {"hosts": 2, "started_by": "SLURM"}.items() <= apart.conditions.items()


@pytest.mark.parametrize(
    ("steps", "verdict"),
    [
        ([0.5, 0.6, 0.4], "Fastest: fp16(allreduce), in 0.50 of the time of ddp"),
        ([1.5, 1.6, 1.4], "Nothing is faster than ddp here: fp16(allreduce) comes closest, in 1.50 of its time"),
        ([0.5, 1.0, 1.5], "As fast as ddp, as far as 3 rounds can show: fp16(allreduce)"),
    ],
)
def test_a_verdict(steps: list[float], verdict: str) -> None:
    setup = replace(SETUP, pipelines=[*SETUP.pipelines, parse("none")], peers=["ddp", "none"], pairs=3)
    times = ([2.0] * 3, steps, [0.1] * 3)
    assert bench_report.verdict(run_of(*times, [1.0] * 3, [0.1] * 3, setup=setup, silent=(2, 4))) == verdict
    alone = run_of(*times, [0.1] * 3, setup=replace(setup, peers=["none"]), silent=(2, 3))
    assert bench_report.verdict(alone) == ""
    few = run_of([0.5], [0.6], [1.0], setup=replace(SETUP, pairs=1))
    assert bench_report.verdict(few) == "1 round cannot tell whether allreduce is faster than ddp: raise --pairs"
    in_most = run_of([0.5, 0.5, 1.5, 1.5, 0.5], [0.9] * 5, [1.0] * 5)  # goes before what was faster in some rounds
    said = "Surely faster than ddp: fp16(allreduce), in 0.90 of its time; allreduce has the least median, of rounds"
    assert bench_report.verdict(in_most) == f"{said} that differ too much to tell"


def test_codecs_are_timed_against_a_copy(capsys, monkeypatch):
    monkeypatch.setattr(bench_codecs, "LEAVES", 2)
    monkeypatch.setattr(bench_codecs, "ELEMENTS", 1 << 18)
    codecs = ("fp16(allgather)", "sign(allgather)", "quantize(allgather, bits=4)", "none", "every(1000, allreduce)")
    assert main.main(["bench", "--codecs", *codecs]) == 0
    begin = tuple(text.split("(")[0] for text in codecs)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith(begin)]
    # A scale of 32 bits for a leaf, or for 128 elements.
    assert [row[-5] for row in rows] == ["16.00", "1.00", "4.25", "0.00", "0.00"]
    assert all(float(row[-4]) > 0 and float(row[-2]) > 0 for row in rows[:3])
    assert rows[3][-4:] == ["-"] * 4
    ours = {name for name, entry in registry.items() if isinstance(entry, type) and issubclass(entry, Codec)}
    assert ours <= {text.split("(")[0] for text in bench_codecs.CODECS}


@pytest.mark.parametrize(("load", "is_busy"), [(99.0, True), (0.0, False)])
def test_a_busy_machine_is_named(load: float, is_busy: bool, capsys: pytest.CaptureFixture[str]) -> None:
    bench_report.show(run_of([2.0], [1.0], [3.0], setup=replace(SETUP, load=load)))
    assert ("load average was 99.0 on" in capsys.readouterr().out) == is_busy
