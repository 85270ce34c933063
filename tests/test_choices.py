"""One decision: what `choose`, `fnddp plan auto`, `tune`, `doctor`, `sync="auto"` and the table of docs take.

On links, ranks and models drawn at random. Ranks are threads that find the link of a test, and codecs as fast as those
of `choose`; nothing is trained.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from fnddp import Compute, Link, choose
from fnddp.cli import examination, main, models, picture
from fnddp.core.sync import Sync
from fnddp.run import choose as choosing
from fnddp.simulation import tune as tuning
from fnddp.simulation.ranks import run_threads
from tests import workloads
from tests.rings import one_of
from tests.test_tune import outcome

MODELS = ("digits", *(f"{workloads.__file__}:{name}" for name in ("small", "wide", "large", "positions")))
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def drawn(count: int) -> list[tuple[str, int, str]]:
    draw = random.Random(37)
    rates = [f"{10 ** draw.uniform(1, 5):.0f}mbit:{draw.choice((0, 5, 20, 100))}us" for _ in range(count)]
    return [(rate, draw.choice((2, 3, 4, 8)), MODELS[i % len(MODELS)]) for i, rate in enumerate(rates)]


TRIPLES = drawn(20)


def taken(rate: str, ranks: int, model: str) -> str:
    return repr(choose(models.parameters(model), Link.parse(rate), world_size=ranks))


@pytest.fixture
def as_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks find codecs as fast as `choose` takes them to be; train and time nothing else."""

    def codec(plan: Any, **_: Any) -> tuple[float]:
        nbytes = sum(leaf.nbytes for leaf in plan.leaves.values())
        return (choosing.CODEC_SECONDS[repr(plan.sync)] * nbytes,)

    def cost(sync: Sync, *_: Any) -> Any:
        return outcome(repr(sync), 1.0)

    monkeypatch.setattr(choosing, "measure_segments", codec)
    for module in (examination, tuning):
        monkeypatch.setattr(module, "measure_backward", lambda *_, **__: Compute())
        monkeypatch.setattr(module, "cost", cost)
    monkeypatch.setattr(tuning, "final_loss", lambda *_: 1.0)


def test_the_triples_have_several_answers() -> None:
    assert len({taken(*triple) for triple in TRIPLES}) >= 3


@pytest.mark.parametrize(("rate", "ranks", "model"), one_of(4, TRIPLES))
def test_all_commands_take_what_choose_does(rate, ranks, model, as_chosen, monkeypatch, capsys, tmp_path) -> None:
    link, expected = Link.parse(rate), taken(rate, ranks, model)
    of = ("--model", model, "--ranks", str(ranks), "--link", rate)
    assert main.main(["plan", "auto", *of, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["auto"] == {rate: expected}
    assert [each["pipeline"] for each in planned["pipelines"]] == [*dict.fromkeys([expected, "allreduce"])]

    written: list[dict[str, Any]] = []
    monkeypatch.setattr(picture, "write", lambda *given: written.append(given[-1]))
    assert main.main(["tune", *of, "--steps", "1", "--seeds", "1", "--data", "own", "--out", str(tmp_path)]) == 0
    assert [found["auto"] for found in written] == [expected]
    said = capsys.readouterr().out
    assert re.search(rf"^{re.escape(expected)} .* auto$", said, re.MULTILINE)
    assert f'sync="auto" takes {expected} on this link' in said

    monkeypatch.setattr(choosing, "measure_link", lambda *_, **__: link)

    def on_rank(_: int) -> list[str]:
        stages = examination.predicted(link, model, "cpu")
        try:
            while True:
                next(stages)
        except StopIteration as ended:
            by_doctor = ended.value[2]
        return [by_doctor, repr(choosing.automatic(lambda: models.parameters(model), None))]  # as the class does

    assert run_threads(ranks, on_rank) == [[expected, expected]] * ranks


@pytest.mark.thorough
def test_the_table_of_docs_takes_what_choose_does() -> None:
    """For 10.3 M parameters and a latency of 20 us, as docs/which-pipeline.md says."""
    table = (RESULTS / "which-pipeline.md").read_text()
    rows = [[cell.strip() for cell in row.split("|")] for row in table.splitlines()]
    safe = {(int(row[1]), row[2]): row[4].strip("`") for row in rows if len(row) > 4 and row[3] == "below 0.01"}
    assert {ranks for ranks, _ in safe} == {8, 64}
    for (ranks, words), text in safe.items():
        rate = words.replace(" Gbit/s", "gbit").replace(" Mbit/s", "mbit")
        assert taken(f"{rate}:20us", ranks, "transformer") == text, (ranks, words)
    # As docs/which-pipeline.md says of other numbers of ranks.
    assert taken("1gbit:20us", 2, "transformer") == "bf16(allreduce)"
    for ranks in (4, 16, 32):
        for rate in ("100mbit", "1gbit", "10gbit", "100gbit"):
            assert taken(f"{rate}:20us", ranks, "transformer") == taken(f"{rate}:20us", 8, "transformer")
    codecs = {**choosing.CODEC_SECONDS, "bf16(allreduce)": 0.9 * choosing.CODEC_SECONDS["bf16(allreduce)"]}
    params, link = models.parameters("transformer"), Link.parse("10gbit:20us")
    assert repr(choose(params, link, world_size=8, codec_seconds=codecs)) == "bf16(allreduce)"
