"""`fnddp tune`: who wins, by outcomes made up here; and the whole of it, on few virtual ranks for a few steps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fnddp
from fnddp import Compute, Link, parse
from fnddp.cli import main, models, tune_report
from fnddp.cli.failures import WrongArgument
from fnddp.cli.problem import problem as asked
from fnddp.cli.tune_report import Setting
from fnddp.cost.step import MeanStep, Span, Step
from fnddp.simulate.ranks import run_threads
from fnddp.simulate.tune import CANDIDATES, MEAN, SIXTEEN_BITS, Outcome, Problem, Tuned, cost, final_loss, tune

MODELS = """
import torch
from torch import nn

def own():
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, torch.randn(5, 6, generator=torch.Generator().manual_seed(0)), lambda y: y.square().mean()

def normalized():
    return nn.Sequential(nn.Linear(64, 10), nn.BatchNorm1d(10))
"""


def outcome(pipeline: str, seconds: float, *losses: float) -> Outcome:
    step = Step((Span("forward", 0, 0.0, seconds),), Compute(seconds), (), 0.0, 0.0)
    return Outcome(pipeline, 1000, 1000, MeanStep(((step, 1),)), losses)


def tuned(*outcomes: Outcome, within: float = 0.01) -> Tuned:
    return Tuned(tuple(sorted(outcomes, key=lambda each: each.seconds)), Compute(), within)


EXACT, HALF = outcome(MEAN, 1.0, 2.0, 2.0), outcome("bf16(allreduce)", 0.6, 2.0, 2.0)


def test_the_fastest_of_what_is_good_enough_wins() -> None:
    good, bad = outcome("good", 0.3, 2.01, 2.01), outcome("bad", 0.1, 2.1, 2.1)
    found = tuned(EXACT, HALF, good, bad)
    assert found.winner is good
    assert found.verdict == "good: 2.00x as fast as bf16(allreduce)"
    assert found.pareto == (bad, good, HALF)
    assert replace(found, within=0.1).winner is bad
    assert found.doubt is None


@pytest.mark.parametrize("others", [(), (outcome("slow", 0.7, 1.0),), (outcome("hardly faster", 0.595, 2.0),)])
def test_nothing_beats_a_16_bit_wire(others: tuple[Outcome, ...]) -> None:
    found = tuned(EXACT, HALF, outcome("diverged", 0.1, float("nan"), 2.0), *others)
    assert found.winner is HALF
    assert found.verdict == "Nothing beats a 16-bit wire: bf16(allreduce)"


def test_where_no_16_bit_wire_is_good_enough() -> None:
    rough = replace(HALF, losses=(3.0, 3.0))
    assert tuned(EXACT, rough).verdict == "Nothing beats the plain mean: allreduce"
    better = tuned(EXACT, rough, outcome("better", 0.5, 2.0))
    assert better.verdict == "better: 2.00x as fast as allreduce; no 16-bit wire is good enough"


def test_a_16_bit_wire_wins_only_where_it_is_faster() -> None:
    found = tuned(EXACT, outcome("fp16(allreduce)", 1.01, 2.0, 2.0), outcome("hardly", 0.99, 2.0, 2.0))
    assert found.winner is EXACT
    assert found.verdict == "Nothing beats the plain mean: allreduce"
    faster = tuned(EXACT, outcome("fp16(allreduce)", 1.01, 2.0, 2.0), outcome("better", 0.5, 2.0, 2.0))
    assert faster.verdict == "better: 2.00x as fast as allreduce"


@pytest.mark.parametrize("within", [0.0, 0.01])
def test_nothing_wins_where_the_plain_mean_diverged(within: float) -> None:
    setting = Setting("model", "data", "1gbit", 2, 6, 2, 8)
    for others in (HALF, replace(HALF, losses=(float("nan"),) * 2)):
        found = tuned(replace(EXACT, losses=(float("nan"), 2.0)), others, within=within)
        assert found.good == ()
        assert found.verdict == "No winner: there is no loss to compare with"
        assert found.doubt == "the plain mean itself diverged: lower the learning rate"
        said = json.loads(json.dumps(tune_report.as_json(found, setting), allow_nan=False))
        assert (said["winner"], said["threshold"]) == (None, None)
        tune_report.plot(found, setting).canvas.draw()


def test_no_worse_at_all_can_be_asked_for() -> None:
    found = tuned(EXACT, replace(HALF, losses=(2.0, 2.0001)), within=0.0)
    assert found.good == (EXACT,)
    assert found.doubt is None


def test_losses_that_seeds_move_are_doubted() -> None:
    assert tuned(replace(EXACT, losses=(1.9, 2.1))).doubt == (
        "seeds alone move the plain mean's loss by 5.0%, more than 1.0%"
    )
    assert tuned(replace(EXACT, losses=(2.0,))).doubt == "one seed says nothing of the spread: give more"


def test_rounding_makes_no_front() -> None:
    dust = replace(EXACT, losses=(2.0 - 1e-7,) * 2)
    assert tuned(dust, HALF).pareto == (HALF,)


def test_a_spread_is_half_of_what_lies_between_seeds() -> None:
    found = outcome("x", 1.0, 1.0, 3.0, 2.0)
    assert (found.loss, found.spread) == (2.0, 1.0)
    assert outcome("x", 1.0, float("nan")).loss == outcome("x", 1.0, float("inf"), 1.0).spread == float("inf")


def line_problem() -> Problem:
    """A line through points without noise."""

    def batches(n: int, seed: int, steps: int):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            x = torch.randn(n, 4, 3, generator=generator)
            yield x, x @ torch.tensor([[1.0], [-2.0], [3.0]])

    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Linear(3, 1)

    return Problem(
        make,
        lambda forward, batch: (forward(batch[0]) - batch[1]).square().mean(),
        batches,
        lambda params: torch.optim.SGD(params, lr=0.1),
    )


@pytest.mark.parametrize("text", ["allreduce", "error_feedback(sign(allgather))"])
def test_the_simulated_loss_is_that_of_real_ranks(text: str) -> None:
    problem, n, steps = line_problem(), 3, 6
    model = problem.make(5)  # here: ranks that are threads share torch's generator

    def train(rank: int) -> list[float]:
        params = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        step = fnddp.value_and_grad(
            lambda params, *batch: problem.loss(lambda x: torch.func.functional_call(model, params, x), batch),
            parse(text),
        )
        state, losses = parse(text).init(params), []
        for batch in problem.batches(n, 5, steps):
            loss, grads, state = step(params, state, *(part[rank] for part in batch))
            params = {name: param - 0.1 * grads[name] for name, param in params.items()}
            losses.append(loss.item())
        return losses

    last = [losses[-1] for losses in run_threads(n, train)]
    assert final_loss(problem, parse(text), n, 5, steps) == pytest.approx(sum(last) / n, rel=1e-4)


def test_tune_trains_and_costs_everything_once() -> None:
    seen: list[tuple[int, int]] = []
    found = tune(
        line_problem(),
        ["sign(allgather)", "sign( allgather )", "fp16(allreduce)"],
        link=Link.parse("1mbit"),
        ranks=4,
        steps=3,
        seeds=(0, 1),
        tell=lambda at: seen.append((at.done, at.of)),
    )
    assert {each.pipeline for each in found.outcomes} == {MEAN, *SIXTEEN_BITS, "sign(allgather)"}
    assert seen[-1] == (10, 10)
    assert [each.seconds for each in found.outcomes] == sorted(each.seconds for each in found.outcomes)
    by_name = {each.pipeline: each for each in found.outcomes}
    plain, gathered = by_name[MEAN], by_name["sign(allgather)"]
    assert (plain.wire_bytes, plain.link_bytes) == (16, 24)  # 4 numbers; 2 * 3/4 of them on the link
    assert gathered.link_bytes == 3 * gathered.wire_bytes
    assert all(len(each.losses) == 2 for each in found.outcomes)
    assert plain.losses[0] != plain.losses[1]
    assert by_name["bf16(two_shot)"].loss == pytest.approx(plain.loss, rel=0.05)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("error_feedback(every(10, allreduce))", [0] * 9 + [400_000]),
        ("measure(allreduce)", [800_000]),
        ("measure(allreduce, every_steps=2)", [800_000, 400_000]),
        ("powersgd(allreduce, refresh=3)", [400_000, 4_400, 4_400]),
        ("powersgd(allreduce, alternate=True)", [4_000, 400]),
        ("warmup(every(2, fp16(allreduce)), steps=10000)", [0, 200_000]),
    ],
)
def test_a_step_costs_the_mean_over_what_is_repeated(text: str, steps: list[int]) -> None:
    found = cost(parse(text), {"w": torch.zeros(1000, 100)}, Link.parse("1gbit"), 4, Compute(1.0, 1.0, {"w": 1.0}), 25)
    assert found.wire_bytes == round(sum(steps) / len(steps))
    assert found.link_bytes == pytest.approx(1.5 * found.wire_bytes, abs=4)
    assert found.step.communication_seconds == pytest.approx(found.link_bytes / 125e6, rel=1e-3)
    assert found.step.exposed_seconds == pytest.approx(found.step.communication_seconds)
    assert 2 + found.step.exposed_seconds <= found.seconds < 4  # with encoding and decoding, measured here
    for (step, _), size in zip(found.step.steps, dict.fromkeys(steps), strict=True):
        assert sum(each.wire_bytes for each in step.collectives) == size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": ()}, "tune: seeds must name at least one seed"),
        ({"steps": 0}, "tune: steps and ranks must be at least 1, got 0 and 2"),
        ({"ranks": 0}, "tune: steps and ranks must be at least 1, got 2 and 0"),
        ({"within": -0.1}, "tune: within must be 0 or more"),
        ({"within": float("nan")}, "tune: within must be 0 or more"),
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

    def make(seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5))

    final_loss(replace(line_problem(), make=make, quality=quality), parse("allreduce"), 2, 0, 1)
    assert judged[0].unique().numel() == 1  # dropout would have made zeros


def test_candidates_are_pipelines() -> None:
    parameters = models.load("transformer").parameters()
    for text in (MEAN, *SIXTEEN_BITS, *CANDIDATES):
        parse(text).init(parameters)
    assert [repr(parse(text)) for text in (MEAN, *SIXTEEN_BITS)] == [MEAN, *SIXTEEN_BITS]  # outcomes go by these


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tuned_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_command(own_models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tune", "--model", "tuned_models:own", "--ranks", "2", "--steps", "2", "--seeds", "2"]
    arguments += ["--pipelines", "sign(allgather)", "--link", "1mbit:1ms", "--within", "5%", "--out"]
    assert main.main([*arguments, str(own_models / "out")]) == 0
    said, errors = capsys.readouterr()
    assert errors == ""
    for expected in (
        "tuned_models:own on its own batches, 2 virtual ranks, 2 steps, 2 seeds; link 1mbit:1ms",
        "spread",
        "by one rank alone, on one core",
    ):
        assert expected in said
    assert (own_models / "out" / "pareto.svg").stat().st_size > 10_000
    results = json.loads((own_models / "out" / "results.json").read_text())
    assert len(results["pipelines"]) == 5
    assert results["verdict"] in said
    assert results["within"] == 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pipelines", "fp16(allreduc)"], "parse: unknown name 'allreduc'"),
        (["--link", "100mbps"], "--link: '100mbps' is no link"),
        (["--model", "gpt5"], "unknown model 'gpt5'"),
        (["--model", "no_such_module:fn"], "cannot import no_such_module: ModuleNotFoundError"),
        (["--model", "digits", "--data", "text"], "--model digits does not take --data text: RuntimeError"),
        (
            ["--model", "tuned_models:normalized", "--data", "digits"],
            "cannot be tuned: 1 (BatchNorm1d) changes its buf",
        ),
        (["--model", "tuned_models:normalized", "--data", "own"], "cannot be tuned"),
        (["--model", "transformer", "--data", "digits"], "--model transformer does not take --data digits: RuntimeErr"),
        (["--ranks", "1500"], "--ranks 1500: each needs an image, and there are 1,257 to train on"),
        (["--pipelines", "none"], "none exchanges nothing"),
        (["--pipelines", "hierarchical(all_reduce('across'), intra='node')"], "process group 'node' is named, but"),
        (
            ["--pipelines", "partition({'*.bias': none, '*': allreduce})", "--steps", "1"],
            "is not the same on all ranks",
        ),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, own_models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["tune", *arguments, "--out", str(own_models / "out")]) == 2
    said, errors = capsys.readouterr()
    assert said == ""
    assert errors.startswith("fnddp tune: ")
    assert message in errors


def test_no_worse_is_a_share(own_models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tune", "--model", "tuned_models:own", "--ranks", "2", "--steps", "1", "--seeds", "1"]
    for within in ("0", "0%"):
        assert main.main([*arguments, "--within", within, "--out", str(own_models / "out")]) == 0
        assert json.loads((own_models / "out" / "results.json").read_text())["within"] == 0
    assert main.main([*arguments, "--within=-1%"]) == 2
    assert "fnddp tune: --within: must be 0 or a positive number" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "plan", "bench", "tune"])
def test_help_names_no_default_that_is_none(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([command, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "[default: " in said
    assert "[default: None]" not in said


def test_problems_have_a_row_for_each_rank(own_models: Path) -> None:
    for model, data in (("digits", None), ("tuned_models:own", "own"), ("transformer", "text"), ("transformer", None)):
        problem = asked(model, data, batch=2, ranks=3, steps=3, rate=None)
        batches = list(problem.batches(3, 0, 2))
        assert len(batches) == 2
        assert all(part.shape[0] == 3 for batch in batches for part in batch)
        again = list(problem.batches(3, 0, 2))
        assert all(torch.equal(a, b) for a, b in zip(batches[1], again[1], strict=True))


def test_learning_rates_fall() -> None:
    problem = asked("digits", None, batch=2, ranks=2, steps=4, rate=0.5)
    weight = torch.zeros(1)
    optimizer = problem.optimizer([weight])
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        weight.grad = torch.ones(1)
        optimizer.step()
    assert rates[0] == 0.5
    assert rates == sorted(rates, reverse=True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    with pytest.raises(WrongArgument):
        asked("gpt5", None, batch=2, ranks=2, steps=4, rate=None)
