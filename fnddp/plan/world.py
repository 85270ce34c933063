"""The world that a plan is made for, where its ranks need not be there."""

from collections.abc import Mapping
from typing import Any

from fnddp.core.expression import Expression
from fnddp.core.options import checked_int
from fnddp.wire.groups import World, WorldSize


def planned_world(pipeline: Expression, groups: frozenset[str | None] | None, world_size: WorldSize | None) -> World:
    """Return the world to plan `pipeline` for.

    Args:
        pipeline: A pipeline or an outer step, to be named in errors.
        groups: Those that it reduces over; None if it does not say.
        world_size: Of its group; or of each of its groups, by name; None for the groups that there are.

    Raises:
        ValueError: A size is not positive; several groups have one size; or sizes are given of other groups than those
            of the pipeline.
        TypeError: A size is not an integer.
    """
    if world_size is None:
        return World()
    if not isinstance(world_size, Mapping):
        n = _checked("world_size", world_size)
        if n > 1 and groups is not None and len(groups) > 1:
            raise ValueError(
                f"lower: {pipeline!r} reduces over {_named(groups)}, and world_size={n} does not say how many ranks "
                f"each of them has; give each number by name: world_size={_example(groups)}"
            )
        return World(size=n)
    sizes = {group: _checked(f"world_size[{group!r}]", n) for group, n in world_size.items()}
    if groups is not None and (sizes.keys() - groups or groups - sizes.keys()):
        raise ValueError(
            f"lower: world_size must give the size of each group of {pipeline!r}, which reduces over {_named(groups)}, "
            f"and of no other; got {sizes}"
        )
    return World(size=sizes)


def _checked(what: str, n: Any) -> int:
    if (size := checked_int(f"lower: {what}", n)) < 1:
        raise ValueError(f"lower: {what} must be at least 1, or None for the groups that there are, got {size}")
    return size


def _named(groups: frozenset[str | None]) -> str:
    names = ["the default group (None)" if group is None else f"group {group!r}" for group in _sorted(groups)]
    return " and ".join(names) or "no group"


def _example(groups: frozenset[str | None]) -> str:
    return f"{{{', '.join(f'{group!r}: ...' for group in _sorted(groups))}}}"


def _sorted(groups: frozenset[str | None]) -> list[str | None]:
    return sorted(groups, key=str)
