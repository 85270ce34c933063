"""`fnddp plan`: bytes and times against arithmetic, and what it prints. Wrong arguments: test_cli.py."""

import json
from typing import Any

import pytest
import torch.distributed as dist

import fnddp
from fnddp.cli import main
from fnddp.cli.options import DEFAULT_PIPELINES
from fnddp.simulation.ranks import run_threads
from tests import workloads
from tests.hosts import complaints

MODEL = f"{workloads.__file__}:alone"
PARAMETERS = 64 * 32 + 32 + 32 * 10 + 10
LOW_RANK = "error_feedback(powersgd(fp16(allreduce), rank=2))"
LOW_RANK_BYTES = 2 * (2 * (32 + 64 + 10 + 32) + 32 + 10)  # fp16 factors of rank 2, and the biases
TWO_LEVELS = "hierarchical(fp16(all_reduce('across')), intra='node')"


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str, model: str = MODEL) -> str:
        assert main.main(["plan", *arguments, "--model", model]) == 0
        out, errors = capsys.readouterr()
        assert complaints(errors) == []
        return out

    return run


@pytest.fixture
def planned(printed: Any) -> Any:
    return lambda *arguments, **model: json.loads(printed(*arguments, "--json", **model))


def test_bytes_and_times_are_arithmetic(planned: Any) -> None:
    links = ("--link", "1gbit", "--link", "1gbit:20us")
    said = planned("allreduce", "fp16(allreduce)", LOW_RANK, "--ranks", "4", *links)
    assert (said["parameters"], said["leaves"], said["ranks"], said["step"]) == (PARAMETERS, 4, 4, None)
    plain, half, low_rank = said["pipelines"]
    assert [each["wire_bytes"] for each in said["pipelines"]] == [4 * PARAMETERS, 2 * PARAMETERS, LOW_RANK_BYTES]
    assert [each["link_bytes"] for each in said["pipelines"]] == [6 * PARAMETERS, 3 * PARAMETERS, 1.5 * LOW_RANK_BYTES]
    assert [each["reduction"] for each in (plain, half)] == [1, 2]
    (eighth,) = planned("bucketize(quantize(two_shot))", "--ranks", "4")["pipelines"]
    assert eighth["reduction"] == pytest.approx(plain["link_bytes"] / eighth["link_bytes"])  # as README counts
    assert low_rank["pipeline"] == LOW_RANK
    assert [(each["collectives"], each["rounds"]) for each in said["pipelines"]] == [(1, 1), (1, 1), (2, 2)]
    seconds = 6 * PARAMETERS / 125e6
    assert plain["links"]["1gbit"] == {"communication_seconds": pytest.approx(seconds)}
    assert plain["links"]["1gbit:20us"] == {"communication_seconds": pytest.approx(seconds + 4 * 3 * 20e-6)}
    assert not dist.is_initialized()


def test_all_models_are_planned_without_a_cluster_or_memory(planned: Any) -> None:
    said = planned("allreduce", "fp16(allreduce)", "--ranks", "1024", model="resnet18")
    assert [each["wire_bytes"] for each in said["pipelines"]] == [44_695_848, 22_347_924]
    assert said["pipelines"][0]["link_bytes"] == pytest.approx(2 * 1023 / 1024 * 44_695_848, rel=1e-6)
    (low_rank,) = planned("powersgd(allreduce, rank=1)", model=f"{workloads.__file__}:huge")["pipelines"]
    assert low_rank["wire_bytes"] == 4 * 3 * 200_000
    (frozen_below,) = planned("allreduce", model=f"{workloads.__file__}:trainable_in_part")["pipelines"]
    assert frozen_below["wire_bytes"] == 4 * (32 * 10 + 10)


@pytest.mark.parametrize(("step", "size"), [("0", 4), ("29", 4), ("30", 2), (None, 2)])
def test_step_chooses_the_phase(planned: Any, step: str | None, size: int) -> None:
    said = planned("warmup(fp16(allreduce), steps=30)", *(() if step is None else ("--step", step)))
    assert said["step"] == (None if step is None else int(step))
    assert said["pipelines"][0]["wire_bytes"] == size * PARAMETERS


