"""What mkdocs does with pages of this site: links into the repository, and tables that fold on a phone."""

import re
from itertools import cycle
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(benchmarks/[^)#\s]+)(#[^)\s]*)?\)")
FOLDS = re.compile(r'(?<=<div class="folds">).*?(?=</div>)', re.DOTALL)


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Link to `benchmarks/`, which the site does not have, in the repository, or name the file."""
    if not config.repo_url:
        return LINK.sub(r"\1 (`\2`)", re.sub(rf"\({LINK.pattern}\)", r"(\1: `\2`)", markdown))
    return LINK.sub(rf"[\1]({config.repo_url.rstrip('/')}/blob/HEAD/\2\3)", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Give each cell of a table that folds the name of its column, which assets/fnddp.css shows on a phone."""
    return FOLDS.sub(lambda table: _labelled(table[0]), html)


def _labelled(table: str) -> str:
    names = cycle(re.findall(r"<th\b[^>]*>(.*?)</th>", table))
    return re.sub(r"<td\b", lambda _: f'<td data-column="{next(names)}"', table)
