"""Output on terminals of several widths: names fold, columns give way, numbers stay whole."""

import re
from pathlib import Path

import pytest

from fnddp.cli.terminal import Table
from tests import terminals
from tests.terminals import Command

MODEL = """
import torch
from torch import nn

def small():
    return nn.Linear(640, 480), torch.ones(2, 640), lambda output: output.square().mean()
"""
LOW_RANK = "error_feedback(powersgd(fp16(allreduce), rank=2))"
NUMBERS = ("1,230,720", "17.23 ms", "1.723 ms", "5,440")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STYLES = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What commands wrote, by a name for each."""
    folder: Path = tmp_path_factory.mktemp("terminal")
    (folder / "model.py").write_text(MODEL)
    model = ["--model", f"{folder / 'model.py'}:small"]
    plan = ["plan", "allreduce", LOW_RANK, *model, "--link", "1gbit", "--link", "10gbit"]
    demo = ["demo", "--pipelines", LOW_RANK, "--ranks", "1", "--steps", "11", *model, "--out", str(folder)]
    commands = {
        "plan 40": Command(40, {}, plan),
        "plan 80": Command(80, {}, plan),
        "plan 200": Command(200, {}, plan),
        "plan NO_COLOR": Command(80, {"NO_COLOR": "1"}, plan),
        "demo 60": Command(60, {}, demo),
        "demo dumb": Command(60, {"TERM": "dumb"}, demo),
    }
    return dict(zip(commands, terminals.run(*commands.values()), strict=True))


def names_of(lines: list[str]) -> str:
    """The first column of the table, without folds."""
    below = lines[1 + next(i for i, line in enumerate(lines) if line.startswith("───")) :]
    assert "…" not in "".join(below)
    return "".join(re.split(r"\s{2,}", line.strip())[0] for line in below[: below.index("")]).replace(" ", "")


@pytest.mark.thorough
def test_what_is_printed_fits_and_numbers_stay_whole(said: dict[str, str]) -> None:
    for what in ("plan 40", "plan 80", "plan 200", "demo 60"):
        lines = [line.rpartition("\r")[2].rstrip() for line in ESCAPES.sub("", said[what]).split("\n")]
        words = [line for line in lines if "/" not in line.split(" ")[0] and not line.startswith("Wrote ")]
        assert max(map(len, words)) <= int(what.split()[1]), "\n".join(words)
        assert LOW_RANK.replace(" ", "") in names_of(lines)
    for what, numbers in (("plan 40", NUMBERS[1:2]), ("plan 80", NUMBERS), ("plan 200", NUMBERS)):
        for number in numbers:
            assert re.search(rf"(?<![\d,.]){re.escape(number)}(?![\d,.])", ESCAPES.sub("", said[what])), (what, number)
        assert ("Not shown" in said[what]) == (what != "plan 200")


@pytest.mark.thorough
def test_no_color_takes_all_styles_away_and_a_dumb_terminal_gets_text_alone(said: dict[str, str]) -> None:
    assert STYLES.search(said["plan 80"])
    assert "\r" in said["demo 60"]  # progress
    assert STYLES.findall(said["plan NO_COLOR"]) == []
    assert not {"\x1b", "\r"} & set(said["demo dumb"])


@pytest.mark.parametrize("width", [8, 33, 40, 80])
def test_columns_give_way_by_weight(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [("a(" * 20 + "b" + ")" * 20, "1,234", "5,678", "9.9 ms"), ("partition({'x': none})", "1", "2", "3")]
    Table("pipeline", {"wire": 2, "link": 1, "a\ntime": 3}, rows, "[what] it means").show()
    lines = [line.rstrip() for line in capsys.readouterr().out.split("\n")]
    shown = {40: ["wire", "time"], 80: ["wire", "link", "time"]}.get(width, ["time"])
    ruler = next(i for i, line in enumerate(lines) if line.startswith("───"))
    assert [heading for heading in ("wire", "link", "time") if heading in "".join(lines[:ruler])] == shown
    assert lines[ruler + 1].endswith("9.9 ms")
    assert max(map(len, lines)) <= max(width, len("p  9.9 ms"))
    assert "".join(lines).count("(") == 21
