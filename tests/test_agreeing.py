"""One object decides: `choose`, `sync="auto"`, and the commands give one answer for the same link, ranks and model."""

import json
import random
from collections.abc import Generator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fnddp
from fnddp import Link, choose
from fnddp.cli import examination, main
from fnddp.cost.estimate import Compute
from fnddp.run import choose as choosing
from fnddp.simulation.ranks import run_threads
from tests.rings import one_of


def results(steps: Generator[Any, None, Any]) -> Iterator[Any]:
    """Yield what `steps` yields, and then what it returns."""
    yield (yield from steps)


TRIPLES = 20
MODEL = """
import torch

def make():
    module = torch.nn.Sequential({layers})
    return module, torch.ones(2, {width}), lambda output: output.square().mean()
"""


def triples() -> Iterator[tuple[str, int, list[int]]]:
    """Links from 100 kbit/s to 100 Gbit/s, 2 to 64 ranks, and the widths of models of 100 to 300,000 parameters."""
    draw = random.Random(0)
    for _ in range(TRIPLES):
        rate = f"{round(10 ** draw.uniform(2, 8))}kbit"
        yield (
            f"{rate}:{draw.choice((5, 50, 1000))}us",
            draw.choice((2, 3, 8, 64)),
            [draw.randint(8, 300) for _ in range(draw.randint(2, 5))],
        )


def made(widths: list[int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))


def as_in_the_table(plan: fnddp.Plan, *_: Any, **__: Any) -> tuple[float, ...]:
    """What a codec takes, as `choose` assumes it: no clock decides."""
    return (choosing.CODEC_SECONDS[repr(plan.sync)] * sum(leaf.nbytes for leaf in plan.leaves.values()),)


@pytest.mark.parametrize(("link", "ranks", "widths"), one_of(4, triples()))
def test_all_ways_to_ask_give_one_answer(
    link: str,
    ranks: int,
    widths: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(choosing, "measure_segments", as_in_the_table)
    monkeypatch.setattr(choosing, "measure_link", lambda *_, **__: Link.parse(link))
    monkeypatch.setattr(examination, "measure_backward", lambda *_: Compute())
    model = tmp_path / "model.py"
    layers = ", ".join(f"torch.nn.Linear({a}, {b})" for a, b in pairwise(widths))
    model.write_text(MODEL.format(layers=layers, width=widths[0]))

    taken = repr(choose(made(widths), Link.parse(link), world_size=ranks))

    given = ["--link", link, "--ranks", str(ranks), "--model", f"{model}:make"]
    assert main.main(["plan", "auto", *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["auto"] == {link: taken}

    few = ["--steps", "1", "--seeds", "2", "--out", str(tmp_path / "tune")]
    assert main.main(["tune", "allreduce", *given, *few]) == 0
    said = capsys.readouterr().out
    assert f'sync="auto" takes {taken} on this link' in said
    found = json.loads((tmp_path / "tune" / "results.json").read_text())
    assert found["auto"] == taken
    if found["winner"] is None:
        assert "Undecided: " in said
        assert "To use it" not in said
    elif found["winner"] != taken:  # it is surely as good, and faster by more than predictions err
        step = {each["pipeline"]: each["step_seconds"] for each in found["pipelines"]}
        assert step[found["winner"]] < step[taken] or f"takes {taken} on this link, which ends" in said

    if ranks == 2:  # as many threads

        def on_ranks(_: int) -> list[str]:
            *_, (_, _, chosen) = results(examination.predicted(Link.parse(link), f"{model}:make", "cpu"))
            wrapped = fnddp.DistributedDataParallel(made(widths), sync="auto")
            return [chosen, repr(wrapped.sync)]

        assert run_threads(ranks, on_ranks) == [[taken, taken]] * ranks
