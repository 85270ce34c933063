"""`fnddp tune`: who wins, by outcomes made up here; and the whole of it, on few virtual ranks for a few steps."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fnddp
from fnddp import Compute, Link, parse
from fnddp.cli import main, models, picture, tune_report
from fnddp.cost.estimate import MeanStepCost, Span, StepCost
from fnddp.run import choose as choosing
from fnddp.run.hops import several
from fnddp.simulation import tune as simulated
from fnddp.simulation.ranks import run_threads
from fnddp.simulation.tune import MEAN, SIXTEEN_BITS, Gap, Outcome, Tuned, final_loss, tune
from tests import workloads
from tests.hosts import complaints
from tests.workloads import SMALL


def outcome(pipeline: str, seconds: float, *losses: float) -> Outcome:
    step = StepCost((Span("forward", 0, 0.0, seconds),), Compute(seconds), (), 0.0, 0.0)
    return Outcome(pipeline, 1000, 1000, MeanStepCost(((step, 1),)), losses)


def tuned(*outcomes: Outcome, within: float = 0.01, **options: Any) -> Tuned:
    return Tuned(tuple(sorted(outcomes, key=lambda each: each.seconds)), Compute(), within, **options)


EXACT, HALF = outcome(MEAN, 1.0, 2.0, 2.1, 1.9), outcome("bf16(allreduce)", 0.6, 2.001, 2.099, 1.9)
ROUGH, LATE = replace(HALF, losses=(3.0, 3.1, 2.9)), outcome("fp16(allreduce)", 1.01, 2.0, 2.1, 1.9)
GOOD, BAD = outcome("good", 0.3, 2.002, 2.103, 1.901), outcome("bad", 0.1, 2.1, 2.2, 2.01)
UNCLEAR = outcome("unclear", 0.2, 2.012, 2.1, 1.9)
HARDLY = replace(HALF, pipeline="hardly faster", step=outcome("", 0.55).step)
DIVERGED = outcome("diverged", 0.1, float("nan"), 2.0, 1.9)
SETTING = {"model": "model", "data": "data", "link": "1gbit", "ranks": 2, "steps": 6, "seeds": 2}


@pytest.mark.parametrize(
    ("others", "verdict"),
    [
        ([HALF, GOOD, BAD], "good: 3.33x as fast as the plain mean, 2.00x as bf16(allreduce)"),
        ([HALF, DIVERGED], "Nothing beats a 16-bit wire: bf16(allreduce): 1.67x as fast as the plain mean"),
        ([HALF, HARDLY], "Nothing beats a 16-bit wire: bf16(allreduce): 1.67x as fast as the plain mean"),
        ([ROUGH], "Nothing beats the plain mean: allreduce"),
        ([ROUGH, GOOD], "good: 3.33x as fast as the plain mean"),
        ([LATE], "Nothing beats the plain mean: allreduce"),
    ],
)
def test_the_fastest_that_surely_loses_as_little_wins(others: list[Outcome], verdict: str) -> None:
    """Seeds move the plain mean's loss by more than what is allowed: they do not, where they are paired."""
    found = tuned(EXACT, *others)
    assert found.verdict == verdict
    assert found.winner is not None
    assert found.winner.pipeline in verdict
    assert found.doubt is None


def test_where_seeds_cannot_tell_nothing_wins_and_it_says_how_many_could() -> None:
    found = tuned(EXACT, HALF, GOOD, UNCLEAR)
    assert found.unclear == (UNCLEAR,)
    assert found.winner is None
    assert found.verdict == (
        "Undecided: 3 seeds cannot tell whether the loss of unclear is within 0.01 of that of the plain mean; "
        "raise --seeds to 8"
    )
    assert tuned(EXACT, replace(UNCLEAR, step=GOOD.step), replace(GOOD, step=UNCLEAR.step)).winner is not None  # slower
    assert tuned(EXACT, HALF, replace(UNCLEAR, step=EXACT.step), chosen="unclear").winner is None  # what auto takes
    one = [replace(each, losses=each.losses[:1]) for each in (EXACT, GOOD)]
    assert str(tuned(*one).doubt).endswith("raise --seeds to 3")
    near = replace(GOOD, losses=tuple(loss + 0.01 for loss in GOOD.losses))
    assert "double --steps" in str(tuned(EXACT, replace(near, losses=(2.0109, 2.11, 1.9091))).doubt)


def test_the_number_of_seeds_that_would_tell_does() -> None:
    gap = Gap((0.012, 0.0, 0.0))
    assert gap.seeds_to_tell(0.01) == 8
    assert not gap.is_within(0.01)
    assert not gap.is_above(0.01)
    assert Gap(gap.gaps * 3).is_within(0.01)
    assert Gap((0.0111, 0.0112, 0.0113)).is_above(0.01)


