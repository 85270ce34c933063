"""Fragments of a model: leaves that are exchanged together."""

import re
from fnmatch import translate
from typing import TypeAlias

from fnddp.options import checked_int
from fnddp.schedules.partition import split_by_pattern
from fnddp.tree import Leaves

Fragments: TypeAlias = int | tuple[str, ...]


def checked_fragments(owner: str, fragments: object) -> Fragments:
    """Return `fragments` as a number or a tuple of patterns; raise if it is neither, empty, or repeats a pattern."""
    if isinstance(fragments, list | tuple):
        patterns = tuple(fragments)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"{owner}: fragments must be a number, or patterns of leaf paths, got {fragments!r}")
        if not patterns or len(set(patterns)) < len(patterns):
            raise ValueError(f"{owner}: fragments must be different patterns, at least one, got {fragments!r}")
        return patterns
    number = checked_int(f"{owner}: fragments", fragments)
    if number < 1:
        raise ValueError(f"{owner}: fragments must be at least 1, got {number!r}")
    return number


def divided(owner: str, leaves: Leaves, fragments: Fragments) -> list[Leaves]:
    """Return the leaves of each fragment: runs of about the same size, or the leaves of each pattern.

    >>> import torch
    >>> [list(part) for part in divided("", {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(9)}, 2)]
    [['a', 'b'], ['c']]
    """
    if not isinstance(fragments, int):
        patterns = {pattern: re.compile(translate(pattern)) for pattern in fragments}
        return list(split_by_pattern(owner, leaves, patterns).values())
    if len(leaves) < fragments:
        raise ValueError(f"{owner}: {len(leaves)} leaves cannot be {fragments} fragments; a leaf is not divided")
    runs: list[Leaves] = []
    paths, left = list(leaves), sum(leaf.numel() for leaf in leaves.values())
    for later in reversed(range(fragments)):  # runs after this one
        run, size, target = list[str](), 0, left / (later + 1)
        while len(paths) > later:
            following = leaves[paths[0]].numel()
            if run and later and size + following - target > target - size:
                break
            run.append(paths.pop(0))
            size += following
        runs.append({path: leaves[path] for path in run})
        left -= size
    return runs
