"""Tables that fit a terminal: names fold, columns that matter least give way, and no number is ever cut."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fnddp.cli import terminal
from fnddp.cli.terminal import BOLD, DIM

GAP = "  "
NARROWEST = 24  # columns for names, as long as a number can give way instead
READABLE = 110  # columns for captions, where there is no terminal

_PIECES = re.compile(r"[^(,{]*(?:[({]|, ?)?")  # a pipeline may be broken behind these


class Column(NamedTuple):
    """A column of numbers.

    Attributes:
        heading: May have several lines.
        weight: Those with the least give way first.
    """

    heading: str
    weight: int

    @property
    def on_one_line(self) -> str:
        """The heading."""
        return self.heading.replace("-\n", "").replace("\n", " ")


@dataclass(frozen=True)
class Table:
    """A column of names, and columns of numbers.

    Attributes:
        name: The heading of the names.
        columns: All others.
        rows: A name and a cell for each column.
        caption: What the columns mean.
    """

    name: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    caption: str

    def show(self) -> None:
        """Prints it, as wide as the terminal; as wide as it needs in a file or a pipe."""
        width = terminal.width()
        heading, body, caption = self.fitted(width)
        print("\n".join([*(terminal.styled(line, BOLD) for line in heading), *body]))
        print("\n".join([terminal.styled(line, DIM) for line in ["", *caption, ""]]))

    def fitted(self, width: int | None) -> tuple[list[str], list[str], list[str]]:
        """Heading, body and caption in lines of at most `width`, as far as one number fits."""
        shown = self._columns_for(width)
        widths = [self._width(i) for i in shown]
        room = None if width is None else max(1, width - sum(widths) - len(GAP) * len(widths))
        names = [_folded(row[0], room) for row in self.rows]
        first = max((len(line) for name in [[self.name], *names] for line in name), default=0)
        heading = _lines([self.name], [self.columns[i].heading.split("\n") for i in shown], first, widths, at_end=True)
        ruler = ["─" * (first + sum(widths) + len(GAP) * len(widths))]
        body = [
            line
            for row, name in zip(self.rows, names, strict=True)
            for line in _lines(name, [[row[1 + i]] for i in shown], first, widths, at_end=False)
        ]
        return list(heading), [*ruler, *body], self._caption(shown, width)

    def _columns_for(self, width: int | None) -> list[int]:
        """Which columns are shown: what is left when all names have room."""
        shown = list(range(len(self.columns)))
        names = min(NARROWEST, max(len(row[0]) for row in [[self.name], *self.rows]))
        while width is not None and len(shown) > 1:
            if names + sum(len(GAP) + self._width(i) for i in shown) <= width:
                break
            shown.remove(min(reversed(shown), key=lambda i: self.columns[i].weight))
        return shown

    def _width(self, column: int) -> int:
        cells = [*self.columns[column].heading.split("\n"), *(row[1 + column] for row in self.rows)]
        return max(map(len, cells))

    def _caption(self, shown: Sequence[int], width: int | None) -> list[str]:
        hidden = [
            each.heading.replace("-\n", "").replace("\n", " ") for i, each in enumerate(self.columns) if i not in shown
        ]
        lines = [*self.caption.split("\n")]
        lines += [f"Not shown, for want of room: {', '.join(hidden)}"] if hidden else []
        return [part for line in lines for part in textwrap.wrap(line, width or READABLE, subsequent_indent="  ")]


def _lines(
    name: Sequence[str], cells: Sequence[Sequence[str]], first: int, widths: Sequence[int], *, at_end: bool
) -> Iterator[str]:
    height = max(len(part) for part in [name, *cells])
    columns = [[*[""] * (height - len(c)), *c] if at_end else [*c, *[""] * (height - len(c))] for c in [name, *cells]]
    for own, *others in zip(*columns, strict=True):
        numbers = [cell.rjust(width) for cell, width in zip(others, widths, strict=True)]
        yield GAP.join([own.ljust(first), *numbers]).rstrip()


def _folded(name: str, width: int | None) -> list[str]:
    """`name` in lines of at most `width`, broken where a reader would."""
    if width is None or len(name) <= width:
        return [name]
    indent = " " if width > 1 else ""
    lines = [""]
    for piece in _PIECES.findall(name):
        if lines[-1].strip() and len((lines[-1] + piece).rstrip()) > width:
            lines.append(indent)
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:  # a piece that is too long by itself
            lines[-1:] = [lines[-1][:width], indent + lines[-1][width:]]
    return [line.rstrip() for line in lines if line.strip()]
