"""A pipeline's state in checkpoints of torch.distributed.checkpoint."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fnddp.core.agreement import reraise
from fnddp.core.parse import parse
from fnddp.core.state import differing, load_state_dict, parts, state_dict
from fnddp.core.sync import LOCAL, State, Sync
from fnddp.core.tree import is_inexact, replace_leaves
from fnddp.transforms.memory import narrowed, widened
from fnddp.wire import groups

_WORLD_SIZE = "world_size"  # key of the number of ranks that saved the checkpoint
_PARTS = "parts"
_PIPELINE = "pipeline"
_ORDER = "order"  # key of the order of gradients, learnt in the owner's first step

BEGIN_ANEW = "pass reset_sync=True to `load`, `prepare`, the Trainer or the strategy to begin with an initial state"
"""The advice in errors about a checkpoint with a pipeline state that cannot be loaded."""


class HasSync(Protocol):
    """An object that has a pipeline and its state."""

    @property
    def sync(self) -> Sync:
        """The pipeline."""
        ...

    @property
    def sync_state(self) -> State:
        """The pipeline's state."""
        ...

    def prepare_state(self, read: Callable[[], State]) -> Callable[[], None]:
        """See `HasPipeline.prepare_state`."""
        ...


class HasCheckpoint(Protocol):
    """A `fnddp.DistributedDataParallel`, or the result of `register`, `compress` or its parts."""

    def refuse(self, error: BaseException | None) -> None:
        """Refuse steps because `error` left wrong values in parameters; None to allow steps again.

        All ranks call it, between steps. Steps that are refused for another reason stay refused.
        """
        ...

    def reset_sync(self) -> None: ...

    def sync_checkpoint(self, saved_world_size: int | None = None) -> "Checkpoint": ...


