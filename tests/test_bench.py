"""`fnddp bench`: the named models, what a run reports, and what is said of wrong arguments. Nothing is timed here."""

import json
import math
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch.func import functional_call

from fnddp import allreduce, fp16, parse
from fnddp.cli import bench_codecs, bench_report, main
from fnddp.cli.bench_arms import Setup
from fnddp.cli.bench_rank import Measured, Times, counted
from fnddp.cli.bench_report import Ratio, Run
from fnddp.cli.failures import WrongArgument
from fnddp.cli.launcher import RankInfo
from fnddp.cli.models import load
from fnddp.core.codec import Codec
from fnddp.core.sync import registry
from tests.terminals import complaints
from tests.test_network import namespaces, needs_hosts

TINY = """
import torch
from torch import nn

def whole():
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    return model, torch.randn(8, 64), lambda out: out.square().mean()

def alone():
    return nn.Linear(3, 2)

def reads_values():
    return nn.Linear(3, int(torch.ones(2).sum()))

def number():
    return 3

def pair():
    return nn.Linear(3, 2), torch.ones(2, 3)

def text_in():
    return nn.Linear(3, 2), "text", torch.sum

def no_loss():
    return nn.Linear(3, 2), torch.ones(2, 3), 1.0
"""
PARAMETERS = 64 * 32 + 32 + 2 * 32 + 32 * 10 + 10
LOW_RANK = "error_feedback(powersgd(fp16(allreduce), rank=2))"
# fp16 factors of rank 2 for 32x64 and 10x32, and the vectors
LOW_RANK_BYTES = 2 * (2 * (32 + 64 + 10 + 32) + 32 + 2 * 32 + 10)
SMALL = ("--pairs", "2", "--model")


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "tiny.py").write_text(TINY)
    return str(tmp_path / "tiny.py")


@pytest.mark.parametrize(
    ("name", "leaves", "parameters"),
    [
        ("transformer", 52, 10_272_256),
        ("deep", 384, 4_239_360),
        ("gpt2", 148, 124_439_808),
        ("resnet18", 62, 11_173_962),
    ],
)
def test_named_models(name: str, leaves: int, parameters: int) -> None:
    workload = load(name)
    shapes = workload.parameters()
    assert {p.device.type for p in shapes.values()} == {"meta"}
    assert (len(shapes), sum(p.numel() for p in shapes.values())) == (leaves, parameters)
    if name == "gpt2":
        return  # its values are half a gigabyte
    module, task = workload.make(0), workload.task(1)
    first, again, other = (task.batch(rank, 2, torch.Generator()) for rank in (0, 0, 1))
    task.loss(module, first).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])


def test_gpt2_runs() -> None:
    workload = load("gpt2")
    with torch.device("meta"):
        module, task = workload.make(0), workload.task(1)
        batch = tuple(part.to("meta") for part in task.batch(0, 1, torch.Generator("cpu")))
        params = dict(module.named_parameters())
        logits = functional_call(module, params, batch[:1])
        assert logits.shape == (1, 64, 50257)
        task.loss(module, batch).backward()
    assert all(p.grad is not None for p in params.values())


def test_a_model_in_a_file(tiny: str) -> None:
    assert {name: tuple(p.shape) for name, p in load(f"{tiny}:alone").parameters().items()} == {
        "weight": (2, 3),
        "bias": (2,),
    }
    assert load(f"{tiny}:reads_values").parameters()["weight"].device.type == "meta"
    task = load(f"{tiny}:whole").task(1)
    assert task.loss(lambda x: x + 1, (torch.ones(2),)) == 4


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("x", "has no function or module 'x'; it has alone, no_loss, number"),
        ("alon", "has no function or module 'alon'; did you mean 'alone'"),
        ("number", r"number must return a torch.nn.Module or \(module, inputs, loss_fn\), got int"),
        ("pair", r"or \(module, inputs, loss_fn\), got \(Linear, Tensor\)"),
        ("alone", r"returns a module alone; to train it, it must return \(module, inputs, loss_fn\)"),
        ("text_in", "inputs must be a tensor or a tuple of tensors, got str"),
        ("no_loss", "loss_fn must be a function of the module's output, got float"),
    ],
)
def test_wrong_functions(tiny: str, function: str, message: str) -> None:
    with pytest.raises(WrongArgument, match=message):
        load(f"{tiny}:{function}").task(1)


