"""Engines whose steps are open at the same time on one process group take turns.

Each has a total order of its own collectives, but between two of them it would be the timing that decides, and that
differs between ranks. So the one that has begun first goes first; another only collects gradients until then.
"""

import weakref
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

from fnddp.wire.c10d import C10d
from fnddp.wire.groups import live_group
from fnddp.wire.protocol import Wire


class TakesTurns(Protocol):
    """What may have a step open."""

    is_open: bool


T = TypeVar("T", bound=TakesTurns)


# Engines of models that know nothing of each other meet nowhere but on their process group, or on another wire.
_open: "weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]]" = weakref.WeakKeyDictionary()


def begin(engine: T, wire: Wire, groups: Iterable[str | None]) -> list[T]:
    """Lines `engine` up behind those that have a step open on one of `groups`, which are returned."""
    ahead: list[T] = []
    for group in groups:
        line = _open.setdefault(live_group(group) if isinstance(wire, C10d) else wire, [])
        others = [other for other in (entry() for entry in line) if other is not None and other is not engine]
        waiting = [other for other in others if other.is_open]
        line[:] = [weakref.ref(other) for other in [*waiting, engine]]
        ahead += [other for other in waiting if other not in ahead]
    return ahead