def test_of_about_equal_ones_what_auto_takes_wins() -> None:
    as_fast = replace(GOOD, pipeline="auto's", step=outcome("", 0.32).step)
    found = tuned(EXACT, GOOD, as_fast, chosen="auto's")
    assert found.winner is as_fast
    assert found.notes == ['sync="auto" takes auto\'s on this link, too']
    assert tuned(EXACT, BAD, GOOD, chosen="bad").notes == [
        'sync="auto" takes bad on this link, which ends 0.103 above the plain mean here'
    ]


def test_what_may_not_win_is_named_after_what_does() -> None:
    found = tuned(EXACT, HALF, GOOD, chosen="bf16(allreduce)", among=("allreduce", "bf16(allreduce)"))
    assert found.winner is HALF
    assert found.notes[1].startswith("For this model only, good loses as little, 2.00x as fast as bf16(allreduce)")


def test_a_front_and_how_much_worse_is_good_enough() -> None:
    found = tuned(EXACT, HALF, GOOD, BAD)
    assert found.pareto == (BAD, GOOD, HALF)
    assert replace(found, within=0.2).winner is BAD


@pytest.mark.parametrize("within", [0.0, 0.01])
def test_nothing_wins_where_the_plain_mean_diverged(within: float, tmp_path: Path) -> None:
    for others in (HALF, replace(HALF, losses=(float("nan"),) * 3)):
        found = tuned(replace(EXACT, losses=(float("nan"), 2.0, 2.0)), others, within=within)
        assert (found.good, found.winner) == ((), None)
        assert found.verdict == "Undecided: training with the plain mean diverged; lower --rate"
        plot = partial(tune_report.plot, found, SETTING)
        picture.write(tmp_path, tune_report.PLOT, plot, tune_report.as_json(found, SETTING))
        assert json.loads((tmp_path / "results.json").read_text())["winner"] is None


def test_no_bytes_of_one_rank_and_losses_below_zero_are_plotted(tmp_path: Path) -> None:
    one = tune_report.plot(tuned(replace(EXACT, link_bytes=0), replace(HALF, link_bytes=0)), {**SETTING, "ranks": 1})
    assert [axes.get_xscale() for axes in one.axes] == ["log", "linear"]
    below = tune_report.plot(tuned(replace(EXACT, losses=(-1.0, 0.5, -2.0)), HALF), SETTING)
    assert [axes.get_yscale() for axes in below.axes] == ["linear", "linear"]
    for figure in (one, below):
        figure.savefig(tmp_path / "plot.svg")


def test_losses_that_differ_by_roundings_are_equal() -> None:
    rounded = replace(EXACT, losses=tuple(loss - 1e-7 for loss in EXACT.losses))
    assert tuned(rounded, HALF).pareto == (HALF,)
    found = outcome("x", 1.0, 1.0, 3.0, 2.0)
    assert (found.loss, found.spread) == (2.0, 1.0)
    assert outcome("x", 1.0, float("nan")).loss == outcome("x", 1.0, float("inf"), 1.0).spread == float("inf")


PROBLEM = replace(workloads.own_problem(), optimizer=partial(torch.optim.SGD, lr=0.1))


def test_the_simulated_loss_is_that_of_real_ranks() -> None:
    n, steps, sync = 3, 6, parse("error_feedback(sign(allgather))")
    model = PROBLEM.make(5)  # here: ranks that are threads share torch's generator

    def train(rank: int) -> list[float]:
        params = simulated.trained(model)
        step = fnddp.value_and_grad(PROBLEM.loss_of(model), sync)
        state, losses = sync.init(params), []
        for batch in PROBLEM.batches(n, 5, steps):
            loss, grads, state = step(params, state, *(part[rank] for part in batch))
            params = {name: param - 0.1 * grads[name] for name, param in params.items()}
            losses.append(loss.item())
        return losses

    last = [losses[-1] for losses in run_threads(n, train)]
    assert final_loss(PROBLEM, sync, n, 5, steps) == pytest.approx(sum(last) / n, rel=1e-4)


