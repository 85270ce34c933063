"""`choose` on links that are written down, and `sync="auto"` on ranks that take theirs from a test."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fnddp
from fnddp import Link, choose
from fnddp.integrations.checkpoint import load, save
from fnddp.run import choose as choosing
from fnddp.run import engine
from fnddp.run.choose import Choice, Cost
from fnddp.simulation.ranks import RankFailed, run_threads
from tests.ranks import logged, on_ranks

PARAMS = {"w": torch.empty(2**21, device="meta"), "b": torch.empty(77, device="meta")}
SLOW, FAST = Link(1e2), Link(1e12)
FAR = "bucketize(quantize(two_shot))"  # what slow links take
SAFE = ("allreduce", "bf16(allreduce)", "bf16(two_shot)", FAR)
LOSSY = ("bucketize(quantize(two_shot, bits=4))", "error_feedback(powersgd(bf16(allreduce), rank=8))")

REAL = choosing.candidates


@pytest.fixture(autouse=True)
def _known_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose from these, whatever the study's table says today."""
    monkeypatch.setattr(choosing, "candidates", _candidates)


def _candidates(loss: str) -> tuple[str, ...]:
    return SAFE if loss == "none" else (*SAFE, *LOSSY)


def test_the_table_of_the_study() -> None:
    safe, some = REAL("none"), REAL("some")
    assert safe[0] == "allreduce"
    assert set(safe) < set(some)
    assert set(safe) <= set(choosing.CODEC_SECONDS)
    assert [repr(fnddp.parse(text)) for text in some] == [*some]


@pytest.mark.parametrize(
    ("rate", "loss", "taken"),
    [
        ("1mbit", "none", FAR),
        ("2gbit", "none", "bf16(allreduce)"),
        ("100gbit", "none", "allreduce"),
        ("1mbit", "some", LOSSY[0]),  # of leaves that are no matrices
    ],
)
def test_known_links_have_known_choices(rate: str, loss: Any, taken: str) -> None:
    assert repr(choose(PARAMS, Link.parse(rate), loss, world_size=2)) == taken


@pytest.mark.parametrize(("n", "loss"), [(2, "none"), (8, "some")])
def test_slower_links_never_take_more_bytes(n: int, loss: Any) -> None:
    taken = [choose(PARAMS, Link(1e10 / 4**i, 1e-6), loss, world_size=n) for i in range(8)]
    sent = [fnddp.lower(sync, PARAMS, world_size=n).link_bytes for sync in taken]
    assert sent == sorted(sent, reverse=True)
    assert len(set(sent)) >= 3


def test_the_plain_mean_stays_where_it_is_not_beaten_by_the_margin() -> None:
    def taken(mean: float = 0.0, bf16: float = 0.0) -> str:
        codecs = {"allreduce": mean, "bf16(allreduce)": bf16}
        return repr(choose(PARAMS, Link(1e6), world_size=2, codec_seconds=codecs, backward_seconds=0))

    wire = 1e-6  # of a byte of the plain mean
    win = wire * (0.49 - choosing.MARGIN) / choosing.SLOWDOWN
    assert taken(bf16=win) == "bf16(allreduce)"
    assert taken(bf16=win + wire * choosing.MARGIN / choosing.SLOWDOWN) == "allreduce"
    assert taken(mean=5 * wire) == "allreduce"  # no codec is faster than a copy, however it was timed


def test_the_comparison_names_the_runner_up_and_how_close_it_is() -> None:
    """Without backward the worst case is the step itself: here 100, 80 and 95 seconds."""
    plain = choosing.Cost("allreduce", 100.0, 20.0, 0.0)
    half = choosing.Cost("bf16(allreduce)", 50.0, 10.0, 30.0)
    close = choosing.Cost("fp16(allreduce)", 50.0, 10.0, 45.0)
    said = choosing.Choice((plain, close, half), backward_seconds=0.0).compared
    assert said.endswith("; runner-up: fp16(allreduce), whose worst case takes 1.19x as long")
    said = choosing.Choice((plain, close), backward_seconds=0.0).compared
    assert said.endswith("fp16(allreduce), whose worst case takes 0.95x as long, too little to leave the plain mean")
    assert "runner-up" not in choosing.Choice((plain,)).compared


