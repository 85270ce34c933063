"""What the first ring leaves to the second: all cases of a test but one of every few."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_of(every: int, cases: Iterable[Any]) -> list[Any]:
    """Return all cases, of which one of `every` runs in the first ring, which has to end within minutes."""
    marked: list[Any] = []
    for i, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=[pytest.mark.thorough] if i % every else []))
    return marked
