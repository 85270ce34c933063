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
from fnddp.cli.models import to_tune as asked
from fnddp.cost.estimate import MeanStepCost, Span, StepCost
from fnddp.run import choose as choosing
from fnddp.simulation.ranks import run_threads
from fnddp.simulation.tune import CANDIDATES, MEAN, SIXTEEN_BITS, Outcome, Problem, Tuned, final_loss, trained, tune
from tests.workloads import SMALL


def outcome(pipeline: str, seconds: float, *losses: float) -> Outcome:
    step = StepCost((Span("forward", 0, 0.0, seconds),), Compute(seconds), (), 0.0, 0.0)
    return Outcome(pipeline, 1000, 1000, MeanStepCost(((step, 1),)), losses)


def tuned(*outcomes: Outcome, within: float = 0.01) -> Tuned:
    return Tuned(tuple(sorted(outcomes, key=lambda each: each.seconds)), Compute(), within)


EXACT, HALF = outcome(MEAN, 1.0, 2.0, 2.0), outcome("bf16(allreduce)", 0.6, 2.0, 2.0)
ROUGH, LATE = replace(HALF, losses=(3.0, 3.0)), outcome("fp16(allreduce)", 1.01, 2.0, 2.0)
BETTER, DIVERGED = outcome("better", 0.5, 2.0), outcome("diverged", 0.1, float("nan"), 2.0)


@pytest.mark.parametrize(
    ("others", "verdict"),
    [
        ([HALF, outcome("good", 0.3, 2.01), outcome("bad", 0.1, 2.1)], "good: 2.00x as fast as bf16(allreduce)"),
        ([HALF, DIVERGED, outcome("slow", 0.7, 1.0)], "Nothing beats a 16-bit wire: bf16(allreduce)"),
        ([HALF, outcome("hardly faster", 0.595, 2.0)], "Nothing beats a 16-bit wire: bf16(allreduce)"),
        ([ROUGH], "Nothing beats the plain mean: allreduce"),
        ([ROUGH, BETTER], "better: 2.00x as fast as allreduce; no 16-bit wire is good enough"),
        ([LATE, outcome("hardly", 0.99, 2.0)], "Nothing beats the plain mean: allreduce"),
        ([LATE, BETTER], "better: 2.00x as fast as allreduce"),
    ],
)
def test_the_fastest_that_is_good_enough_wins(others: list[Outcome], verdict: str) -> None:
    found = tuned(EXACT, *others)
    assert found.verdict == verdict
    assert found.winner.pipeline == verdict.partition(": ")[0 if "as fast as" in verdict else 2]
    assert found.doubt is None


def test_a_front_and_how_much_worse_is_good_enough() -> None:
    good, bad = outcome("good", 0.3, 2.01, 2.01), outcome("bad", 0.1, 2.1, 2.1)
    found = tuned(EXACT, HALF, good, bad)
    assert found.pareto == (bad, good, HALF)
    assert replace(found, within=0.1).winner is bad


@pytest.mark.parametrize("within", [0.0, 0.01])
def test_nothing_wins_where_the_plain_mean_diverged(within: float, tmp_path: Path) -> None:
    setting = {"model": "model", "data": "data", "link": "1gbit", "ranks": 2, "steps": 6, "seeds": 2}
    for others in (HALF, replace(HALF, losses=(float("nan"),) * 2)):
        found = tuned(replace(EXACT, losses=(float("nan"), 2.0)), others, within=within)
        assert found.good == ()
        assert found.verdict == "No winner: there is no loss to compare with"
        assert found.doubt == "the plain mean itself diverged: lower the learning rate"
        plot = partial(tune_report.plot, found, setting)
        picture.write(tmp_path, tune_report.PLOT, plot, tune_report.as_json(found, setting))
        said = json.loads((tmp_path / "results.json").read_text())
        assert (said["winner"], said["threshold"]) == (None, None)


def test_losses_that_do_not_distinguish_pipelines_are_doubted() -> None:
    exact = tuned(EXACT, replace(HALF, losses=(2.0, 2.0001)), within=0.0)
    assert (exact.good, exact.doubt) == ((EXACT,), None)
    assert tuned(replace(EXACT, losses=(1.9, 2.1))).doubt == (
        "seeds alone move the plain mean's loss by 5.0%, more than 1.0%"
    )
    assert (
        tuned(replace(EXACT, losses=(2.0,))).doubt
        == "one seed does not show how far seeds alone move the loss: give at least two"
    )
    rounded = replace(EXACT, losses=(2.0 - 1e-7,) * 2)
    assert tuned(rounded, HALF).pareto == (HALF,)
    found = outcome("x", 1.0, 1.0, 3.0, 2.0)
    assert (found.loss, found.spread) == (2.0, 1.0)
    assert outcome("x", 1.0, float("nan")).loss == outcome("x", 1.0, float("inf"), 1.0).spread == float("inf")


def line_problem() -> Problem:

    def batch(rank: int, n: int, generator: torch.Generator):
        x = torch.randn(4, 3, generator=generator)
        return x, x @ torch.tensor([[1.0], [-2.0], [3.0]])

    return Problem(
        partial(nn.Linear, 3, 1),
        lambda forward, batch: (forward(batch[0]) - batch[1]).square().mean(),
        batch,
        partial(torch.optim.SGD, lr=0.1),
    )


