"""What commands print on terminals of several widths: names fold, columns give way, numbers stay whole."""

import re
from pathlib import Path

import pytest

from fnddp.cli.table import Column, Table
from tests import terminals
from tests.terminals import Command

MODEL = """
import torch
from torch import nn

def small():
    return nn.Linear(640, 480), torch.ones(2, 640), lambda output: output.square().mean()
"""
LOW_RANK = "error_feedback(powersgd(fp16(allreduce), rank=2))"
LINKS = ("--link", "1gbit", "--link", "10gbit")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STYLES = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What commands wrote, by a name for each."""
    folder: Path = tmp_path_factory.mktemp("terminal")
    (folder / "model.py").write_text(MODEL)
    model = ["--model", f"{folder / 'model.py'}:small"]
    plan = ["plan", "allreduce", LOW_RANK, *model, *LINKS]
    bench = ["bench", LOW_RANK, *model, "--ranks", "1", "--pairs", "2", "--against", "ddp,none", "--out", str(folder)]
    demo = ["demo", "--pipelines", "fp16(allreduce)", "--ranks", "1", "--steps", "11", "--out", str(folder)]
    commands = {
        "plan 60": Command(60, {}, plan),
        "plan 80": Command(80, {}, plan),
        "plan 200": Command(200, {}, plan),
        "plan NO_COLOR": Command(80, {"NO_COLOR": "1"}, plan),
        "plan dumb": Command(80, {"TERM": "dumb"}, plan),
        "bench 60": Command(60, {}, bench),
        "demo 60": Command(60, {}, demo),
        "demo NO_COLOR": Command(60, {"NO_COLOR": "1"}, demo),
        "demo dumb": Command(60, {"TERM": "dumb"}, demo),
    }
    return dict(zip(commands, terminals.run(*commands.values()), strict=True))


def table_of(text: str, columns: int) -> list[str]:
    """The lines of the table, without escape codes."""
    lines = [line.rpartition("\r")[2] for line in ESCAPES.sub("", text).split("\n")]
    ruler = next(i for i, line in enumerate(lines) if line.startswith("───"))
    rows = lines[ruler - 2 : lines.index("", ruler)]
    assert all(len(line) <= columns for line in rows), "\n".join(rows)
    assert "…" not in text
    return rows


@pytest.mark.parametrize("what", ["plan 60", "plan 80", "demo 60"])
def test_what_is_said_around_tables_folds_too(said: dict[str, str], what: str) -> None:
    lines = [line.rpartition("\r")[2] for line in ESCAPES.sub("", said[what]).split("\n")]
    words = [line for line in lines if "/" not in line.split(" ")[0] and not line.startswith("Wrote ")]  # files' names
    assert max(map(len, words)) <= int(what.split()[1]), "\n".join(words)


def name_in(rows: list[str]) -> str:
    """What stands in the first column of all rows together."""
    ruler = next(i for i, line in enumerate(rows) if line.startswith("───"))
    return "".join(re.split(r"\s{2,}", line)[0].strip() + " " for line in rows[ruler + 1 :]).replace("( ", "(")


@pytest.mark.parametrize("columns", [60, 80])
def test_plan_folds_names_and_keeps_numbers_whole(said: dict[str, str], columns: int) -> None:
    rows = table_of(said[f"plan {columns}"], columns)
    assert f"allreduce {LOW_RANK}" in name_in(rows)
    shown = "\n".join(rows)
    for number in ("1,230,720", "17.23 ms", "1.723 ms", "5,440"):
        assert re.search(rf"(?<![\d,.]){re.escape(number)}(?![\d,.])", shown), number
    assert "Not shown, for want of room:" in said[f"plan {columns}"]


def test_a_wide_terminal_has_all_columns(said: dict[str, str]) -> None:
    rows = table_of(said["plan 200"], 200)
    assert any(line.startswith(LOW_RANK) for line in rows)
    for heading in ("wire B", "reduction", "link B", "tives", "rounds", "memory"):
        assert heading in rows[1]
    assert "Not shown" not in said["plan 200"]


@pytest.mark.parametrize(("command", "name"), [("bench 60", LOW_RANK), ("demo 60", "fp16(allreduce)")])
def test_measured_tables_fit_too(said: dict[str, str], command: str, name: str) -> None:
    assert name in name_in(table_of(said[command], 60))


@pytest.mark.parametrize("command", ["plan", "demo"])
def test_no_color_takes_all_styles_away(said: dict[str, str], command: str) -> None:
    assert STYLES.search(said[f"{command} 60"])
    assert STYLES.findall(said[f"{command} NO_COLOR"]) == []


@pytest.mark.parametrize("command", ["plan", "demo"])
def test_a_dumb_terminal_gets_text_alone(said: dict[str, str], command: str) -> None:
    assert "\x1b" in said[f"{command} 60"]
    assert "\x1b" not in said[f"{command} dumb"]
    assert "\r" not in said[f"{command} dumb"]


TABLE = Table(
    "pipeline",
    [Column("wire", 2), Column("link", 1), Column("a\ntime", 3)],
    [
        ("a(" * 20 + "b" + ")" * 20, "1,234", "5,678", "9.9 ms"),
        ("partition({'x': allreduce, 'y': none})", "1", "2", "3"),
    ],
    "what it means",
)


@pytest.mark.parametrize("width", range(len("pipeline  9.9 ms"), 120))
def test_tables_fit_where_one_number_does(width: int) -> None:
    heading, body, caption = TABLE.fitted(width)
    assert max(map(len, [*heading, *body])) <= width
    assert "9.9 ms" in "\n".join(body)
    assert max(map(len, caption)) <= width
    names = "".join(line[: max(1, len(body[0]) - len("  9.9 ms"))] for line in body)
    assert names.count("(") == 21


def test_columns_give_way_by_weight() -> None:
    everything, first_out, second_out = (TABLE.fitted(width)[0][-1].split() for width in (80, 40, 33))
    assert everything == ["pipeline", "wire", "link", "time"]
    assert first_out == ["pipeline", "wire", "time"]
    assert second_out == ["pipeline", "time"]
    assert TABLE.fitted(33)[2][-2:] == ["Not shown, for want of room:", "  wire, link"]