class Checkpoint:
    """A `torch.distributed.checkpoint.stateful.Stateful` for the state of `owner`.

    Replicated parts are saved once, local parts once for each rank. If the number of ranks is the same at loading,
    training continues bitwise. Otherwise ranks get shares of the local parts (see `shares`).

    Args:
        owner: The object with the `sync_state` to save and set.
        group: Name of its process group.
        saved_world_size: The number of ranks that saved the checkpoint to load; None for the current number.
        prefix: Prefix of all keys, used if ranks outside of the group have different states.
        place: This rank and the number of ranks, if they are counted over several groups.
        adopt: Function that replaces the owner's measured pipeline by a checkpoint's; None to keep the owner's.
        has_order: True to save the owner's `learnt_order`, and to set it if the checkpoint has one.
    """

    def __init__(
        self,
        owner: HasSync,
        group: str | None,
        saved_world_size: int | None = None,
        prefix: str = "",
        place: tuple[int, int] | None = None,
        adopt: Callable[[Sync], None] | None = None,
        has_order: bool = False,
    ) -> None:
        self._owner, self._prefix, self._adopt = owner, prefix, adopt
        self._order: Any = owner if has_order else None
        rank, size = place or (groups.rank(group), groups.world_size(group))
        self._saved_size = saved_world_size or size
        self._shares = shares(rank, size, self._saved_size)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, ints and lists of text to save, or to load into, in separate memory."""
        saved = state_dict(self._owner.sync_state)
        local = {part.key for part in parts(self._owner.sync_state) if part.kind == LOCAL}
        keyed = {of_rank(r, key): value for r in self._shares for key, value in saved.items() if key in local}
        everything = {
            **{key: value for key, value in saved.items() if key not in local},
            **keyed,
            **self._about(list(saved)),
            _ORDER: [] if self._order is None else self._order.learnt_order,
        }
        return {self._prefix + key: v.clone() if isinstance(v, Tensor) else v for key, v in everything.items()}

    @property
    def has_local_parts(self) -> bool:
        """True if some parts of the state differ between ranks."""
        return any(part.kind == LOCAL for part in parts(self._owner.sync_state))

    def about(self) -> dict[str, Any]:
        """Return the entries of `state_dict` that describe it. They suffice for `require_fitting`."""
        return {self._prefix + key: value for key, value in self._about([]).items()}

    def require_alone(self, ranks: Collection[int]) -> None:
        """Raise a ValueError if `ranks` save together and some have other parameters; this base class never does."""

    def saved_by(self, saved: Mapping[str, Any]) -> int:
        """Return the number of ranks that saved the checkpoint `saved`."""
        if self._prefix + _WORLD_SIZE not in saved:
            raise ValueError(f"the checkpoint has no pipeline state for this rank; {BEGIN_ANEW}")
        return saved[self._prefix + _WORLD_SIZE]

    def adopt_pipeline(self, saved: Mapping[str, Any]) -> None:
        """Continue with the pipeline of the checkpoint `saved`, if the owner's was measured. All ranks call it."""
        if self._adopt is not None and self._differs(saved):
            self._adopt(parse(saved[self._prefix + _PIPELINE]))

    def _differs(self, saved: Mapping[str, Any]) -> bool:
        return saved[self._prefix + _PIPELINE] != self._about([])[_PIPELINE]

    def require_fitting(self, saved: Mapping[str, Any]) -> None:
        """Raise a ValueError if `saved` is of other parameters, or of another pipeline and that is not adopted."""
        if self._adopt is not None and self._differs(saved):
            return
        have = saved[self._prefix + _PARTS]
        want = [part.key for part in parts(self._owner.sync_state)]
        if set(have) != set(want):
            raise self._unfitting(saved, differing(have, want))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Compare the state between all ranks, and set it.

        Raises:
            RankMismatchError: On all ranks, if they disagree or one of them raises.
            ValueError: The checkpoint is of another pipeline or other parameters, or not of `saved_world_size` ranks.
        """
        self.prepare(state_dict, partial(self._read, state_dict))()

    def prepare(self, state_dict: Mapping[str, Any], read: Callable[[], State]) -> Callable[[], None]:
        """Compare the state that `read` returns between all ranks, and return a function that sets it."""
        try:
            if self.saved_by(state_dict) == self._saved_size:
                self.adopt_pipeline(state_dict)
        except Exception as error:  # the other ranks wait in `prepare_state`
            read = partial(reraise, error)
        set_state = self._owner.prepare_state(read)

        def set_all() -> None:
            set_state()
            if self._order is not None and self._prefix + _ORDER in state_dict:
                self._order.learnt_order = state_dict[self._prefix + _ORDER]

        return set_all

    def _read(self, state_dict: Mapping[str, Any]) -> State:
        saved_by = self.saved_by(state_dict)
        if saved_by != self._saved_size:
            raise ValueError(
                f"sync_checkpoint: {saved_by} ranks saved this checkpoint, but it is loaded as one of "
                f"{self._saved_size}, which would lose residuals; pass sync_checkpoint(saved_world_size={saved_by})"
            )
        self.require_fitting(state_dict)
        saved = {key.removeprefix(self._prefix): value for key, value in state_dict.items()}
        mine, states = self._owner.sync_state, dict[int, State]()
        for r in self._shares:
            keys = {part.key: of_rank(r, part.key) if part.kind == LOCAL else part.key for part in parts(mine)}
            try:
                states[r] = load_state_dict(mine, {key: saved[of] for key, of in keys.items()})
            except ValueError as error:
                raise self._unfitting(state_dict, str(error)) from error
        if len(states) == 1:
            return states.popitem()[1]
        same = zip(*[parts(widened(state)) for state in states.values()], strict=True)
        values = [
            combined({r: part.value for r, part in zip(states, each, strict=True)}, self._shares)
            if each[0].kind == LOCAL
            else each[0].value
            for each in same
        ]
        return narrowed(replace_leaves(mine, values))

    def _about(self, saved: list[str]) -> dict[str, Any]:
        return {_WORLD_SIZE: self._saved_size, _PARTS: saved, _PIPELINE: repr(self._owner.sync.over(None))}

    def _unfitting(self, saved: Mapping[str, Any], why: str) -> ValueError:
        return ValueError(
            f"the checkpoint has the state of {saved[self._prefix + _PIPELINE]}, which does not fit "
            f"{self._owner.sync.over(None)} for this model: {why}; use that pipeline to continue with its state, or "
            f"{BEGIN_ANEW}"
        )


class Checkpoints(Checkpoint):
    """The checkpoints of several axes or meshes as one: their keys differ by their prefixes."""

    def __init__(self, axes: Sequence[Checkpoint]) -> None:
        self._axes = axes

    def state_dict(self) -> dict[str, Any]:
        return {key: value for axis in self._axes for key, value in axis.state_dict().items()}

    def about(self) -> dict[str, Any]:
        return {key: value for axis in self._axes for key, value in axis.about().items()}

    def saved_by(self, saved: Mapping[str, Any]) -> Any:
        return tuple(axis.saved_by(saved) for axis in self._axes)

    def require_fitting(self, saved: Mapping[str, Any]) -> None:
        for axis in self._axes:
            axis.require_fitting(saved)

    def adopt_pipeline(self, saved: Mapping[str, Any]) -> None:
        for axis in self._axes:
            axis.adopt_pipeline(saved)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        set_states((partial(axis.prepare, state_dict), partial(axis._read, state_dict)) for axis in self._axes)


def set_states(axes: Iterable[tuple[Callable[[Callable[[], State]], Callable[[], None]], Callable[[], State]]]) -> None:
    """Set the states of several axes, each given as its `prepare_state` and the `read` to pass to it.

    If one axis raises, the remaining axes raise its error on their ranks, too, and nothing is set.
    """
    failure: Exception | None = None
    prepared: list[Callable[[], None]] = []
    for prepare, read in axes:
        try:
            prepared.append(prepare(read if failure is None else partial(reraise, failure)))
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    for set_state in prepared:
        set_state()


def shares(rank: int, size: int, saved_size: int) -> dict[int, float]:
    """Return the share of each saved rank's residual that this rank takes, so that the mean over ranks is unchanged.

    Saving ranks and loading ranks each divide the interval [0, 1] evenly, and shares are the overlaps of their parts.
    So with twice as many ranks each gets a copy, with half as many each gets a mean of two, and no residual grows.

    >>> shares(0, 4, 2), shares(0, 2, 4), shares(1, 3, 2)
    ({0: 1.0}, {0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5})
    """
    # In units of 1 / (size * saved_size), so that all borders are integers.
    begin, end = rank * saved_size, (rank + 1) * saved_size
    overlaps = {r: min(end, (r + 1) * size) - max(begin, r * size) for r in range(saved_size)}
    return {r: overlap / saved_size for r, overlap in overlaps.items() if overlap > 0}


def combined(values: Mapping[int, Any], shares: Mapping[int, float]) -> Any:
    """Return the sum of `values` weighted by `shares`; for integers, the value with the largest share."""
    if len(values) == 1 or not all(isinstance(v, Tensor) and is_inexact(v) for v in values.values()):
        return values[max(shares, key=shares.__getitem__)]
    return torch.stack([share * values[r] for r, share in shares.items()]).sum(0)


def of_rank(rank: int, key: str) -> str:
    """Return the key of a local part of `rank`."""
    return f"rank{rank}/{key}"