def test_the_last_bucket_hides_behind_nothing() -> None:
    """Half of a model in its last bucket: with a backward that hides the rest, half of its time shows."""
    halves = {name: torch.empty(2**18, device="meta") for name in ("first", "last")}
    for leaves, shown in ((halves, 0.5), ({"all": torch.empty(2**19, device="meta")}, 1.0)):
        shares = choosing._shares(leaves, "none", 2, torch.device("meta"))
        (plain, *_) = choosing._costs(shares, Link(1e6), {})
        assert plain.step(100.0) == pytest.approx(150.0 + shown * plain.wire_seconds)


def test_a_codec_that_encodes_leaf_by_leaf_is_not_taken() -> None:
    assert repr(choose(PARAMS, SLOW, world_size=2, codec_seconds={"bf16(two_shot)": 0.0})) == "allreduce"


def test_a_backward_that_hides_the_link_keeps_the_plain_mean() -> None:
    link = Link.parse("1gbit")
    assert repr(choose(PARAMS, link, world_size=2, backward_seconds=0.0)) != "allreduce"
    assert repr(choose(PARAMS, link, world_size=2, backward_seconds=10.0)) == "allreduce"


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64])
def test_leaves_for_which_no_loss_was_measured_keep_the_plain_mean(dtype: torch.dtype) -> None:
    assert repr(choose({**PARAMS, "own": torch.empty(2, dtype=dtype)}, SLOW, world_size=2)) == "allreduce"


def test_a_module_counts_what_it_trains() -> None:
    module = nn.Sequential(nn.Linear(500, 500), nn.Linear(2, 2).double().requires_grad_(False))
    assert repr(choose(module, SLOW, world_size=2)) == FAR
    assert repr(choose(module.requires_grad_(False), SLOW, world_size=2)) == "allreduce"


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(ValueError, match='loss must be "none" or "some", got \'little\''):
        choose(PARAMS, SLOW, "little", world_size=2)  # pyright: ignore[reportArgumentType]
    for seconds in (-1, math.nan):
        with pytest.raises(ValueError, match=f"backward_seconds must be at least 0, got {seconds}"):
            choose(PARAMS, SLOW, world_size=2, backward_seconds=seconds)


# On ranks


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ranks find a slow link, in no time, and log nothing else, such as that a busy machine lowers slowly."""
    monkeypatch.setattr(choosing, "measure_link", lambda *_, **__: SLOW)
    monkeypatch.setattr(engine, "SLOW_SECONDS", math.inf)
    monkeypatch.setattr(choosing, "CALLS", 1)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(64, 33)


def _taken(_: int) -> str:
    return repr(fnddp.DistributedDataParallel(_net(), sync="auto").sync)


def _step(model: nn.Module, rank: int) -> None:
    model(torch.ones(2, 64) * (rank + 1)).sum().backward()


def test_all_ranks_take_and_log_one(slow: None, caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int) -> list[str]:
        model = fnddp.DistributedDataParallel(_net(), sync=fnddp.allreduce)
        model.sync = "auto"
        _step(model, rank)
        return [repr(model.sync), repr(model.plan and model.plan.sync)]

    assert run_threads(2, body) == [[FAR, FAR]] * 2
    (line,) = [each.getMessage() for each in caplog.records if each.name == "fnddp"]
    assert f'sync="auto" takes {FAR}, measured in ' in line
    assert ": 2 ranks, 800 bit/s, 0 s a message; " in line
    assert "allreduce 85.8 s + " in line
    assert f"of a step: {FAR} " in line
    # 1.805, rounded to either side by the measured times of encoding
    assert re.search(r"; runner-up: bf16\(allreduce\), whose worst case takes 1\.8[01]x as long\. ", line)
    assert line.endswith(f'To pin it: sync="{FAR}"')


def test_one_rank_takes_the_plain_mean_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "measured", None)
    assert _taken(0) == "allreduce"


@pytest.mark.parametrize("fails", [False, True])
def test_the_slowest_rank_counts_and_one_that_cannot_measure(fails: bool, monkeypatch, slow: None, caplog) -> None:
    def seconds(plan: fnddp.Plan, **_: int) -> tuple[float]:
        is_slow = dist.get_rank() == 1 and plan.sync != fnddp.allreduce
        if is_slow and fails:
            raise MemoryError("no room")
        return (1e3 if is_slow else 1e-6,)

    monkeypatch.setattr(choosing, "measure_segments", seconds)
    assert run_threads(2, _taken) == ["allreduce"] * 2
    assert ("rank 1 could not measure, MemoryError: no room" in caplog.text) == fails


def test_groups_of_one_pipeline_count_the_slowest_of_them() -> None:
    one, other = (Choice((Cost("allreduce", *seconds),)) for seconds in ((3.0, 1.0, 0.0), (2.0, 2.0, 0.5)))
    assert one.slowest([other]).costs == (Cost("allreduce", 3.0, 2.0, 0.5),)
    assert one.slowest([Choice()]).costs == ()


def test_ranks_that_do_not_all_ask_for_it_raise(slow: None) -> None:
    with pytest.raises(RankFailed, match="ranks disagree about"):
        run_threads(2, lambda rank: fnddp.DistributedDataParallel(_net(), sync=("auto", fnddp.allreduce)[rank]))


@pytest.mark.parametrize("text", ["autoo", "automatic", "Auto", "bf16(auto)", "bf16(autoo)"])
def test_who_writes_about_auto_is_told_what_it_is_and_needs(text: str) -> None:
    is_inside = r'"auto" cannot be part of a pipeline. .* running ranks, fnddp.choose\('
    with pytest.raises(ValueError, match=is_inside if "(" in text else r"did you mean 'auto'\?\n"):
        fnddp.DistributedDataParallel(_net(), sync=text)
    with pytest.raises(ValueError, match=r"fnddp plan auto --link 1gbit"):
        fnddp.lower(fnddp.parse("auto"), PARAMS)


def chosen_on(link: Link, kind: str, patch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A model, and what holds its pipeline, which is chosen on `link`."""
    patch.setattr(choosing, "candidates", _candidates)
    patch.setattr(choosing, "measure_link", lambda *_, **__: link)
    if kind == "register":
        model = nn.parallel.DistributedDataParallel(_net())
        return model, fnddp.register(model, "auto")
    model = fnddp.DistributedDataParallel(_net(), sync="auto")
    return model, model