def test_tune_trains_and_costs_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "candidates", lambda _: (MEAN, "bf16(allreduce)", "bucketize(sign(allgather))"))
    seen: list[tuple[str, int, int]] = []
    known: list[tuple[Tuned, int]] = []
    found = tune(
        PROBLEM,
        ["sign(allgather)", "sign( allgather )", "fp16(allreduce)"],
        link=Link.parse("1kbit"),
        ranks=4,
        steps=3,
        seeds=(0, 1),
        tell=lambda *at: seen.append(at),
        found=lambda *at: known.append(at),
    )
    assert [n for _, n in known] == [1, 2]
    assert [each.losses for each in known[0][0].outcomes] == [each.losses[:1] for each in found.outcomes]
    assert known[1][0] == found
    assert {each.pipeline for each in found.outcomes} == {MEAN, *SIXTEEN_BITS, "sign(allgather)"}
    timed = [(f"timing {text}", i, 5) for i, text in enumerate((MEAN, *SIXTEEN_BITS, "sign(allgather)"))]
    assert seen[:6] == [("timing forward and backward", 0, 5), *timed]
    assert [at for _, *at in seen[6:]] == [[done, 30] for done in range(30)]
    assert seen[-1][0] == "training sign(allgather), seed 1"
    assert [each.seconds for each in found.outcomes] == sorted(each.seconds for each in found.outcomes)
    by_name = {each.pipeline: each for each in found.outcomes}
    plain, gathered = by_name[MEAN], by_name["sign(allgather)"]
    assert (plain.wire_bytes, plain.link_bytes) == (84, 126)  # 21 numbers; 2 * 3/4 of them on the link
    assert gathered.link_bytes == 3 * gathered.wire_bytes
    assert all(len(each.losses) == 2 for each in found.outcomes)
    assert plain.losses[0] != plain.losses[1]
    assert found.chosen == "bf16(allreduce)"  # the fastest of those that are safe and tried
    assert by_name["bf16(two_shot)"].loss == pytest.approx(plain.loss, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": ()}, "tune: seeds must name at least one seed"),
        ({"steps": 0}, "tune: steps and ranks must be at least 1, got 0 and 2"),
        ({"within": -0.1}, "within must be 0 or a positive number"),
        ({"pipelines": ["none"]}, "tune: none exchanges nothing"),
        ({"pipelines": ["warmup(fp16(allreduce), steps=2)"]}, "warms up for 2 steps, so a training"),
        ({"pipelines": ["all_reduce('node')"]}, "tune: .* reduces over process group 'node', but tune's virtual ranks"),
    ],
)
def test_wrong_calls(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune(PROBLEM, **{"pipelines": [], "link": Link.parse("1gbit"), "ranks": 2, "steps": 2, **options})


def test_a_model_is_judged_in_eval_mode() -> None:
    def is_equal(forward: Any) -> float:
        return float(forward(torch.ones(64, 20)).unique().numel() == 1)  # dropout would have made zeros

    dropping = replace(PROBLEM, build=lambda: nn.Sequential(nn.Linear(20, 1), nn.Dropout(0.5)), quality=is_equal)
    assert final_loss(dropping, parse("allreduce"), 2, 0, 1) == 1


def test_behind_a_momentum_that_all_share_the_optimizer_has_none() -> None:
    sgd = replace(PROBLEM, optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.5))
    losses = [final_loss(sgd, parse(text), 2, 0, 6) for text in (MEAN, f"shared_momentum({MEAN}, beta=0.5)")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tune", "--model", SMALL, "--ranks", "2", "--steps", "2", "--seeds", "2", "--link", "1mbit:1ms"]
    arguments += ["sign(allgather)", "--within", "5%", "--out", str(tmp_path / "out")]
    assert main.main(arguments) == 0
    said, errors = capsys.readouterr()
    assert complaints(errors) == []
    setting = f"{SMALL} on its own batches, 2 virtual ranks, 2 steps, 2 seeds; link 1mbit:1ms"
    for expected in (setting, "above", 'sync="auto" takes', "by one rank alone, on one core"):
        assert expected in said
    assert (tmp_path / "out" / "pareto.svg").stat().st_size > 10_000
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results["pipelines"]) == 6  # with what auto takes
    assert results["verdict"] in said
    assert results["within"] > 0
    assert results["one_batch"]
    assert f"since {SMALL} returns one" in " ".join(said.split())


def test_a_command_that_is_interrupted_keeps_the_seeds_that_are_done(tmp_path, monkeypatch) -> None:
    train = simulated.final_loss

    def interrupted(problem: Any, sync: Any, n: int, seed: int, *more: Any) -> float:
        if seed == 1:
            raise KeyboardInterrupt
        return train(problem, sync, n, seed, *more)

    monkeypatch.setattr(simulated, "final_loss", interrupted)
    main.main(["tune", "--model", SMALL, "--ranks", "2", "--steps", "2", "--seeds", "3", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["seeds"] == 1
    assert all(len(each["losses"]) == 1 for each in results["pipelines"])


@pytest.mark.parametrize(
    ("model", "data"), [("digits", None), (SMALL, "own"), ("transformer", "text"), ("transformer", None)]
)
def test_problems_have_a_row_for_each_rank(model: str, data: str | None) -> None:
    problem = models.to_tune(model, data, batch=2, ranks=3, steps=3, rate=None)
    batches, again = ([*problem.batches(3, 0, 2)] for _ in range(2))
    assert len(batches) == 2
    assert all(part.shape[0] == 3 for batch in batches for part in batch)
    assert all(map(torch.equal, batches[1], again[1]))
    assert models.has_one_batch(problem) == (model == SMALL)


def test_learning_rates_fall() -> None:
    weight, rates = torch.zeros(1), list[float]()
    (optimizer,) = several(models.to_tune("digits", None, batch=2, ranks=2, steps=4, rate=0.5).optimizer([weight]))
    weight.grad = torch.ones(1)
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[-1]) == (0.5, pytest.approx(0.005))
