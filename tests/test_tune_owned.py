"""Training with owners on virtual ranks, and `fnddp tune --own`, which chooses both hops by it."""

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fnddp
from fnddp import Link, choose_owned
from fnddp.cli import main
from fnddp.cost.estimate import Compute
from fnddp.laws import bits
from fnddp.run.choose_owned import Pair, owned_plans
from fnddp.simulation.tune import OWNERS, Problem, Tuned, final_loss, text_of, tune, way_of
from tests.ranks import on_ranks
from tests.test_tune import outcome

HOPS = [
    ("two_shot", "allgather"),
    ("error_feedback(quantize(two_shot, bits=4))", "ef21(quantize(allgather, bits=4))"),
    ("bf16(two_shot)", "bf16(allgather)"),
    ("error_feedback(lloyd_max(two_shot, bits=2))", "ef21(topk(allgather, ratio=0.1))"),
]


class Squares(nn.Module):
    """Parameters whose gradients are computed element by element, so that `vmap` gives the bits of autograd."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1)
        for name, shape in {"first": (24, 16), "second": (16, 40), "third": (8, 8), "bias": (37,)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=random)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([((p - x) * (p - x)).sum() for p in self.parameters()]).sum()


def muon_and_adamw(leaves: Iterable[Tensor], rate: float = 0.02) -> list[torch.optim.Optimizer]:
    leaves = [*leaves]
    matrices, rest = ([leaf for leaf in leaves if (leaf.ndim == 2) is which] for which in (True, False))
    return [torch.optim.Muon(matrices, lr=rate), torch.optim.AdamW(rest, lr=0.01)]


@pytest.mark.parametrize("hops", HOPS)
@on_ranks(3, threads=True)
def test_a_simulated_training_has_the_bits_of_one_on_real_ranks(rank: int, hops: tuple[str, str]) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(2))  # a number for each step and rank
    model = Squares()
    of_ranks = muon_and_adamw(model.parameters())
    owned = fnddp.own(model, of_ranks, *hops)
    for row in x:
        owned(row[rank]).backward()
        for each in of_ranks:
            each.step()
            each.zero_grad()
    alone = Squares()
    done = fnddp.simulate_training(
        lambda params, x: functional_call(alone, params, x),
        {name: p.detach() for name, p in alone.named_parameters()},
        [(row,) for row in x],
        fnddp.parse(hops[0]),
        weights=fnddp.parse(hops[1]),
        world_size=3,
        optimizer=muon_and_adamw,
    )
    assert bits(done.params) == bits({name: p.detach() for name, p in model.named_parameters()})


def line_problem() -> Problem:
    def batch(rank: int, n: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        x = torch.randn(4, 8, generator=generator)
        return x, x.cumsum(1)

    return Problem(
        lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8)),
        lambda forward, batch: (forward(batch[0]) - batch[1]).square().mean(),
        batch,
        lambda leaves, lr=0.02: muon_and_adamw(leaves, lr),
    )


def test_tune_compares_both_hops() -> None:
    found = tune(
        line_problem(), [", ".join(HOPS[3])], own=True, link=Link.parse("20kbit"), ranks=3, steps=4, seeds=(0, 1)
    )
    by_name = {each.pipeline: each for each in found.outcomes}
    few_bits = text_of(way_of(", ".join(HOPS[3]), own=True))
    assert {*by_name} == {"two_shot, allgather", *OWNERS.halves, found.chosen, few_bits}
    exact, few = found.mean, by_name[few_bits]
    model = line_problem().make(0)
    pair = Pair(*HOPS[0])
    first, back = owned_plans("test", model, muon_and_adamw(model.parameters()), [pair], 3)[pair]
    assert exact.wire_bytes == first.wire_bytes + sum(plan.wire_bytes for plan in back)
    assert few.link_bytes < exact.link_bytes / 4
    assert few.seconds < exact.seconds / 4
    assert found.chosen == text_of(choose_owned(model, muon_and_adamw(model.parameters()), "20kbit", world_size=3))
    assert exact.losses[0] == final_loss(line_problem(), way_of("two_shot, allgather", own=True), 3, 0, 4)
    assert few.losses != exact.losses


def test_notes_of_hops_are_those_of_the_study_of_hops() -> None:
    eight = text_of(way_of("error_feedback(quantize(two_shot)), ef21(quantize(allgather))", own=True))
    costs = {eight: 0.5, "two_shot, allgather": 1.0}
    outcomes = [replace(outcome(text, seconds), losses=(1.0,) * 3) for text, seconds in costs.items()]
    found = Tuned(tuple(outcomes), Compute(), 0.01, "two_shot, allgather", None, OWNERS)
    assert found.winner is outcomes[0]
    said = "fnddp.choose_owned takes two_shot, allgather on this link: it knows neither your losses nor how long"
    assert found.notes == [f"{said} backward takes"]


def test_hops_with_a_warm_up_and_optimizers_that_own_refuses_are_errors() -> None:
    options: Any = {"own": True, "link": Link.parse("1mbit"), "ranks": 2, "steps": 2}
    twice = replace(line_problem(), optimizer=lambda leaves: [*muon_and_adamw(leaves), torch.optim.SGD(leaves[:1])])
    warms_up = "warmup(quantize(two_shot), steps=1, before=two_shot), allgather"
    for problem, hops, error, says in (
        (line_problem(), [warms_up], ValueError, "remove warmup"),
        (replace(line_problem(), optimizer=torch.optim.LBFGS), [], TypeError, "LBFGS"),
        (twice, [], ValueError, "in two optimizers"),
    ):
        with pytest.raises(error, match=says):
            tune(problem, hops, **options)
    with pytest.raises(ValueError, match="leaf '0.weight' is in 2 of the 3 optimizers"):
        final_loss(twice, fnddp.allreduce, 2, 0, 1)


def test_without_muon_exact_hops_stay() -> None:
    problem = replace(line_problem(), optimizer=partial(torch.optim.SGD, lr=0.1))
    found = tune(problem, [], own=True, link=Link.parse("20kbit"), ranks=2, steps=2, seeds=(0,))
    assert found.chosen is None  # losses were measured with Muon
    assert found.notes == []
    assert found.usage(found.mean) == 'fnddp.own(model, optimizer, "two_shot", "allgather")'


def test_hops_may_have_brackets_and_commas_in_their_patterns() -> None:
    text = "partition({'a[,': two_shot, '*': quantize(two_shot)}), allgather"
    assert text_of(way_of(text, own=True)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("two_shot", "must be two pipelines"),
        ("two_shot, allgather, allgather", "must be two pipelines"),
        ("powersgd(allreduce), allgather", "tune: gradients=powersgd"),
        ("quantize(two_shot, bits=4), ef21(allgather)", "tune: weights=ef21"),
        ("quantize(two_shot, bits=4), allreduce", "tune: weights=allreduce"),
        ("quantiz(two_shot), allgather", "quantiz"),
    ],
)
def test_wrong_hops(text: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        way_of(text, own=True)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tune", "--own", "--ranks", "2", "--steps", "2", "--seeds", "2", "--link", "1mbit:1ms"]
    arguments += [", ".join(HOPS[1]), "--within", "50%", "--out", str(tmp_path)]
    assert main.main(arguments) == 0
    said = capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["winner"] == ", ".join(HOPS[1])
    assert f'To use it: fnddp.own(model, optimizer, "{HOPS[1][0]}", "{HOPS[1][1]}")' in said
    assert "as fast as exact hops" in said
    assert results["own"]
    assert results["auto"] is None
    assert main.main([*arguments, "two_shot"]) == 2
    assert "must be two pipelines" in capsys.readouterr().err


def test_one_optimizer_may_be_anything_with_a_step() -> None:
    def halves(leaves: list[Tensor]) -> Any:
        return SimpleNamespace(step=lambda: [leaf.mul_(0.5) for leaf in leaves])

    loss: Any = lambda params, x: (params["w"] * x).sum()  # noqa: E731
    ends = fnddp.simulate_training(
        loss, {"w": torch.ones(3)}, [(torch.ones(2, 1),)], fnddp.allreduce, world_size=2, optimizer=halves
    )
    assert ends.params["w"].tolist() == [0.5] * 3