def pipeline_of(holder: Any) -> str:
    return repr(holder.sync.over(None))


@pytest.mark.parametrize("kind", ["module", "register"])
@on_ranks(2)
def test_a_resumed_run_keeps_the_choice_on_another_link(rank: int, kind: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        made = [chosen_on(link, kind, patch) for link in (SLOW, FAST, FAST, FAST)]
    (model, holder), (resumed, other), (measured, _), (loaded, _) = made
    assert (pipeline_of(holder), pipeline_of(other)) == (FAR, "allreduce")
    _step(torch.compile(model, backend="eager"), rank)
    save(tmp_path / "dcp", model, sync=holder)
    with logged() as lines:
        load(tmp_path / "dcp", resumed, sync=other)
    assert pipeline_of(other) == FAR
    said = [f'sync="auto" continues with {FAR}, which was set or loaded, instead of allreduce'] * (rank == 0)
    assert lines == said
    _step(resumed, rank)
    assert all(map(torch.equal, *([p.grad for p in each.parameters()] for each in (resumed, model))))
    if kind == "module":
        with logged() as lines:
            measured.sync = FAR
        assert lines == said
        named = fnddp.DistributedDataParallel(_net(), sync=fnddp.allreduce)
        for each in (loaded, named):
            each.load_state_dict(model.state_dict(sync_state=True))
        assert (pipeline_of(loaded), pipeline_of(named)) == (FAR, "allreduce")


@pytest.mark.parametrize("loads", [(0,), (0, 1)], ids=["one rank loads", "another file for each rank"])
@pytest.mark.parametrize("kind", ["module", "register"])
@on_ranks(2)
def test_ranks_that_load_other_choices_raise_before_they_send(rank: int, kind: str, loads: tuple[int, ...]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        model, holder = chosen_on(FAST, kind, patch)
    checkpoint = holder.sync_checkpoint()
    if rank in loads:
        text = "bf16(allreduce)" if rank == 0 else "fp16(allreduce)"
        checkpoint.adopt_pipeline({key: text for key in checkpoint.about() if key.endswith("pipeline")})
    other = "fp16(allreduce)" if 1 in loads else "allreduce"
    for _ in range(2):  # in each forward: no step begins
        with pytest.raises(fnddp.RankMismatchError, match=re.escape(f"rank 0: bf16(allreduce); rank 1: {other}")):
            _step(model, rank)
    assert pipeline_of(holder) == ("bf16(allreduce)" if rank == 0 else other)
