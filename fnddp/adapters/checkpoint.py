"""A pipeline's state in torch.distributed.checkpoint, also for another number of ranks."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from fnddp.core.state import load_state_dict, parts, state_dict
from fnddp.core.sync import LOCAL, State, Sync
from fnddp.core.tree import is_inexact
from fnddp.wire import groups

WORLD_SIZE = "world_size"  # key of the number of ranks that saved a checkpoint
_PARTS = "parts"
_PIPELINE = "pipeline"


class HasSync(Protocol):
    """An object that has a pipeline and its state."""

    sync_state: State

    @property
    def sync(self) -> Sync:
        """The pipeline."""
        ...


class Checkpoint:
    """A `torch.distributed.checkpoint.stateful.Stateful` for the state of `owner`.

    Replicated parts are saved once, local parts once for each rank. Loaded by as many ranks as saved it, training
    continues to the bit. Other numbers of ranks get shares of the local parts (see `shares`).

    Args:
        owner: Its `sync_state` is saved and set.
        group: Name of its process group.
        saved_world_size: The number of ranks that saved what is loaded; None for as many as there are.
        prefix: Prefix of all keys, where ranks outside of the group have states of their own.
        place: This rank and the number of ranks, where they are those of several groups.
    """

    def __init__(
        self,
        owner: HasSync,
        group: str | None,
        saved_world_size: int | None = None,
        prefix: str = "",
        place: tuple[int, int] | None = None,
    ) -> None:
        self._owner, self._prefix = owner, prefix
        rank, size = place or (groups.rank(group), groups.world_size(group))
        self._saved_size = saved_world_size or size
        self._shares = shares(rank, size, self._saved_size)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, ints and lists of text to save, or to load into, in memory of their own."""
        saved = state_dict(self._owner.sync_state)
        kinds = {part.key: part.kind for part in parts(self._owner.sync_state)}
        replicated = {key: value for key, value in saved.items() if kinds[key] != LOCAL}
        local = {key: value for key, value in saved.items() if kinds[key] == LOCAL}
        keyed = {of_rank(r, key): value for r in self._shares for key, value in local.items()}
        everything = {**replicated, **keyed, **self._about(list(saved))}
        return {self._prefix + key: v.clone() if isinstance(v, Tensor) else v for key, v in everything.items()}

    def about(self) -> dict[str, Any]:
        """Return the entries of `state_dict` that describe it: enough for `require_fitting`."""
        return {self._prefix + key: value for key, value in self._about([]).items()}

    def saved_by(self, saved: Mapping[str, Any]) -> int:
        """Return the number of ranks that saved it."""
        return saved[self._prefix + WORLD_SIZE]

    def require_fitting(self, saved: Mapping[str, Any]) -> None:
        """Raise a ValueError if it is of another pipeline or other parameters."""
        have = saved[self._prefix + _PARTS]
        want = [part.key for part in parts(self._owner.sync_state)]
        if set(have) != set(want):
            missing, unexpected = [key for key in want if key not in have], [key for key in have if key not in want]
            raise self._unfitting(saved, f"missing {missing}, unexpected {unexpected}")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the state.

        Raises:
            ValueError: It is of another pipeline or other parameters, or not of `saved_world_size` ranks.
        """
        saved_by = self.saved_by(state_dict)
        if saved_by != self._saved_size:
            raise ValueError(
                f"sync_checkpoint: {saved_by} ranks have saved this checkpoint, and it is loaded as one of "
                f"{self._saved_size}, which would lose residuals; pass sync_checkpoint(saved_world_size={saved_by})"
            )
        self.require_fitting(state_dict)
        saved = {key.removeprefix(self._prefix): value for key, value in state_dict.items()}
        merged: dict[str, Any] = {}
        for part in parts(self._owner.sync_state):
            if part.kind == LOCAL:
                merged[part.key] = combined({r: saved[of_rank(r, part.key)] for r in self._shares}, self._shares)
            else:
                merged[part.key] = saved[part.key]
        try:
            self._owner.sync_state = load_state_dict(self._owner.sync_state, merged)
        except ValueError as error:
            raise self._unfitting(state_dict, str(error)) from error

    def _about(self, saved: list[str]) -> dict[str, Any]:
        return {WORLD_SIZE: self._saved_size, _PARTS: saved, _PIPELINE: repr(self._owner.sync.over(None))}

    def _unfitting(self, saved: Mapping[str, Any], why: str) -> ValueError:
        return ValueError(
            f"the checkpoint has the state of {saved[self._prefix + _PIPELINE]}, which does not fit "
            f"{self._owner.sync.over(None)} for this model: {why}"
        )


def shares(rank: int, size: int, saved_size: int) -> dict[int, float]:
    """Return the share of each saved rank's residual that this rank takes, so that the mean over ranks is as before.

    Ranks divide a line of length 1, before and after; a rank takes what it covers. So twice as many ranks each get a
    copy, half as many the mean of two, and no residual grows.

    >>> shares(0, 4, 2), shares(0, 2, 4), shares(1, 3, 2)
    ({0: 1.0}, {0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5})
    """
    # In units of 1 / (size * saved_size), where all borders are whole numbers.
    begin, end = rank * saved_size, (rank + 1) * saved_size
    overlaps = {r: min(end, (r + 1) * size) - max(begin, r * size) for r in range(saved_size)}
    return {r: overlap / saved_size for r, overlap in overlaps.items() if overlap > 0}


def combined(values: Mapping[int, Any], shares: Mapping[int, float]) -> Any:
    """Return a rank's share of a local part; of integers, the one with the largest share."""
    if len(values) == 1 or not all(isinstance(v, Tensor) and is_inexact(v) for v in values.values()):
        return values[max(shares, key=shares.__getitem__)]
    return torch.stack([share * values[r] for r, share in shares.items()]).sum(0)


def of_rank(rank: int, key: str) -> str:
    """Return the key of a local part of `rank`."""
    return f"rank{rank}/{key}"
