"""A pipeline for each group of leaves."""

import re
from collections.abc import Mapping
from dataclasses import field
from fnmatch import translate
from typing import ClassVar, NamedTuple

from fnddp.core import tree
from fnddp.core.options import checked_pairs
from fnddp.core.sync import Exchange, State, Sync, transform
from fnddp.core.tree import Leaves, Tree

MAX_PATTERN = 1000  # characters: patterns may come from hostile text, and compile in more than linear time


class PartitionState(NamedTuple):
    """`rules`: the state of each pattern's pipeline, by pattern."""

    rules: dict[str, State]


@transform
class partition(Sync):
    """Run on every leaf the pipeline of the first pattern that matches its path.

    Patterns are those of `fnmatch`, case-sensitive: `*.bias`, `layer4.*`, `*`. A leaf that matches none, and a pattern
    that gets none, are a ValueError in `init` and `exchange`, so that a typo is no silently uncompressed model.

    Args:
        rules: Pipelines by pattern; the first match wins.

    >>> import torch
    >>> from fnddp import allreduce, fp16
    >>> sync = partition({"*.bias": allreduce, "*": fp16(allreduce)})
    >>> sync
    partition({'*.bias': allreduce, '*': fp16(allreduce)})
    >>> sync.init({"fc.weight": torch.ones(2, 2)})
    Traceback (most recent call last):
        ...
    ValueError: partition: pattern '*.bias' gets none of the leaves ['fc.weight']; remove it or mend it
    """

    rules: Mapping[str, Sync] | tuple[tuple[str, Sync], ...]
    _compiled: dict[str, re.Pattern[str]] = field(init=False, repr=False, compare=False)

    wraps_skipping: ClassVar[bool] = True
    tables = frozenset({"rules"})

    def __post_init__(self) -> None:
        rules = checked_pairs("partition: rules must be a dict of pipelines by pattern", self.rules, Sync, str)
        object.__setattr__(self, "rules", rules)
        if not rules:
            raise ValueError("partition: no rules; write partition({'*': allreduce})")
        for pattern, _ in rules:
            if len(pattern) > MAX_PATTERN:
                raise ValueError(f"partition: a pattern has {len(pattern)} characters, more than {MAX_PATTERN}")
        if len(dict(rules)) < len(rules):
            raise ValueError(f"partition: a pattern occurs twice in {[pattern for pattern, _ in rules]}")
        # Compiled here: Dynamo can trace a match, but not the translation of a pattern.
        object.__setattr__(self, "_compiled", {pattern: re.compile(translate(pattern)) for pattern, _ in rules})

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        parts = split_by_pattern("partition", leaves, self._compiled)
        return PartitionState({pattern: sync.init(parts[pattern]) for pattern, sync in dict(self.rules).items()})

    def exchange(self, leaves: Leaves, state: PartitionState) -> Exchange:
        parts = split_by_pattern("partition", leaves, self._compiled)
        done = {
            pattern: sync.exchange(parts[pattern], state.rules[pattern]) for pattern, sync in dict(self.rules).items()
        }
        owner = {path: pattern for pattern, part in parts.items() for path in part}
        return Exchange(
            mean={path: done[owner[path]].mean[path] for path in leaves if path in done[owner[path]].mean},
            sent={path: done[owner[path]].sent[path] for path in leaves},
            state=PartitionState({pattern: exchange.state for pattern, exchange in done.items()}),
        )

    def reduces(self, path: str) -> bool:
        owner = next((sync for pattern, sync in dict(self.rules).items() if self._compiled[pattern].match(path)), None)
        return owner is None or owner.reduces(path)


def split_by_pattern(owner: str, leaves: Leaves, patterns: Mapping[str, re.Pattern[str]]) -> dict[str, Leaves]:
    """Return the leaves of each pattern, the first one that matches their path: see `partition`."""
    parts: dict[str, Leaves] = {pattern: {} for pattern in patterns}
    for path, leaf in leaves.items():
        for pattern, compiled in patterns.items():
            if compiled.match(path):
                parts[pattern][path] = leaf
                break
        else:
            raise ValueError(
                f"{owner}: leaf {path!r} matches none of the patterns {list(parts)}; add one, or '*' at the end"
            )
    for pattern, part in parts.items():
        if leaves and not part:  # a tree without leaves has none to miss
            raise ValueError(
                f"{owner}: pattern {pattern!r} gets none of the leaves {list(leaves)}; remove it or mend it"
            )
    return parts
