"""A pipeline's state in torch.distributed.checkpoint, also for another number of ranks."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from fnddp.state import load_state_dict, parts, state_dict
from fnddp.sync import LOCAL, State, Sync
from fnddp.tree import is_inexact
from fnddp.wire import control, groups

WORLD_SIZE = "world_size"  # the key under which a checkpoint says how many ranks have saved it
_PARTS = "parts"
_PIPELINE = "pipeline"


class HasState(Protocol):
    """What keeps the state of a pipeline."""

    sync_state: State


class HasSync(HasState, Protocol):
    """What keeps a pipeline and its state."""

    @property
    def sync(self) -> Sync:
        """The pipeline."""
        ...


class Checkpoint:
    """A `torch.distributed.checkpoint.stateful.Stateful` for the state of `owner`.

    What is replicated is saved once, and what is local once for each rank. Loaded by as many ranks as have saved it,
    training goes on to the bit. Other numbers of ranks get shares of the local parts (see `shares`).

    Args:
        owner: Its `sync_state` is saved and set.
        group: Name of its process group.
        saved_world_size: How many ranks have saved what is loaded; None for as many as there are.
    """

    def __init__(self, owner: HasState, group: str | None, saved_world_size: int | None = None) -> None:
        self._owner = owner
        size = groups.world_size(group)
        self._saved_size = saved_world_size or size
        self._shares = shares(groups.rank(group), size, self._saved_size)

    def state_dict(self) -> dict[str, Any]:
        """What to save; also called to say what to load, into memory of its own."""
        saved = state_dict(self._owner.sync_state)
        kinds = {part.key: part.kind for part in parts(self._owner.sync_state)}
        replicated = {key: value for key, value in saved.items() if kinds[key] != LOCAL}
        local = {key: value for key, value in saved.items() if kinds[key] == LOCAL}
        keyed = {_of_rank(r, key): value for r in self._shares for key, value in local.items()}
        everything = {**replicated, **keyed, WORLD_SIZE: self._saved_size, _PARTS: list(saved)}
        return {key: v.clone() if isinstance(v, Tensor) else v for key, v in everything.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets the state.

        Raises:
            ValueError: It is of another pipeline or other parameters, or of another number of ranks than was said.
        """
        saved_by = state_dict.get(WORLD_SIZE, self._saved_size)  # older ones do not say
        if saved_by != self._saved_size:
            raise ValueError(
                f"sync_checkpoint: {saved_by} ranks have saved this checkpoint, and it is loaded as one of "
                f"{self._saved_size}, which would lose residuals; pass sync_checkpoint(saved_world_size={saved_by})"
            )
        have, want = state_dict[_PARTS], [part.key for part in parts(self._owner.sync_state)]
        if set(have) != set(want):
            missing, unexpected = [key for key in want if key not in have], [key for key in have if key not in want]
            raise ValueError(
                f"sync_checkpoint: missing {missing}, unexpected {unexpected}: the state was saved from another "
                "pipeline or other parameters"
            )
        merged: dict[str, Any] = {}
        for part in parts(self._owner.sync_state):
            if part.kind == LOCAL:
                values = {r: state_dict[_of_rank(r, part.key)] for r in self._shares}
                merged[part.key] = combined(values, self._shares)
            else:
                merged[part.key] = state_dict[part.key]
        self._owner.sync_state = load_state_dict(self._owner.sync_state, merged)


def gathered(owner: HasSync, group: str | None) -> dict[str, Any]:
    """The state of all ranks in one flat dict on the CPU: for files that the first rank writes for all.

    All ranks must call it. Only local parts travel, none if there are none. The wrong choice where they do not fit into
    the first rank's memory, as many times as there are ranks: let `torch.distributed.checkpoint` write a `Checkpoint`.

    Args:
        owner: Whose state it is.
        group: Name of its process group.

    Returns:
        On the first rank what `load_gathered` takes, of tensors, ints and text; on the others nothing.
    """
    mine = Checkpoint(owner, group).state_dict()
    mine = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in mine.items()}
    everyone = [mine]
    if any(part.kind == LOCAL for part in parts(owner.sync_state)):
        everyone = control.gather_object(mine, group)
    if groups.rank(group) != 0:
        return {}
    return {_PIPELINE: repr(owner.sync.over(None)), **{key: v for each in everyone for key, v in each.items()}}


def load_gathered(owner: HasSync, group: str | None, saved: Mapping[str, Any]) -> None:
    """Sets the state of `owner` to what `gathered` gave, on as many ranks or on others: see `shares`.

    Raises:
        ValueError: It is of another pipeline or other parameters.
    """
    try:
        Checkpoint(owner, group, saved[WORLD_SIZE]).load_state_dict(saved)
    except ValueError as error:
        raise ValueError(
            f"the checkpoint has the state of {saved[_PIPELINE]}, which does not fit {owner.sync}: {error}"
        ) from error


def shares(rank: int, size: int, saved_size: int) -> dict[int, float]:
    """How much of which saved rank's residual becomes this one's, so that the mean over ranks is what it was.

    Ranks are laid out on a line of length 1, before and after; a rank takes what it covers. So twice as many ranks each
    get a copy, half as many the mean of two, and no residual grows.

    >>> shares(0, 4, 2), shares(0, 2, 4), shares(1, 3, 2)
    ({0: 1.0}, {0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5})
    """
    # In units of 1 / (size * saved_size), where all borders are whole numbers.
    begin, end = rank * saved_size, (rank + 1) * saved_size
    overlaps = {r: min(end, (r + 1) * size) - max(begin, r * size) for r in range(saved_size)}
    return {r: overlap / saved_size for r, overlap in overlaps.items() if overlap > 0}


def combined(values: Mapping[int, Any], shares: Mapping[int, float]) -> Any:
    """A rank's share of a local part. Of numbers that are no fractions it is that of the largest share."""
    if len(values) == 1 or not all(isinstance(v, Tensor) and is_inexact(v) for v in values.values()):
        return values[max(shares, key=shares.__getitem__)]
    return torch.stack([share * values[r] for r, share in shares.items()]).sum(0)


def _of_rank(rank: int, key: str) -> str:
    return f"rank{rank}/{key}"
