"""Process groups, and the simulated or planned worlds that replace them."""

import logging
import os
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from fnddp import torch_private
from fnddp.wire.protocol import Wire
from fnddp.wire.simulated import SimulatedRanks

_log = logging.getLogger("fnddp")

DEFAULT_GROUP = "default"
"""The name of the default group in traced graphs."""

LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "SLURM": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}
"""Environment variables that each launcher sets. Most specific first, because torchrun may run within a SLURM step."""


class GroupName(str):
    """The name of an existing process group. If torch gives the name to a later group, using it is an error.

    Attributes:
        plain: The name as a plain string.
        is_gone: True once the group is destroyed and nothing refers to it. Dynamo guards on it.
    """

    plain: str
    is_gone: bool
    _group: weakref.ref[dist.ProcessGroup]

    def __new__(cls, name: str, group: dist.ProcessGroup) -> "GroupName":
        made = super().__new__(cls, name)
        made.plain, made.is_gone = str(name), False
        made._group = weakref.ref(group, partial(_mark_gone, weakref.ref(made)))
        return made

    @staticmethod
    def of(name: str) -> str:
        """Return a `GroupName` of the group that has this name now; `name` itself if there is none, as in planning."""
        live = live_or_none(name)
        return name if live is None else GroupName(name, live)

    def stands_for(self, group: dist.ProcessGroup) -> bool:
        return self._group() is group

    def __reduce__(self) -> Any:
        return GroupName.of, (self.plain,)

    def __deepcopy__(self, _: Any) -> "GroupName":
        return self


def _mark_gone(name: weakref.ref[GroupName], _: object) -> None:
    if (gone := name()) is not None:
        gone.is_gone = True


WorldSize: TypeAlias = int | Mapping[str | None, int]
"""The number of ranks to plan for: one number for all groups, or one by group name (None is the default group)."""


@dataclass(frozen=True)
class World:
    """The ranks that a pipeline runs on, or is planned for, if they are not those of torch.distributed.

    Attributes:
        wire: The wire; None for torch.distributed.
        traced: True if collectives are recorded instead of run.
        size: Numbers of ranks to plan for. The groups need not exist.
        ranks: Divisors of means by group, if they are inputs of a graph and not the sizes of the groups.
        simulated: The ranks of a simulation.
        weight: This rank's weight in the means of `weighted`: a `Weight`, or a tensor that the host does not read.
        bucket_of: Function that returns the bucket of a leaf in the plan. Leaves of a bucket may be encoded together.
    """

    wire: Wire | None = None
    traced: bool = False
    size: WorldSize | None = None
    ranks: Mapping[str | None, Any] = field(default_factory=dict[str | None, Any])
    simulated: SimulatedRanks | None = None
    weight: Any = None
    bucket_of: Callable[[str], int | None] | None = None

    def size_of(self, groups: frozenset[str | None] | None) -> WorldSize | None:
        """Return the entries of `size` for `groups`; all entries for None."""
        if self.size is None or isinstance(self.size, int) or groups is None:
            return self.size
        return {group: n for group, n in self.size.items() if group in groups}


LIVE = World()
"""The world of torch.distributed."""

_world: ContextVar[World | None] = ContextVar("_world", default=None)


@contextmanager
def within(world: World) -> Generator[None]:
    token = _world.set(world)
    try:
        yield
    finally:
        _world.reset(token)


@torch_private.constant_for_dynamo
def _given() -> World | None:
    return _world.get()


def current() -> World:
    """Return the world of the innermost `within`, or the world of torch.distributed."""
    return _given() or LIVE  # a global, so that Dynamo can guard its attributes


def world_size(group: str | None) -> int:
    """Return the number of ranks in `group`; 1 without torch.distributed.

    Raises:
        RuntimeError: A launcher started several ranks but torch.distributed is not initialized, or there is no `group`.
        ValueError: The planned world has no number of ranks for `group`.
    """
    world = current()
    if world.simulated is not None:
        return world.simulated.size(group)
    if isinstance(world.size, int):
        return world.size
    if world.size is not None:
        if group not in world.size:
            which = "the default group (None)" if group is None else f"group {group!r}"
            raise ValueError(f"the plan has no number of ranks for {which}, only for {list(world.size)}; add it")
        return world.size[group]
    return live_size(group) if world.wire is None else world.wire.size(group)