@pytest.mark.parametrize("text", ["allreduce", "error_feedback(sign(allgather))"])
def test_the_simulated_loss_is_that_of_real_ranks(text: str) -> None:
    problem, n, steps = line_problem(), 3, 6
    model = problem.make(5)  # here: ranks that are threads share torch's generator

    def train(rank: int) -> list[float]:
        params = trained(model)
        step = fnddp.value_and_grad(problem.loss_of(model), parse(text))
        state, losses = parse(text).init(params), []
        for batch in problem.batches(n, 5, steps):
            loss, grads, state = step(params, state, *(part[rank] for part in batch))
            params = {name: param - 0.1 * grads[name] for name, param in params.items()}
            losses.append(loss.item())
        return losses

    last = [losses[-1] for losses in run_threads(n, train)]
    assert final_loss(problem, parse(text), n, 5, steps) == pytest.approx(sum(last) / n, rel=1e-4)


def test_tune_trains_and_costs_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "candidates", lambda _: (MEAN, "bf16(allreduce)", "bucketize(sign(allgather))"))
    seen: list[tuple[str, int, int]] = []
    found = tune(
        line_problem(),
        ["sign(allgather)", "sign( allgather )", "fp16(allreduce)"],
        link=Link.parse("1kbit"),
        ranks=4,
        steps=3,
        seeds=(0, 1),
        tell=lambda *at: seen.append(at),
    )
    assert {each.pipeline for each in found.outcomes} == {MEAN, *SIXTEEN_BITS, "sign(allgather)"}
    timed = [(f"timing {text}", i, 5) for i, text in enumerate((MEAN, *SIXTEEN_BITS, "sign(allgather)"))]
    assert seen[:6] == [("timing forward and backward", 0, 5), *timed]
    assert [at for _, *at in seen[6:]] == [[done, 30] for done in range(30)]
    assert seen[-1][0] == "training sign(allgather), seed 1"
    assert [each.seconds for each in found.outcomes] == sorted(each.seconds for each in found.outcomes)
    by_name = {each.pipeline: each for each in found.outcomes}
    plain, gathered = by_name[MEAN], by_name["sign(allgather)"]
    assert (plain.wire_bytes, plain.link_bytes) == (16, 24)  # 4 numbers; 2 * 3/4 of them on the link
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
        ({"within": -0.1}, "tune: within must be 0 or more"),
        ({"pipelines": ["none"]}, "tune: none exchanges nothing"),
        ({"pipelines": ["all_reduce('node')"]}, "tune: .* reduces over process group 'node', but tune's virtual ranks"),
    ],
)
def test_wrong_calls(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune(line_problem(), **{"pipelines": [], "link": Link.parse("1gbit"), "ranks": 2, "steps": 2, **options})


def test_a_model_is_judged_in_eval_mode() -> None:
    judged: list[torch.Tensor] = []

    def quality(forward: Any) -> float:
        judged.append(forward(torch.ones(64, 3)))
        return judged[-1].mean().item()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5))

    final_loss(replace(line_problem(), build=build, quality=quality), parse("allreduce"), 2, 0, 1)
    assert judged[0].unique().numel() == 1  # dropout would have made zeros


def test_behind_a_momentum_that_all_share_the_optimizer_has_none() -> None:
    sgd = replace(line_problem(), optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.5))
    losses = [final_loss(sgd, parse(text), 2, 0, 6) for text in (MEAN, f"shared_momentum({MEAN}, beta=0.5)")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_candidates_are_pipelines() -> None:
    parameters = models.parameters("transformer")
    for text in (MEAN, *SIXTEEN_BITS, *CANDIDATES):
        parse(text).init(parameters)
    assert [repr(parse(text)) for text in (MEAN, *SIXTEEN_BITS)] == [MEAN, *SIXTEEN_BITS]  # outcomes go by these


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tune", "--model", SMALL, "--ranks", "2", "--steps", "2", "--seeds", "2", "--link", "1mbit:1ms"]
    arguments += ["--pipelines", "sign(allgather)", "--within", "5%", "--out", str(tmp_path / "out")]
    assert main.main(arguments) == 0
    said, errors = capsys.readouterr()
    assert errors == ""
    for expected in (
        f"{SMALL} on its own batches, 2 virtual ranks, 2 steps, 2 seeds; link 1mbit:1ms",
        "spread",
        "by one rank alone, on one core",
    ):
        assert expected in said
    assert (tmp_path / "out" / "pareto.svg").stat().st_size > 10_000
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results["pipelines"]) == 5
    assert results["verdict"] in said
    assert results["within"] == 0.05


def test_problems_have_a_row_for_each_rank() -> None:
    for model, data in (("digits", None), (SMALL, "own"), ("transformer", "text"), ("transformer", None)):
        problem = asked(model, data, batch=2, ranks=3, steps=3, rate=None)
        batches = list(problem.batches(3, 0, 2))
        assert len(batches) == 2
        assert all(part.shape[0] == 3 for batch in batches for part in batch)
        again = list(problem.batches(3, 0, 2))
        assert all(torch.equal(a, b) for a, b in zip(batches[1], again[1], strict=True))


def test_learning_rates_fall() -> None:
    weight, rates = torch.zeros(1), list[float]()
    optimizer = asked("digits", None, batch=2, ranks=2, steps=4, rate=0.5).optimizer([weight])
    weight.grad = torch.ones(1)
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[-1]) == (0.5, pytest.approx(0.005))
