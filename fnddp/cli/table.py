"""Tables that fit a terminal: its width folds the first column, and numbers stay whole."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> Table:
    """The first column is text, the others are numbers; the caption explains them."""
    made = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    made.add_column(escape(headings[0]), overflow="fold")
    for heading in headings[1:]:
        made.add_column(escape(heading), justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*map(escape, row))
    return made
