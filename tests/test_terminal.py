"""Output on terminals of several widths: names fold, columns give way, numbers stay whole."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fnddp.cli import main
from tests.workloads import SMALL, WIDE

LOW_RANK = "error_feedback(powersgd(fp16(allreduce), rank=2))"
NUMBERS = ("1,230,720", "17.23 ms", "1.723 ms", "5,440")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STYLES = re.compile(r"\x1b\[[0-9;]*m")
PLAN = ("plan", "allreduce", LOW_RANK, "--model", WIDE, "--link", "1gbit", "--link", "10gbit")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """`said(columns, *arguments, **environment)`: what a command writes to a terminal, and its errors."""

    def run(columns: int, *arguments: str, **environment: str) -> tuple[str, str]:
        monkeypatch.delenv("NO_COLOR", raising=False)
        for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns), **environment}.items():
            monkeypatch.setenv(name, value)
        for stream in ("stdout", "stderr"):
            monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
        assert main.main(list(arguments)) == 0
        return capsys.readouterr()

    return run


def names_of(lines: list[str]) -> str:
    below = lines[1 + next(i for i, line in enumerate(lines) if line.startswith("───")) :]
    assert "…" not in "".join(below)
    return "".join(re.split(r"\s{2,}", line.strip())[0] for line in below[: below.index("")]).replace(" ", "")


def require_fit(text: str, columns: int) -> None:
    lines = [line.rstrip() for line in ESCAPES.sub("", text).split("\n")]
    words = [line for line in lines if "/" not in line.split(" ")[0] and not line.startswith("Wrote ")]
    assert max(map(len, words)) <= columns, "\n".join(words)
    assert LOW_RANK.replace(" ", "") in names_of(lines)


@pytest.mark.parametrize(("columns", "numbers"), [(40, NUMBERS[1:2]), (80, NUMBERS), (200, NUMBERS)])
def test_what_is_printed_fits_and_numbers_stay_whole(
    said: Callable[..., tuple[str, str]], columns: int, numbers: tuple[str, ...]
) -> None:
    text, _ = said(columns, *PLAN)
    require_fit(text, columns)
    for number in numbers:
        assert re.search(rf"(?<![\d,.]){re.escape(number)}(?![\d,.])", ESCAPES.sub("", text)), number
    assert ("Not shown" in text) == (columns < 200)
    assert STYLES.search(text)
    assert STYLES.findall(said(columns, *PLAN, NO_COLOR="1")[0]) == []


@pytest.mark.thorough
def test_a_dumb_terminal_gets_text_alone(said: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    demo = ["demo", "--pipelines", LOW_RANK, "--ranks", "1", "--steps", "11", "--model", WIDE, "--out", str(tmp_path)]
    text, progress = said(60, *demo)
    require_fit(text, 60)
    assert "\r" in progress
    assert max(map(len, re.split(r"[\r\n]|lowered .*", ESCAPES.sub("", progress)))) <= 60
    assert not {"\x1b", "\r"} & set("".join(said(60, *demo, TERM="dumb")))


TUNE = ("tune", "--ranks", "2", "--steps", "1", "--seeds", "1", "--pipelines", "sign(allgather)")
PHASES = {
    (*PLAN[:2], "--model", SMALL): ["loading ", "checking allreduce", "lowering allreduce"],
    (*TUNE, "--model", SMALL): ["loading ", "timing forward and backward", "timing allreduce", "training allreduce, "],
    ("bench", "allreduce", "--ranks", "1", "--pairs", "1", "--model", SMALL): [
        *("loading ", "starting 1 rank", "preparing allreduce", "warming up ", "timing "),
    ],
}


@pytest.mark.parametrize("command", PHASES)
def test_progress_shows_each_phase_from_its_start(
    command: tuple[str, ...],
    said: Callable[..., tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    _, shown = said(200, *command)
    at = [shown.find(phase) for phase in ("importing torch", *PHASES[command])]
    assert -1 not in at
    assert at == sorted(at)