def test_what_is_planned_is_what_steps_after_the_first_do(planned: Any, printed: Any) -> None:
    """Steps after the first know how gradients come, which decides the buckets; the first one goes by parameters."""
    model, text = f"{workloads.__file__}:positions", "quantize(two_shot)"

    def body(_: int) -> list[tuple[int, int]]:
        module, tokens, loss = workloads.positions()
        wrapped = fnddp.DistributedDataParallel(module, sync=text)
        sent: list[tuple[int, int]] = []
        for _ in range(3):
            loss(wrapped(tokens)).backward()
            assert wrapped.plan is not None
            sent.append((len(wrapped.plan.collectives), wrapped.plan.wire_bytes))
        return sent

    first, second, third = run_threads(2, body)[0]
    assert (first[0], second[0]) == (4, 2)
    assert second == third
    for options, expected in (((), second), (("--step", "1"), second), (("--step", "0"), first)):
        (found,) = planned(text, "--ranks", "2", *options, model=model)["pipelines"]
        assert (found["collectives"], found["wire_bytes"]) == expected, options
    (found,) = planned(text, "--ranks", "2", model=model)["pipelines"]
    assert (found["first_step"]["collectives"], found["first_step"]["wire_bytes"]) == first
    said = printed(text, "allreduce", model=model)
    assert said.count("  the first step ") == 2
    assert "expects gradients in the reverse order of parameters." in " ".join(said.split())
    assert "first step" not in printed(text, "--step", "0", model=model)
    assert "first step" not in printed(text, LOW_RANK.replace("2)", "2, refresh=4)"), model=workloads.SMALL)
    assert "that of this model is not known" in " ".join(printed(text).split())
    (warming,) = planned("warmup(fp16(allreduce), steps=30)", model=workloads.SMALL)["pipelines"]
    assert warming["first_step"]["wire_bytes"] == 2 * warming["wire_bytes"]


def test_buckets_hide_behind_backward(planned: Any) -> None:
    options = ("--backward", "0.5", "--link", "1gbit", "--bucket-cap-mb")
    few, many = (planned("allreduce", *options, cap, model="resnet18")["pipelines"][0] for cap in ("100", "5"))
    assert few["collectives"] < many["collectives"]
    for each in (few, many):
        costs = each["links"]["1gbit"]
        assert costs["step_seconds"] == pytest.approx(0.5 + costs["exposed_seconds"])
    assert many["links"]["1gbit"]["exposed_seconds"] < few["links"]["1gbit"]["exposed_seconds"]


def test_what_is_printed(printed: Any) -> None:
    said = printed("--link", "1gbit", "--link", "10gbit", "--backward", "0.001")
    for expected in (*DEFAULT_PIPELINES[:3], "2,410 parameters in 4 leaves; 8 ranks; after all warm-ups"):
        assert expected in said
    for expected in ("9,640", "15.2x", "10gbit", "exposed", "a backward of 1 ms", "not measured", "fnddp bench"):
        assert expected in said
    said = printed("allreduce", LOW_RANK, "--ranks", "1", "--step", "3", "--show")
    for expected in ("4 leaves; 1 rank; step 3;", "float32[2410]", "float16[", "round 2 of 2"):
        assert expected in said
    said = printed(TWO_LEVELS, "--ranks", "node=8,across=128", "--step", "0")
    assert "8 ranks in group node, 128 ranks in group across" in " ".join(said.split())


