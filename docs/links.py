"""Links of pages to what the site does not have, `benchmarks/`: into the repository, or plain text."""

import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(benchmarks/[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Return the page with its links absolute where the repository's address is set, else with the file's name."""
    if not config.repo_url:
        return LINK.sub(r"\1 (`\2`)", markdown)
    return LINK.sub(rf"[\1]({config.repo_url.rstrip('/')}/blob/HEAD/\2\3)", markdown)
