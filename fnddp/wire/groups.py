"""Process groups, and the worlds that a pipeline may be planned for or run in instead."""

import os
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from fnddp import torch_private
from fnddp.wire.protocol import Wire
from fnddp.wire.simulated import Ranks

DEFAULT_GROUP = "default"
"""The name of the default group in a graph that is traced."""

LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "SLURM": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}
"""The variables that each launcher sets, the most specific first: torchrun may run within a step of SLURM."""


WorldSize: TypeAlias = int | Mapping[str | None, int]
"""The number of ranks to plan for: of every group, or of each by name (None: the default group)."""


@dataclass(frozen=True)
class World:
    """The ranks that a pipeline runs on, or is planned for, if not those of torch.distributed.

    Attributes:
        wire: None for torch.distributed.
        traced: Whether collectives are recorded, not run.
        size: Numbers of ranks of the groups that a plan is made for, which need not exist.
        ranks: Divisors of means, by group, if other than the size: numbers that a graph takes as inputs.
        simulated: The ranks of a simulation.
        bucket_of: Returns the bucket of a leaf in the plan that is made: those of one bucket may be encoded together.
    """

    wire: Wire | None = None
    traced: bool = False
    size: WorldSize | None = None
    ranks: Mapping[str | None, Any] = field(default_factory=dict[str | None, Any])
    simulated: Ranks | None = None
    bucket_of: Callable[[str], int | None] | None = None

    def size_of(self, groups: frozenset[str | None] | None) -> WorldSize | None:
        """Return the part of `size` that is about `groups`; all of it for None."""
        if self.size is None or isinstance(self.size, int) or groups is None:
            return self.size
        return {group: n for group, n in self.size.items() if group in groups}


LIVE = World()
"""The world of torch.distributed."""

_world: ContextVar[World | None] = ContextVar("_world", default=None)


@contextmanager
def within(world: World) -> Generator[None]:
    """Run the block in `world`."""
    token = _world.set(world)
    try:
        yield
    finally:
        _world.reset(token)


@torch_private.constant_for_dynamo
def _given() -> World | None:
    return _world.get()


def current() -> World:
    """Return the world that the innermost `within` has set, or that of torch.distributed."""
    return _given() or LIVE  # a global, whose attributes Dynamo can guard


def world_size(group: str | None) -> int:
    """Return the number of ranks in `group`; 1 without torch.distributed.

    Raises:
        RuntimeError: A launcher started several ranks but torch.distributed is not initialized; or there is no `group`.
        ValueError: A plan is made for groups of other names.
    """
    world = current()
    if world.simulated is not None:
        return world.simulated.size(group)
    if isinstance(world.size, int):
        return world.size
    if world.size is not None:
        if group not in world.size:
            which = "the default group (None)" if group is None else f"group {group!r}"
            raise ValueError(f"the plan has no number of ranks for {which}; there are those of {list(world.size)}")
        return world.size[group]
    return live_size(group) if world.wire is None else world.wire.size(group)


def live_size(group: str | None) -> int:
    """Return the number of ranks in `group` of torch.distributed; 1 without it."""
    if dist.is_initialized():
        # By name: Dynamo cannot trace the resolution of a named group.
        name = live_name(group)
        if torch.compiler.is_compiling():
            return torch_private.group_size(name)
        return live_group(group).size()
    if group is not None:
        raise RuntimeError(f"process group {group!r} is named, but torch.distributed is not initialized")
    require_alone()
    return 1


def require_alone() -> None:
    """Raise a RuntimeError if a launcher has started several ranks."""
    for _, variable, _ in LAUNCHERS.values():
        launched = os.environ.get(variable, "1")
        if launched not in ("1", "") and not (variable == "SLURM_NTASKS" and is_slurm_shell()):
            raise RuntimeError(
                f"the launcher started {launched} ranks, but torch.distributed is not initialized "
                f"({variable}={launched}), so nothing would be synchronized; call "
                f"torch.distributed.init_process_group() first, or unset {variable} to train alone"
            )


def is_slurm_shell() -> bool:
    """Return whether this is one process in an allocation, which srun has not started."""
    return "SLURM_PROCID" not in os.environ or os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")


def ranks(group: str | None) -> int:
    """Return the divisor of a mean over `group`: the ranks that take part in the step. A graph takes it as an input."""
    world = current()
    return world.ranks[group] if group in world.ranks else world_size(group)


def rank(group: str | None) -> Any:
    """Return this rank in `group`, an int, or a tensor where ranks are simulated; 0 without torch.distributed."""
    world = current()
    if world.simulated is not None:
        return world.simulated.rank_in(group)
    if world.size is not None:
        return 0  # plans for ranks that need not exist are made for rank 0
    return live_rank(group) if world.wire is None else world.wire.rank(group)


def live_rank(group: str | None) -> int:
    """Return this rank in `group` of torch.distributed; 0 without it."""
    return dist.get_rank(live_group(group)) if dist.is_initialized() else 0


def is_alone() -> bool:
    """Return whether there is no other rank: no process group, and no other wire or plan for one."""
    world = current()
    is_elsewhere = world.size is not None or world.wire is not None or world.simulated is not None
    return not is_elsewhere and not dist.is_initialized()


def identity(group: str | None) -> "weakref.ref[dist.ProcessGroup] | None":
    """Return another object if `group` was initialized again, by the same name; None without torch.distributed."""
    live_size(group)
    return weakref.ref(live_group(group)) if dist.is_initialized() else None


def live_name(group: str | None) -> str:
    """Return the name of `group` in torch.distributed."""
    return live_group(None).group_name if group is None else group


def live_group(group: str | None) -> dist.ProcessGroup:
    """Return the process group called `group`; raise a RuntimeError if there is none."""
    try:
        return torch_private.live_group(group)
    except (RuntimeError, ValueError, KeyError) as error:
        which = "the default process group" if group is None else f"process group {group!r}"
        raise RuntimeError(
            f"{which} does not exist: it was destroyed, or never initialized ({error}); what was made for it must be "
            "made again"
        ) from error


class Membership:
    """The process group for which something was made, which may be gone later.

    For the error, `then` says what happened in the group, and `fix` what to do. None: the default group, or no group.
    """

    def __init__(self, group: str | None, then: str, fix: str) -> None:
        self._group, self._then, self._fix = group, then, fix
        live = _live_or_none(group)
        self._live, self._was = live and weakref.ref(live), _described(live)

    def require_same(self) -> None:
        """Raise a RuntimeError if there is another process group now, or none, or none was there before."""
        live = _live_or_none(self._group)
        if (live and weakref.ref(live)) != self._live:
            raise RuntimeError(
                f"{self._then} {self._was}, and now it runs {_described(live)}: gradients would not be the mean over "
                f"its ranks; {self._fix}"
            )


def _live_or_none(group: str | None) -> dist.ProcessGroup | None:
    if not dist.is_initialized():
        return None
    try:
        return torch_private.live_group(group)
    except RuntimeError:  # a named group that was destroyed
        return None


def _described(live: dist.ProcessGroup | None) -> str:
    if live is None:
        return "without a process group"
    return f"in the process group {live.group_name!r} of {live.size()} ranks"