def test_steps_that_differ_have_a_row_each(planned: Any, printed: Any) -> None:
    options = ("error_feedback(powersgd(allreduce, refresh=4))", "--link", "1gbit")
    (low_rank,) = planned(*options)["pipelines"]
    whole, compressed = low_rank["phases"]
    assert (whole["steps"], compressed["steps"]) == (1, 3)
    assert (whole["wire_bytes"], whole["reduction"]) == (4 * PARAMETERS, 1)
    assert low_rank["wire_bytes"] == (whole["wire_bytes"] + 3 * compressed["wire_bytes"]) / 4
    assert low_rank["reduction"] == pytest.approx(4 * PARAMETERS / low_rank["wire_bytes"])  # of all_reduces alone
    seconds = [each["links"]["1gbit"]["communication_seconds"] for each in (whole, compressed, compressed, compressed)]
    assert low_rank["links"]["1gbit"]["communication_seconds"] == pytest.approx(sum(seconds) / 4)
    assert low_rank["rounds"] == 2
    assert len(planned(*options, "--step", "1")["pipelines"][0]["phases"]) == 1
    said = printed(*options, "--show")
    for expected in ("  1 of 4 steps ", "  3 of 4 steps ", "round 2 of 2", "round 1 of 1"):
        assert expected in said
    (nested,) = planned("every(2, every(3, allreduce))")["pipelines"]  # kinds of steps that cost the same are one
    assert [(each["steps"], each["wire_bytes"]) for each in nested["phases"]] == [(5, 0), (1, 4 * PARAMETERS)]


def test_axes_of_a_sharded_model(planned: Any, printed: Any) -> None:
    """Two groups of parameters, one for each numbered module, on 4 shards in 3 replicas."""
    pipelines = ("fp16(allreduce)", "--gradients", "quantize(two_shot, bits=4)", "--weights", "quantize(allgather)")
    links = ("--link", "1gbit", "--link", "shards=8gbit,replicas=2gbit")
    said = planned(*pipelines, "--shards", "4", "--replicas", "3", *links)
    assert (said["parameters"], said["groups"]) == (PARAMETERS, 2)
    gradients, weights, replicas = said["axes"]
    rows = 8 * 64 + 8, 3 * 32 + 3  # elements of an owner, padded
    blocks = [(-(-row // 128), min(row, 128)) for row in rows]
    sent = 4 * sum(count * (-(-size // 2) + 4) for count, size in blocks)
    gathered = 2 * sum(count * (size + 4) for count, size in blocks)  # again in backward
    half = 2 * sum(rows)
    assert [each["wire_bytes"] for each in said["axes"]] == [sent, gathered, half]
    assert [each["link_bytes"] for each in said["axes"]] == [sent * 3 // 4, gathered * 3, -(-half * 4 // 3)]
    assert {each["axis"]: each["ranks"] for each in said["axes"]} == {"gradients": 4, "weights": 4, "replicas": 3}
    on = "shards=8gbit,replicas=2gbit"
    assert gradients["links"][on] == pytest.approx(3 / 4 * sent / 1e9)
    assert weights["links"][on] == pytest.approx(3 * gathered / 1e9)
    assert replicas["links"][on] == pytest.approx(2 * 2 / 3 * half / 250e6)
    said = printed("--shards", "4", *links[:2])
    for expected in ("2,410 parameters in 2 groups", "4 shards in 1 replica", "FSDP's own", "1gbit"):
        assert expected in said
    assert "allreduce" not in said


def test_each_group_has_a_size_and_a_link(planned: Any) -> None:
    sizes, links = "12,node=4,across=3", "1gbit,node=8gbit,across=2gbit"
    said = planned(TWO_LEVELS, "allreduce", "--ranks", sizes, "--link", links)
    assert said["ranks"] == {"default": 12, "node": 4, "across": 3}
    two_levels, plain = said["pipelines"]
    shard = sum(-(-numel // 4) for numel in (64 * 32, 32, 320, 10))
    node, across = 4 * 4 * shard * 2 * 3 / 4 + 4 * shard * 3, 2 * shard * 4 / 3  # gloo's reduce_scatter sends double
    assert two_levels["link_bytes"] == pytest.approx(node + across, abs=3)
    assert (two_levels["reduction"], plain["reduction"]) == (None, 1)
    seconds = [each["links"][links]["communication_seconds"] for each in (two_levels, plain)]
    assert seconds == pytest.approx([node / 1e9 + across / 250e6, 2 * 11 / 12 * 4 * PARAMETERS / 125e6])
