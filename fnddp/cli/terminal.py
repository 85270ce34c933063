"""Output by rich: text that folds, tables that never cut a number, and progress as a bar or as lines."""

import os
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from shutil import get_terminal_size
from threading import Timer
from time import monotonic
from typing import TextIO, TypeVar

from rich import box, table
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

WHOLE = 10_000  # columns for a file or a pipe, because these have no width
READABLE = 110  # columns of captions there
NARROWEST = 24  # columns of names, while columns of numbers can be dropped instead
GAP = 2  # columns before each number

RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Variables in which launchers pass a rank: the first one shows progress."""

SILENT, QUIET = 2.0, 30.0  # seconds without a line, for a new task and for a running one

SIZES = {
    "wire B": "wire bytes: payload that a rank passes to its collectives in a step",
    "link B": "link bytes: bytes that a rank then sends over its link, if collectives are rings",
}
"""Captions of the columns of bytes, in all tables of commands: see docs/glossary.md."""

_PIECES = re.compile(r"[^(,{]*(?:[({]|, ?)?")  # a pipeline is broken after these

T = TypeVar("T")
R = TypeVar("R")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # main returns its exit code; rich would exit with 1


def console(stream: TextIO, width: int | None = None) -> Console:
    """Return a console on `stream`, without styles if it is not a terminal, NO_COLOR is set, or TERM is dumb."""
    is_terminal = stream.isatty()
    return _Console(
        file=stream,
        width=width or (get_terminal_size().columns if is_terminal else WHOLE),
        height=25,  # without it, rich takes a dumb terminal for one of 80 columns
        force_terminal=is_terminal,
        color_system="auto" if is_terminal and not os.environ.get("NO_COLOR") else None,
        highlight=False,
        markup=False,
        emoji=False,
    )


def echo(text: str) -> None:
    """Print `text` on standard output, folded between words where that is a terminal."""
    console(sys.stdout).print(text)


@dataclass(frozen=True)
class Grid:
    """A column of names, and columns of numbers."""

    name: str  # the heading of the names
    columns: Mapping[str, int]  # weights, by heading; columns with the least weight are dropped first
    rows: Sequence[Sequence[str]]  # a name and a cell for each column
    legend: Mapping[str, str]  # meanings of columns, by a part of their headings; shown with them
    note: str = ""

    def show(self) -> None:
        """Print the table, as wide as the terminal; in a file or a pipe as wide as needed."""
        headings, width = list(self.columns), console(sys.stdout).width
        shown, narrowest = self._fitting(width)
        made = table.Table(self.name, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        made.columns[0].overflow = "fold"
        height = max(heading.count("\n") for heading in headings)
        for heading in (headings[i] for i in shown):
            made.add_column("\n" * (height - heading.count("\n")) + heading, justify="right", no_wrap=True)
        for name, *cells in self.rows:
            made.add_row(_folded(name, 1 + width - narrowest), *(cells[i] for i in shown))
        console(sys.stdout, max(width, narrowest)).print(made)
        names = [heading.replace("-\n", "").replace("\n", " ") for heading in headings]
        legend = table.Table.grid(table.Column(no_wrap=True), table.Column(), padding=(0, 2, 0, 0))
        for key, meaning in self.legend.items():
            if any(key in names[i] for i in shown):
                legend.add_row(key, meaning)
        hidden = ", ".join(name for i, name in enumerate(names) if i not in shown)
        to, most = console(sys.stdout), min(width, READABLE)
        to.print("", legend, sep="\n", style="dim", width=most)
        unseen = hidden and f"Not shown at {width} columns: {hidden}"
        to.print(*filter(None, (self.note, unseen)), "", sep="\n", style="dim", width=most)

    def _fitting(self, width: int) -> tuple[list[int], int]:
        """Return the columns that fit `width`, at least one, and the least width that shows them whole."""
        priorities = list(self.columns.values())
        lines = [[*heading.split("\n"), *(row[i] for row in self.rows)] for i, heading in enumerate(self.columns, 1)]
        widths = [GAP + max(map(len, column)) for column in lines]
        names = min(NARROWEST, max(len(row[0]) for row in [[self.name], *self.rows]))
        shown = list(range(len(widths)))
        while len(shown) > 1 and names + sum(widths[i] for i in shown) > width:
            shown.remove(min(reversed(shown), key=lambda i: priorities[i]))
        return shown, 1 + sum(widths[i] for i in shown)


def _folded(name: str, width: int) -> str:
    """Break `name` between the parts of a pipeline; rich folds parts that are still too long."""
    lines = [""]
    for piece in _PIECES.findall(name):
        if lines[-1].strip() and len((lines[-1] + piece).rstrip()) > width:
            lines.append(" ")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def is_first_rank() -> bool:
    """Return True in the first rank of a launcher, and without one."""
    return all(os.environ.get(name, "0") == "0" for name in RANKS)


@contextmanager
def progress(text: str) -> Generator[Callable[..., None]]:
    """Show `text` on the first rank's standard error; yield a function that shows the next task.

    On a terminal, draw a bar on one line. Otherwise print each text on a new line, with the remaining time.
    """
    to = console(sys.stderr)
    if not is_first_rank():
        yield lambda *_, **__: None
        return
    if not to.is_terminal or to.is_dumb_terminal:
        lines = Lines(sys.stderr)
        lines.show(text)
        timer = Timer(SILENT, lines.begin)  # a short task needs no line
        timer.daemon = True
        timer.start()
        try:
            yield lines.show
        finally:
            timer.cancel()
        return
    rest = table.Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns = (
        SpinnerColumn(),
        BarColumn(16),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.description}", markup=False, table_column=rest),
    )
    with Progress(*columns, console=to, transient=True, expand=True, refresh_per_second=4) as line:
        task = line.add_task(text, total=None)

        def show(text: str, done: int = 0, of: int | None = None) -> None:
            nonlocal task
            if not done:  # with a clock of its own
                line.remove_task(task)
                task = line.add_task(text, total=of)
            line.update(task, description=text, completed=done)

        yield show


class Lines:
    """Progress in a file or a pipe, from `begin` on: a line for each text, and each half minute for the same one."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._text, self._since, self._said = "", clock(), clock()
        self._line, self._has_begun = "", False

    def begin(self) -> None:
        """Write a line for the present text, and from now on for every text."""
        self._has_begun = True
        print(self._line, file=self._stream, flush=True)

    def show(self, text: str, done: int = 0, of: int | None = None) -> None:
        """Write `text`, the next of `of` parts, if it differs from the last one."""
        now = self._clock()
        if not done:
            self._since = now
        if text == self._text and now < self._said + QUIET:
            return
        self._text, self._said = text, now
        left = f", about {_rounded((now - self._since) / done * (of - done))} left" if done and of else ""
        self._line = f"... {text}{left}"
        if self._has_begun:
            print(self._line, file=self._stream, flush=True)


def _rounded(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 100 else f"{round(seconds / 60)} min"


def each(does: str, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return `function(item)` for each item, and show the item in progress."""
    with progress(f"{does} {items[0]}" if items else does) as show:
        found: list[R] = []
        for i, item in enumerate(items):
            show(f"{does} {item}", i, len(items))
            found.append(function(item))
    return found