def test_wrong_files(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    where = r"cannot import .*broken.py: ZeroDivisionError: division by zero \(at .*broken.py:1\)"
    with pytest.raises(WrongArgument, match=where):
        load(f"{tmp_path}/broken.py:fn")
    with pytest.raises(WrongArgument, match="there is no file absent.py"):
        load("absent.py:fn")
    with pytest.raises(WrongArgument, match="unknown model 'gpt5'; did you mean 'gpt2'"):
        load("gpt5")
    with pytest.raises(
        WrongArgument, match=r"unknown model 'x'; known ones are digits, transformer, deep, gpt2, resnet18\. Your"
    ):
        load("x")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("engine", ["ddp", "register", "value_and_grad"])
def test_a_run(engine: str, tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pipelines, peers = ("allreduce", LOW_RANK, "allreduce"), "ddp,powersgd_hook,none"
    options = ("--engine", engine, "--against", peers, "--out", str(tmp_path / "a" / "b"), "--profile")
    assert main.main(["bench", *pipelines, *SMALL, f"{tiny}:whole", *options]) == 0
    said, errors = capfd.readouterr()
    assert complaints(errors) == []
    for expected in (
        LOW_RANK,
        "allreduce #2",
        "powersgd_hook is left out: torch's",
        "time / PEER",
        "loopback",
        "hooks",
    ):
        assert expected in said
    height, width, _ = imread(tmp_path / "a" / "b" / "ratios.png").shape
    assert min(height, width) > 300
    results = json.loads((tmp_path / "a" / "b" / "results.json").read_text())
    assert (results["parameters"], results["ranks"], results["engine"]) == (PARAMETERS, 2, engine)
    arms = {arm["arm"]: arm for arm in results["arms"]}
    assert list(arms) == ["allreduce", LOW_RANK, "allreduce #2", "ddp", "none"]
    for arm in arms.values():
        assert np.array(arm["seconds_by_rank_and_step"]).shape == (2, 2)
        assert set(arm["ratios"]) == {"ddp", "none"}
        assert arm["link_bytes"] >= 0
    none, ours, theirs = (arms[name]["profile"] for name in ("none", LOW_RANK, "ddp"))
    assert set(ours) == {"start", "hooks", "encode", "launch", "wait", "decode", "end", "operations"}
    assert min(ours["hooks"], theirs["hooks"]) > 0
    assert min(ours[part] for part in ("start", "encode", "launch", "wait", "decode", "end")) > 0
    assert {none[part] + theirs[part] for part in ("start", "encode", "launch", "wait", "decode", "end")} == {0}
    assert ours["operations"] > none["operations"] > 0
    # torch's DDP also sends the buffers of BatchNorm: two floats a channel, and a count
    buffers = 4 * 2 * 32 + 8
    ours = 0 if engine == "value_and_grad" else buffers
    assert arms["allreduce"]["wire_bytes"] == 4 * PARAMETERS + ours
    assert arms[LOW_RANK]["wire_bytes"] == LOW_RANK_BYTES + ours
    assert arms["ddp"]["wire_bytes"] == 4 * PARAMETERS + buffers
    assert arms["none"]["wire_bytes"] == 0


@needs_hosts
@pytest.mark.timeout(200)
def test_a_run_over_a_link(tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], spawned: None) -> None:
    options = ("--link", "200mbit", "--engine", "register", "--against", "ddp,fp16_hook", "--out", str(tmp_path))
    assert main.main(["bench", "fp16(allreduce)", *SMALL, f"{tiny}:whole", *options]) == 0
    assert complaints(capfd.readouterr().err) == []
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["link"] == "200mbit"
    for arm in results["arms"]:  # a ring of two sends each byte once; and headers, barriers and acknowledgements
        assert arm["wire_bytes"] < arm["link_bytes"] < arm["wire_bytes"] + 10_000
    assert namespaces() == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fp16(allreduc)"], "parse: unknown name 'allreduc'; did you mean 'allreduce'?"),
        (["allreduce", "--link", "100mbps"], "--link: '100mbps' is no link: write a rate"),
        (["powersgd(allreduce, rank=0)"], "\n  powersgd(allreduce, rank=0)\n  ^\n"),
        (["partition({'encoder.*': allreduce})"], "partition: leaf 'position' matches none"),
        (["allreduce", "--model", "gpt5"], "unknown model 'gpt5'"),
        (["allreduce", "--against", "ddp,horovod"], "--against: unknown peer 'horovod'; known ones are ddp, fp16_hook"),
        (["allreduce", "--against", "bf16_hook"], "--against bf16_hook: no peer is left to compare with; add ddp"),
        (["allreduce", "--backend", "inductor", "--compile"], "--backend is for what plans compute"),
        (["allreduce", "--out", "/dev/null/out"], "--out: cannot write /dev/null/out: Not a directory"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", *arguments]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("fnddp bench: ")
    assert message in errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "allreduce", "--device", "cuda"]) == 2
    assert "there is no CUDA device here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link", "1gbit"], "--link shapes ranks of this machine, and torchrun has started its own"),
        (["--ranks", "3"], "--ranks 3, but torchrun has started 2; leave --ranks out"),
        (["--model", "gpt5"], "unknown model 'gpt5'"),
    ],
)
def test_wrong_arguments_of_launched_ranks(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each host says what is wrong there, once."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    said = {}
    for rank, local in ((0, 0), (1, 1), (1, 0)):
        for name, value in {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        assert main.main(["bench", "allreduce", *arguments]) == 2
        said[rank, local] = capsys.readouterr().err
    assert said[0, 0].startswith(f"fnddp bench: {message}")
    assert said[1, 1] == ""
    assert said[1, 0].startswith(f"fnddp bench: rank 1: {message}")


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


def test_ratios_are_paired_and_the_slowest_rank_counts() -> None:
    ours = Times([[2.0, 30.0, 1.0], [1.0, 20.0, 3.0]], wire_bytes=0, link_bytes=[10, 30, 20])
    peer = Times([[4.0, 10.0, 1.0], [1.0, 10.0, 1.0]], wire_bytes=0, link_bytes=[1, 1, 1])
    setup = Setup("tiny", [fp16(allreduce)], ["ddp"])
    run = Run(setup, 2, None, 1, Measured([ours, peer], ["here", "here"], 1))
    assert ours.steps == [2, 30, 3]
    assert run.ratio(0, 1) == Ratio(low=1.75, median=3, high=3)  # of 0.5, 3 and 3
    assert run.link_bytes(0) == 10  # of both ranks on one device: half
    assert math.isclose(run.ratio(1, 1).median, 1)
    assert len(bench_report.table(run).rows) == 2
    assert "through loopback" in bench_report.table(run).caption
    apart = replace(run, measured=Measured([ours, peer], ["here", "there"], 1), launcher="SLURM")
    assert apart.link_bytes(0) == 20
    assert "on the first host" in bench_report.table(apart).caption
    assert {"hosts": 2, "started_by": "SLURM"}.items() <= apart.conditions.items()


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([0.5, 0.6, 0.4], "Fastest: fp16(allreduce), in 0.50 of the time of ddp"),
        ([1.5, 1.6, 1.4], "Nothing is faster than ddp here: fp16(allreduce) comes closest, in 1.50 of its time"),
        ([0.5, 1.0, 1.5], "As fast as ddp, for all that 3 rounds can tell: fp16(allreduce)"),
    ],
)
def test_a_verdict(steps: list[float], says: str) -> None:
    slow, ours, ddp = (Times([of], 9, [1, 1, 1]) for of in ([2.0] * 3, steps, [1.0] * 3))
    silent = Times([[0.1] * 3], 0, [1, 1, 1])
    sends_nothing = parse("none")
    setup = Setup("tiny", [allreduce, fp16(allreduce), sends_nothing], ["ddp", "none"], pairs=3)
    measured = Measured([slow, ours, silent, ddp, silent], ["here"], 1)
    assert bench_report.verdict(Run(setup, 1, None, 1, measured)) == says
    alone = Measured([slow, ours, silent, silent], ["here"], 1)
    assert bench_report.verdict(Run(replace(setup, peers=["none"]), 1, None, 1, alone)) == ""


