"""What mkdocs does with pages of this site: files that they show, links into the repository, folded tables."""

import re
from html import escape, unescape
from itertools import cycle
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(benchmarks/[^)#\s]+)(#[^)\s]*)?\)")
SHOWN = re.compile(r"^\[[^\]]+\]\(\.\./((?:benchmarks/results|examples)/[^)\s]+|CHANGELOG\.md)\)$", re.MULTILINE)
FOLDS = re.compile(r'(?<=<div class="folds">).*?(?=</div>)', re.DOTALL)


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Show the file to which a line links alone; link to `benchmarks/`, a folder outside the site, or name the file.

    Where the repository is read as it is, on GitHub, the line is a link.
    """
    markdown = SHOWN.sub(_shown, markdown)
    if not config.repo_url:
        return LINK.sub(r"\1 (`\2`)", re.sub(rf"\({LINK.pattern}\)", r"(\1: `\2`)", markdown))
    return LINK.sub(rf"[\1]({config.repo_url.rstrip('/')}/blob/HEAD/\2\3)", markdown)


def _shown(link: re.Match[str]) -> str:
    file = f'--8<-- "{link[1]}"'
    return file if link[1].endswith(".md") else f"```{link[1].rpartition('.')[2]}\n{file}\n```"


def on_page_content(html: str, **_: Any) -> str:
    """Give each cell of a table that folds the name of its column; assets/fnddp.css shows it on a phone."""
    return FOLDS.sub(lambda table: _labelled(table[0]), html)


def _labelled(table: str) -> str:
    headers = re.findall(r"<th\b[^>]*>(.*?)</th>", table)
    names = cycle([escape(unescape(re.sub("<.*?>", "", header))) for header in headers])  # text, not HTML
    return re.sub(r"<td\b", lambda _: f'<td data-column="{next(names)}"', table)
