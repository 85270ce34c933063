"""What standard output is: how wide, whether it takes escape codes. NO_COLOR and TERM=dumb are kept to everywhere."""

import os
import shutil
import sys
import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO

CLEAR = "\r\x1b[K"
BOLD, DIM, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"


def width() -> int | None:
    """Columns of standard output; None where it is a file or a pipe, which have no width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def folded(line: str) -> str:
    """`line`, in as many lines as the terminal needs for it; broken between words."""
    columns = width()
    return (
        line
        if columns is None
        else "\n".join(textwrap.wrap(line, columns, break_long_words=False, break_on_hyphens=False))
    )


def moves(stream: TextIO) -> bool:
    """Whether `stream` is a terminal on which a line can be written over."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def has_style(stream: TextIO) -> bool:
    """Whether text on `stream` may be bold, dim or coloured: not if NO_COLOR is set (https://no-color.org)."""
    return moves(stream) and not os.environ.get("NO_COLOR")


def styled(line: str, style: str) -> str:
    """`line`, to be printed in `style` where standard output has any."""
    return f"{style}{line}{PLAIN}" if line and has_style(sys.stdout) else line


@contextmanager
def status() -> Generator["Status"]:
    """A line on standard error that says what is being done, on terminals only, and is gone when the block ends."""
    shown = Status(sys.stderr)
    try:
        yield shown
    finally:
        shown.clear()


class Status:
    """The line of `status`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream if moves(stream) else None

    def show(self, line: str) -> None:
        """Shows `line` instead of the last one."""
        self._write(CLEAR + line)

    def clear(self) -> None:
        """Shows nothing."""
        self._write(CLEAR)

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()
