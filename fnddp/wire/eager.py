"""A pipeline without a plan, over any wire."""

from collections.abc import Callable
from typing import Any

from fnddp.wire.c10d import C10D
from fnddp.wire.groups import World, within
from fnddp.wire.protocol import Wire


def over(wire: Wire, sync: Callable[..., Any]) -> Callable[..., Any]:
    """Return `sync` with collectives over `wire`; itself over torch.distributed, which torch.compile traces."""
    if wire is C10D:
        return sync

    def run(*args: Any, **kwargs: Any) -> Any:
        with within(World(wire)):
            return sync(*args, **kwargs)

    return run