def test_what_was_faster_in_most_rounds_goes_before_what_was_faster_in_some() -> None:
    uneven, even, ddp = (Times([of], 9, [1, 1, 1]) for of in ([0.5, 0.5, 1.5, 1.5, 0.5], [0.9] * 5, [1.0] * 5))
    setup = Setup("tiny", [allreduce, fp16(allreduce)], ["ddp"], pairs=5)
    run = Run(setup, 1, None, 1, Measured([uneven, even, ddp], ["here"], 1))
    assert bench_report.verdict(run) == "Fastest: fp16(allreduce), in 0.90 of the time of ddp"


def test_arms_that_occur_twice_are_numbered() -> None:
    setup = Setup("tiny", [allreduce, parse("allreduce"), fp16(allreduce)], ["ddp"])
    assert setup.names == ["allreduce", "allreduce #2", "fp16(allreduce)", "ddp"]


def test_codecs_are_timed_against_a_copy(capsys, monkeypatch):
    monkeypatch.setattr(bench_codecs, "LEAVES", 2)
    monkeypatch.setattr(bench_codecs, "ELEMENTS", 1 << 18)
    assert main.main(["bench", "--codecs", "fp16(allgather)", "sign(allgather)", "quantize(allgather, bits=4)"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "allgather" in line]
    assert [row[-5] for row in rows] == ["16.00", "1.00", "4.25"]  # a scale of 32 bits for a leaf, or for 128 elements
    assert all(float(row[-4]) > 0 and float(row[-2]) > 0 for row in rows)


def test_what_is_not_encoded_takes_no_part_of_a_copy(capsys, monkeypatch):
    monkeypatch.setattr(bench_codecs, "LEAVES", 1)
    monkeypatch.setattr(bench_codecs, "ELEMENTS", 1 << 10)
    assert main.main(["bench", "--codecs", "none", "every(1000, allreduce)"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith(("none", "every"))]
    assert [row[-5:-4] for row in rows] == [["0.00"], ["0.00"]]
    assert rows[0][-4:] == ["-"] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fp16(allreduce, check=True)"], "fp16(allreduce, check=True) cannot be lowered"),
        (
            ["--ranks", "4", "--link", "1gbit"],
            "a link or a model: leave --ranks and --link out",
        ),
        (["--profile"], "leave --profile out"),
    ],
)
def test_codecs_are_not_timed(arguments, message, capsys):
    assert main.main(["bench", "--codecs", *arguments]) == 2
    said, errors = capsys.readouterr()
    assert said == ""
    assert message in errors


def test_codecs_are_all_there():
    ours = {name for name, entry in registry.items() if isinstance(entry, type) and issubclass(entry, Codec)}
    assert ours <= {text.split("(")[0] for text in bench_codecs.CODECS}
