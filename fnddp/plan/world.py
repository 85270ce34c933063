"""The world of a plan for ranks that need not be there."""

from collections.abc import Mapping
from typing import Any

from fnddp.core.expression import Expression
from fnddp.core.options import checked_int
from fnddp.wire.groups import World, WorldSize


def planned_world(pipeline: Expression, groups: frozenset[str | None] | None, world_size: WorldSize | None) -> World:
    """Return the world to plan `pipeline` for.

    Args:
        pipeline: A pipeline or an outer step, to be named in errors.
        groups: Those that it reduces over; None if unknown.
        world_size: See `lower`.

    Raises:
        ValueError: A size is not positive; several groups have one size; or sizes are given of other groups than those
            of the pipeline.
        TypeError: A size is not an integer.
    """
    if world_size is None:
        return World()
    known = sorted(groups or (), key=str)
    names = ["the default group (None)" if group is None else f"group {group!r}" for group in known] or ["no group"]
    over = " and ".join(names)
    if not isinstance(world_size, Mapping):
        n = _checked("world_size", world_size)
        if n > 1 and len(known) > 1:
            raise ValueError(
                f"lower: {pipeline!r} reduces over {over}, and world_size={n} does not say how many ranks each of them "
                f"has; give each number by name: world_size={{{', '.join(f'{group!r}: ...' for group in known)}}}"
            )
        return World(size=n)
    sizes = {group: _checked(f"world_size[{group!r}]", n) for group, n in world_size.items()}
    if groups is not None and sizes.keys() != groups:
        raise ValueError(
            f"lower: world_size must give the size of each group of {pipeline!r}, which reduces over {over}, and of no "
            f"other; got {sizes}"
        )
    return World(size=sizes)


def _checked(what: str, n: Any) -> int:
    if (size := checked_int(f"lower: {what}", n)) < 1:
        raise ValueError(f"lower: {what} must be at least 1, or None for the groups that there are, got {size}")
    return size
