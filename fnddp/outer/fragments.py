"""Fragments of a model: leaves that are exchanged together."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import Tensor

from fnddp.options import checked_int

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


def divided(owner: str, leaves: Mapping[str, Tensor], fragments: Fragments) -> list[list[str]]:
    """Return the paths of each fragment.

    A number of fragments makes runs of leaves, in order, of about the same number of elements. With patterns, a leaf
    belongs to the first one that matches it.

    Raises:
        ValueError: There are fewer leaves than fragments; a leaf matches no pattern, or a pattern no leaf.

    >>> import torch
    >>> divided("", {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(9)}, 2)
    [['a', 'b'], ['c']]
    """
    if isinstance(fragments, int):
        return _runs(owner, leaves, fragments)
    found: dict[str, list[str]] = {pattern: [] for pattern in fragments}
    for path in leaves:
        matching = [pattern for pattern in fragments if fnmatchcase(path, pattern)]
        if not matching:
            raise ValueError(f"{owner}: leaf {path!r} matches none of the fragments {list(fragments)}; add a pattern")
        found[matching[0]].append(path)
    for pattern, paths in found.items():
        if not paths:
            raise ValueError(f"{owner}: fragment {pattern!r} gets none of the leaves {list(leaves)}; remove or mend it")
    return list(found.values())


def _runs(owner: str, leaves: Mapping[str, Tensor], n: int) -> list[list[str]]:
    if len(leaves) < n:
        raise ValueError(f"{owner}: {len(leaves)} leaves cannot be {n} fragments; a leaf is not divided")
    sizes = {path: leaf.numel() for path, leaf in leaves.items()}
    runs: list[list[str]] = [[] for _ in range(n)]
    paths, left = list(sizes), sum(sizes.values())
    for i, run in enumerate(runs):
        size, target = 0, left / (n - i)
        while paths and len(paths) > n - i - 1:
            following = sizes[paths[0]]
            if run and i < n - 1 and size + following - target > target - size:
                break
            run.append(paths.pop(0))
            size += following
        left -= size
    return runs
