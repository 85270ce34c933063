"""`fnddp plan`: bytes and times against arithmetic, what it prints, and what is said of wrong arguments."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fnddp.cli import main
from fnddp.cli.arguments.values import DEFAULT_PIPELINES

MODELS = """
from torch import nn

def small():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

def trainable_in_part():
    return nn.Sequential(nn.Linear(64, 32).requires_grad_(False), nn.Linear(32, 10))

def huge():
    return nn.Linear(200_000, 200_000)

def frozen():
    return nn.Linear(3, 2).requires_grad_(False)

def number():
    return 3
"""
PARAMETERS = 64 * 32 + 32 + 32 * 10 + 10
LOW_RANK = "error_feedback(powersgd(fp16(allreduce), rank=2))"
LOW_RANK_BYTES = 2 * (2 * (32 + 64 + 10 + 32) + 32 + 10)  # fp16 factors of rank 2, and the biases


@pytest.fixture
def models(tmp_path: Path) -> str:
    (tmp_path / "models.py").write_text(MODELS)
    return str(tmp_path / "models.py")


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Any:
    """`fnddp plan ... --json`, read."""

    def run(*arguments: str) -> dict[str, Any]:
        assert main.main(["plan", *arguments, "--json"]) == 0
        said, errors = capsys.readouterr()
        assert errors == ""
        return json.loads(said)

    return run


def test_bytes_and_times_are_arithmetic(planned: Any, models: str) -> None:
    links = ("--link", "1gbit", "--link", "1gbit:20us")
    said = planned("allreduce", "fp16(allreduce)", LOW_RANK, "--model", f"{models}:small", "--ranks", "4", *links)
    assert (said["parameters"], said["leaves"], said["ranks"], said["step"]) == (PARAMETERS, 4, 4, None)
    plain, half, low_rank = said["pipelines"]
    assert [each["wire_bytes"] for each in said["pipelines"]] == [4 * PARAMETERS, 2 * PARAMETERS, LOW_RANK_BYTES]
    assert [each["link_bytes"] for each in said["pipelines"]] == [6 * PARAMETERS, 3 * PARAMETERS, 1.5 * LOW_RANK_BYTES]
    assert [each["reduction"] for each in (plain, half)] == [1, 2]
    assert low_rank["pipeline"] == LOW_RANK
    assert [(each["collectives"], each["rounds"]) for each in said["pipelines"]] == [(1, 1), (1, 1), (2, 2)]
    seconds = 6 * PARAMETERS / 125e6
    assert plain["links"]["1gbit"] == {"communication_seconds": pytest.approx(seconds)}
    assert plain["links"]["1gbit:20us"] == {"communication_seconds": pytest.approx(seconds + 4 * 3 * 20e-6)}
    assert not dist.is_initialized()


def test_a_thousand_ranks(planned: Any) -> None:
    said = planned("allreduce", "fp16(allreduce)", "--model", "resnet18", "--ranks", "1024")
    assert [each["wire_bytes"] for each in said["pipelines"]] == [44_695_848, 22_347_924]
    assert said["pipelines"][0]["link_bytes"] == pytest.approx(2 * 1023 / 1024 * 44_695_848, rel=1e-6)


def test_gpt2(planned: Any) -> None:
    (plain,) = planned("allreduce", "--model", "gpt2")["pipelines"]
    assert (plain["wire_bytes"], plain["reduction"]) == (4 * 124_439_808, 1)


def test_a_model_that_fits_no_memory(planned: Any, models: str) -> None:
    (low_rank,) = planned("powersgd(allreduce, rank=1)", "--model", f"{models}:huge")["pipelines"]
    assert low_rank["wire_bytes"] == 4 * 3 * 200_000


def test_only_what_is_trained_is_synchronized(planned: Any, models: str) -> None:
    (plain,) = planned("allreduce", "--model", f"{models}:trainable_in_part")["pipelines"]
    assert plain["wire_bytes"] == 4 * (32 * 10 + 10)


@pytest.mark.parametrize(("step", "size"), [("0", 4), ("29", 4), ("30", 2), (None, 2)])
def test_step_chooses_the_phase(planned: Any, models: str, step: str | None, size: int) -> None:
    options = () if step is None else ("--step", step)
    said = planned("warmup(fp16(allreduce), steps=30)", "--model", f"{models}:small", *options)
    assert said["step"] == (None if step is None else int(step))
    assert said["pipelines"][0]["wire_bytes"] == size * PARAMETERS


def test_buckets_hide_behind_backward(planned: Any) -> None:
    options = ("--model", "resnet18", "--backward", "0.5", "--link", "1gbit")
    few, many = (planned("allreduce", *options, "--bucket-cap-mb", cap)["pipelines"][0] for cap in ("100", "5"))
    assert few["collectives"] < many["collectives"]
    for each in (few, many):
        costs = each["links"]["1gbit"]
        assert costs["step_seconds"] == pytest.approx(0.5 + costs["exposed_seconds"])
    assert many["links"]["1gbit"]["exposed_seconds"] < few["links"]["1gbit"]["exposed_seconds"]


def test_table(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    links = ("--link", "1gbit", "--link", "10gbit")
    assert main.main(["plan", "--model", f"{models}:small", *links, "--backward", "0.001"]) == 0
    said, errors = capsys.readouterr()
    assert errors == ""
    for expected in (*DEFAULT_PIPELINES[:3], "2,410 parameters in 4 leaves; 8 ranks; after all warm-ups"):
        assert expected in said
    for expected in ("9,640", "15.2x", "10gbit", "exposed", "a backward of 1 ms", "not measured", "fnddp bench"):
        assert expected in said


def test_show(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", "allreduce", LOW_RANK, "--model", f"{models}:small", "--step", "3", "--show"]) == 0
    said = capsys.readouterr().out
    assert "8 ranks; step 3;" in said
    for expected in ("float32[2410]", "float16[", "round 2 of 2"):
        assert expected in said


def test_svg(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", LOW_RANK, "--model", f"{models}:small", "--svg")
    assert main.main([*arguments, str(tmp_path / "plan.svg")]) == 0
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    capsys.readouterr()


@pytest.mark.parametrize(("name", "reason"), [("absent/x", "No such file or directory"), ("", "Is a directory")])
def test_files_are_tried_before_anything_is_planned(
    name: str, reason: str, models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, trace = tmp_path / "plan.svg", tmp_path / name
    arguments = ("plan", LOW_RANK, "--model", f"{models}:small", "--svg", str(svg), "--trace", str(trace))
    assert main.main(arguments) == 2
    said, errors = capsys.readouterr()
    assert said == ""
    assert f"fnddp plan: --trace: cannot write {trace}: {reason}" in errors
    assert not svg.exists()


def test_steps_that_are_not_alike_have_a_row_each(
    planned: Any, models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("error_feedback(powersgd(allreduce, refresh=4))", "--model", f"{models}:small", "--link", "1gbit")
    (low_rank,) = planned(*options)["pipelines"]
    whole, compressed = low_rank["phases"]
    assert (whole["steps"], compressed["steps"]) == (1, 3)
    assert (whole["wire_bytes"], whole["reduction"]) == (4 * PARAMETERS, 1)
    assert low_rank["wire_bytes"] == (whole["wire_bytes"] + 3 * compressed["wire_bytes"]) / 4
    assert low_rank["reduction"] == pytest.approx(4 * PARAMETERS / low_rank["wire_bytes"])
    seconds = [each["links"]["1gbit"]["communication_seconds"] for each in (whole, compressed, compressed, compressed)]
    assert low_rank["links"]["1gbit"]["communication_seconds"] == pytest.approx(sum(seconds) / 4)
    assert low_rank["rounds"] == 2
    assert len(planned(*options, "--step", "1")["pipelines"][0]["phases"]) == 1
    assert main.main(["plan", *options, "--show", "--trace", str(tmp_path / "step.json")]) == 0
    said = capsys.readouterr().out
    assert "  1 of 4 steps " in said
    assert "  3 of 4 steps " in said
    assert "round 2 of 2" in said
    assert "round 1 of 1" in said
    assert '"fnddp c1 all_reduce"' not in (tmp_path / "step.json").read_text()  # of the step that sends most


def test_kinds_of_steps_that_cost_the_same_are_one(planned: Any, models: str) -> None:
    nested = planned("every(2, every(3, allreduce))", "--model", f"{models}:small")["pipelines"][0]
    assert [(each["steps"], each["wire_bytes"]) for each in nested["phases"]] == [(5, 0), (1, 4 * PARAMETERS)]


def test_trace(models: str, tmp_path: Path) -> None:
    arguments = ("plan", LOW_RANK, "--model", f"{models}:small", "--backward", "0.02", "--trace")
    assert main.main([*arguments, str(tmp_path / "step.json")]) == 0
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    taken = {event["name"]: event["dur"] for event in events if event["ph"] == "X"}
    assert taken["backward"] == 20_000
    assert {"fnddp slot 0 encode", "fnddp c0 all_reduce", "fnddp c1 all_reduce", "fnddp c1 wait"} <= set(taken)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fp16(allreduc)"], "parse: unknown name 'allreduc'; did you mean 'allreduce'?"),
        (["allreduce", "powersgd(allreduce, rank=0)"], "\n  powersgd(allreduce, rank=0)\n  ^\n"),
        (["partition({'encoder.*': allreduce})"], "partition: leaf '0.weight' matches none"),
        (["fp16(allreduce, check=True)"], "fp16(allreduce, check=True) cannot be lowered"),
        (["allreduce", "--link", "100"], "--link: '100' is no link: write a rate"),
        (["allreduce", "fp16(allreduce)", "--trace", "x"], "--trace draws the plan of one pipeline on one link"),
        (["allreduce", "fp16(allreduce)", "--svg", "x.svg"], "--svg draws the plan of one pipeline on one link"),
        (["allreduce", "fp16(allreduce)", "--svg", "x", "--trace", "x"], "--svg and --trace draw the plan of one"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", *arguments, "--model", f"{models}:small"]) == 2
    said, errors = capsys.readouterr()
    assert said == ""
    assert errors.startswith("fnddp plan: ")
    assert message in errors


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent", "has no function or module 'absent'; it has frozen, huge, number, small"),
        ("number", "number must return a torch.nn.Module or (module, inputs, loss_fn), got int"),
        ("frozen", "has no parameters that require gradients: there is nothing to synchronize"),
    ],
)
def test_wrong_model(function: str, message: str, models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", "allreduce", "--model", f"{models}:{function}"]) == 2
    assert message in capsys.readouterr().err


TWO_LEVELS = "hierarchical(fp16(all_reduce('across')), intra='node')"


def test_each_group_has_a_size_and_a_link(planned: Any, models: str) -> None:
    sizes, links = "12,node=4,across=3", "1gbit,node=8gbit,across=2gbit"
    said = planned(TWO_LEVELS, "allreduce", "--model", f"{models}:small", "--ranks", sizes, "--link", links)
    assert said["ranks"] == {"default": 12, "node": 4, "across": 3}
    two_levels, plain = said["pipelines"]
    shard = sum(-(-numel // 4) for numel in (64 * 32, 32, 320, 10))
    node, across = 4 * 4 * shard * 2 * 3 / 4 + 4 * shard * 3, 2 * shard * 4 / 3  # gloo's reduce_scatter sends double
    assert two_levels["link_bytes"] == pytest.approx(node + across, abs=3)
    assert two_levels["links"][links]["communication_seconds"] == pytest.approx(node / 1e9 + across / 250e6)
    assert plain["links"][links]["communication_seconds"] == pytest.approx(2 * 11 / 12 * 4 * PARAMETERS / 125e6)


def test_sizes_of_groups_are_printed(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--ranks", "node=8,across=128", "--step", "0"]
    assert main.main(["plan", TWO_LEVELS, "--model", f"{models}:small", *sizes]) == 0
    assert "8 ranks in group node, 128 ranks in group across" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "--ranks must be a whole number of at least 1, or one for each group"),
        (["--ranks", "node=8,across=-1"], "--ranks must be a whole number of at least 1, or one for each group"),
        (["--ranks", "1024"], "give the number of ranks of each: --ranks across=N,node=N"),
        (["--ranks", "node=8"], "--ranks node=8: nothing is given for group 'across'"),
        (["--ranks", "node=8,across=2,rack=2"], "no pipeline here reduces over group 'rack'; there are group 'across'"),
        (["--ranks", "8,node=8,across=2"], "no pipeline here reduces over the default group"),
        (["--ranks", "node=8,across=2,node=8"], "group 'node' is given twice"),
        (
            ["--ranks", "node=8,across=2", "--link", "node=1gbit"],
            "--link node=1gbit: nothing is given for group 'across'",
        ),
        (["--ranks", "node=8,across=2", "--link", "node=1gbit,across=x"], "--link: 'x' is no link"),
    ],
)
def test_wrong_groups(options: list[str], message: str, models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", TWO_LEVELS, "--model", f"{models}:small", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "-1"], "argument --step: must be a whole number of at least 0, got '-1'"),
        (["--backward", "0"], "argument --backward: must be a positive number, got '0'"),
        (["--bucket-cap-mb", "nan"], "argument --bucket-cap-mb: must be a positive number, got 'nan'"),
        (["--show", "--json"], "not allowed with argument --show"),
    ],
)
def test_wrong_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main(["plan", *options])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
