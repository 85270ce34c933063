"""Bars that show progress, on terminals only."""

import sys

from rich.console import Console
from rich.progress import Progress, ProgressColumn

from fnddp.cli import terminal


def progress(*columns: ProgressColumn, quiet: bool = False) -> Progress:
    """Bars with `columns`, which are gone when their block ends; without colours where NO_COLOR is set."""
    console = Console(color_system="auto" if terminal.has_style(sys.stdout) else None)
    return Progress(*columns, console=console, transient=True, disable=quiet or not terminal.moves(sys.stdout))