def live_size(group: str | None) -> int:
    """Return the number of ranks in torch.distributed's `group`; 1 without torch.distributed."""
    if dist.is_initialized():
        if torch.compiler.is_compiling():  # Dynamo cannot trace the lookup of a group by name
            return torch_private.group_size(live_name(group))
        size = live_group(group).size()
        if group is None:
            warn_of_lone_ranks(size)
        return size
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


@cache
def warn_of_lone_ranks(size: int) -> None:
    """Log once on each rank that the default group has `size` ranks, if WORLD_SIZE is larger."""
    launched = os.environ.get("WORLD_SIZE", "")
    if launched.isdecimal() and int(launched) > size:
        _log.warning(
            f"WORLD_SIZE={launched}, but the default process group has {size}: gradients of the other ranks are left "
            "out; under torchrun, call torch.distributed.init_process_group() without rank, world_size and store"
        )


def is_slurm_shell() -> bool:
    """Return True in a process of a SLURM allocation that was not started by srun."""
    return "SLURM_PROCID" not in os.environ or os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")


def ranks(group: str | None) -> int:
    """Return the divisor of a mean over `group`: the number of ranks in the step. In a graph it is an input."""
    world = current()
    return world.ranks[group] if group in world.ranks else world_size(group)


def rank(group: str | None) -> Any:
    """Return this rank in `group`: an int, or a tensor in a simulation; 0 without torch.distributed."""
    world = current()
    if world.simulated is not None:
        return world.simulated.rank_in(group)
    if world.size is not None:
        return 0  # plans are those of the first rank
    return live_rank(group) if world.wire is None else world.wire.rank(group)


def live_rank(group: str | None) -> int:
    """Return this rank in torch.distributed's `group`; 0 without torch.distributed."""
    if not dist.is_initialized():
        return 0
    if group is not None and torch.compiler.is_compiling():
        return torch_private.rank_in(group)
    return dist.get_rank(live_group(group))


def is_alone() -> bool:
    """Return True without torch.distributed and without another world."""
    world = current()
    is_elsewhere = world.size is not None or world.wire is not None or world.simulated is not None
    return not is_elsewhere and not dist.is_initialized()


def identity(group: str | None) -> "weakref.ref[dist.ProcessGroup] | None":
    """Return a key of `group` that changes if the group is initialized again; None without torch.distributed."""
    live_size(group)  # raises if a process group is missing
    return weakref.ref(live_group(group)) if dist.is_initialized() else None


def live_name(group: str | None) -> str:
    return live_group(None).group_name if group is None else traced_name(group)


def traced_name(group: str) -> str:
    """Return the plain name (a constant for Dynamo of torch 2.11); raise a RuntimeError if the group `is_gone`."""
    if not isinstance(group, GroupName):
        return group
    if group.is_gone:
        raise RuntimeError(f"process group {group.plain!r} was destroyed; set up its users again")
    return group.plain


def live_group(group: str | None) -> dist.ProcessGroup:
    """Return the process group called `group`; raise a RuntimeError if there is none, or the name is another's now."""
    try:
        live = torch_private.live_group(group)
    except (RuntimeError, ValueError, KeyError) as error:
        which = "the default process group" if group is None else f"process group {group!r}"
        raise RuntimeError(
            f"{which} does not exist: it was destroyed, or never initialized ({error}); set up its users again"
        ) from error
    if isinstance(group, GroupName) and not group.stands_for(live):
        raise RuntimeError(
            f"process group {group.plain!r} was destroyed, and another group, of {live.size()} ranks, has its name "
            "now; set up its users again, over the new group"
        )
    return live


class Membership:
    """The process group of an object, stored to check later that it is still the same. None: the default group, if any.

    `then` and `fix` are the first and last words of the error.
    """

    def __init__(self, group: str | None, then: str, fix: str) -> None:
        self._group, self._then, self._fix = group, then, fix
        live = live_or_none(group)
        self._live, self._was = live and weakref.ref(live), _described(live)

    def require_same(self) -> None:
        """Raise a RuntimeError if the process group has been replaced, created or destroyed since."""
        live = live_or_none(self._group)
        if (live and weakref.ref(live)) != self._live:
            raise RuntimeError(
                f"{self._then} {self._was}, but it now runs {_described(live)}{', created since' if live else ''}: "
                f"gradients would not be the mean over its ranks; {self._fix}"
            )


def live_or_none(group: str | None) -> dist.ProcessGroup | None:
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
