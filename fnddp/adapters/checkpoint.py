"""A pipeline's state in checkpoints: torch's distributed ones, the first rank's file, or a file of each rank."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Tensor

from fnddp.core.agreement import agree
from fnddp.core.parse import parse
from fnddp.core.state import FEW, differing, load_state_dict, parts, state_dict
from fnddp.core.sync import LOCAL, State, Sync
from fnddp.core.tree import is_inexact
from fnddp.wire import control, groups

_WORLD_SIZE = "world_size"  # key of the number of ranks that saved a checkpoint
_PARTS = "parts"
_PIPELINE = "pipeline"
_ORDER = "order"  # of gradients, which the owner's first step has learnt

BEGIN_ANEW = "reset_sync=True to `load`, `prepare`, the Trainer or the strategy, to begin with an initial state"
"""What an error names for a checkpoint whose state of the pipeline cannot be loaded."""


class HasSync(Protocol):
    """An object that has a pipeline and its state."""

    @property
    def sync(self) -> Sync:
        """The pipeline."""
        ...

    @property
    def sync_state(self) -> State:
        """Its state."""
        ...

    def prepare_state(self, read: Callable[[], State]) -> Callable[[], None]:
        """See `HasPipeline.prepare_state`."""
        ...


class HasOrder(Protocol):
    """An object that learns in which order gradients come, by which it lays out buckets."""

    @property
    def learnt_order(self) -> list[str]: ...

    @learnt_order.setter
    def learnt_order(self, order: list[str]) -> None: ...


class HasCheckpoint(Protocol):
    """A `fnddp.DistributedDataParallel`, or the result of `register`, `compress` or its parts."""

    def reset_sync(self) -> None: ...

    def sync_checkpoint(self, saved_world_size: int | None = None) -> "Checkpoint": ...


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
        adopt: Replaces the owner's pipeline, which was measured, by that of a checkpoint; None if it stays.
        order: Its order of gradients is saved, and set if there is one; None if nothing depends on it.
    """

    def __init__(
        self,
        owner: HasSync,
        group: str | None,
        saved_world_size: int | None = None,
        prefix: str = "",
        place: tuple[int, int] | None = None,
        adopt: Callable[[Sync], None] | None = None,
        order: HasOrder | None = None,
    ) -> None:
        self._owner, self._prefix, self._adopt, self._order = owner, prefix, adopt, order
        rank, size = place or (groups.rank(group), groups.world_size(group))
        self._saved_size = saved_world_size or size
        self._shares = shares(rank, size, self._saved_size)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, ints and lists of text to save, or to load into, in memory of their own."""
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
        """True if ranks have parts of the state that differ."""
        return any(part.kind == LOCAL for part in parts(self._owner.sync_state))

    def about(self) -> dict[str, Any]:
        """Return the entries of `state_dict` that describe it: enough for `require_fitting`."""
        return {self._prefix + key: value for key, value in self._about([]).items()}

    def require_alone(self, ranks: Collection[int]) -> None:
        """Raise a ValueError if `ranks`, which save together, have other parameters than this one."""

    def saved_by(self, saved: Mapping[str, Any]) -> int:
        """Return the number of ranks that saved the checkpoint `saved`."""
        return saved[self._prefix + _WORLD_SIZE]

    def adopt_pipeline(self, saved: Mapping[str, Any]) -> None:
        """Continue with the pipeline of the checkpoint `saved`, if the owner's was measured. All ranks call it."""
        if self._adopt is not None and self._differs(saved):
            self._adopt(parse(saved[self._prefix + _PIPELINE]))

    def _differs(self, saved: Mapping[str, Any]) -> bool:
        return saved[self._prefix + _PIPELINE] != self._about([])[_PIPELINE]

    def require_fitting(self, saved: Mapping[str, Any]) -> None:
        """Raise a ValueError if `saved` is of other parameters, or of another pipeline that is not adopted."""
        if self._adopt is not None and self._differs(saved):
            return
        have = saved[self._prefix + _PARTS]
        want = [part.key for part in parts(self._owner.sync_state)]
        if set(have) != set(want):
            raise self._unfitting(saved, differing(have, want))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the state: see `prepare`."""
        self.prepare(state_dict)()

    def prepare(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """Return a function that sets the state, when all ranks agree on it.

        Raises:
            RankMismatchError: On all ranks, if they disagree, or another one raises.
            ValueError: The checkpoint is of another pipeline or other parameters, or not of `saved_world_size` ranks.
        """
        if self.saved_by(state_dict) == self._saved_size:
            self.adopt_pipeline(state_dict)
        set_state = self._owner.prepare_state(lambda: self._read(state_dict))

        def set_all() -> None:
            set_state()
            if self._order is not None and self._prefix + _ORDER in state_dict:
                self._order.learnt_order = state_dict[self._prefix + _ORDER]

        return set_all

    def _read(self, state_dict: Mapping[str, Any]) -> State:
        saved_by = self.saved_by(state_dict)
        if saved_by != self._saved_size:
            raise ValueError(
                f"sync_checkpoint: {saved_by} ranks have saved this checkpoint, and it is loaded as one of "
                f"{self._saved_size}, which would lose residuals; pass sync_checkpoint(saved_world_size={saved_by})"
            )
        self.require_fitting(state_dict)
        saved = {key.removeprefix(self._prefix): value for key, value in state_dict.items()}
        merged = {
            part.key: combined({r: saved[of_rank(r, part.key)] for r in self._shares}, self._shares)
            if part.kind == LOCAL
            else saved[part.key]
            for part in parts(self._owner.sync_state)
        }
        try:
            return load_state_dict(self._owner.sync_state, merged)
        except ValueError as error:
            raise self._unfitting(state_dict, str(error)) from error

    def _about(self, saved: list[str]) -> dict[str, Any]:
        return {_WORLD_SIZE: self._saved_size, _PARTS: saved, _PIPELINE: repr(self._owner.sync.over(None))}

    def _unfitting(self, saved: Mapping[str, Any], why: str) -> ValueError:
        return ValueError(
            f"the checkpoint has the state of {saved[self._prefix + _PIPELINE]}, which does not fit "
            f"{self._owner.sync.over(None)} for this model: {why}; give that pipeline, to train on with its state, or "
            f"{BEGIN_ANEW}"
        )


def shares(rank: int, size: int, saved_size: int) -> dict[int, float]:
    """Return the share of each saved rank's residual that this rank takes, so that the mean over ranks is as before.

    The ranks that saved, and those that load, each divide the interval [0, 1] evenly; shares are overlaps of the parts.
    So twice as many ranks each get a copy, half as many get the mean of two, and no residual grows.

    >>> shares(0, 4, 2), shares(0, 2, 4), shares(1, 3, 2)
    ({0: 1.0}, {0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5})
    """
    # In units of 1 / (size * saved_size), where all borders are whole numbers.
    begin, end = rank * saved_size, (rank + 1) * saved_size
    overlaps = {r: min(end, (r + 1) * size) - max(begin, r * size) for r in range(saved_size)}
    return {r: overlap / saved_size for r, overlap in overlaps.items() if overlap > 0}


def combined(values: Mapping[int, Any], shares: Mapping[int, float]) -> Any:
    """Return the sum of `values` weighted by `shares`; of integers, the value with the largest share."""
    if len(values) == 1 or not all(isinstance(v, Tensor) and is_inexact(v) for v in values.values()):
        return values[max(shares, key=shares.__getitem__)]
    return torch.stack([share * values[r] for r, share in shares.items()]).sum(0)


def of_rank(rank: int, key: str) -> str:
    """Return the key of a local part of `rank`."""
    return f"rank{rank}/{key}"


def gathered(checkpoint: Checkpoint, group: str | None) -> dict[str, Any]:
    """Return the state of all ranks as one flat dict on the CPU of the first rank; on other ranks an empty dict.

    All ranks must call it. Only local parts are sent. The wrong choice where those of all ranks do not fit into the
    first rank's memory: let `torch.distributed.checkpoint` write a `Checkpoint`.
    """
    mine = _on_cpu(checkpoint)
    everyone = [mine]
    if checkpoint.has_local_parts:
        everyone = control.gather_object(mine, group)
    if groups.rank(group) != 0:
        return {}
    return {key: value for each in everyone for key, value in each.items()}


def load_gathered(owner: HasCheckpoint, saved: Mapping[str, Any]) -> None:
    """Set the state of `owner` to the result of `gathered`, on as many ranks or on others: see `shares`.

    Raises:
        ValueError: `saved` is of another pipeline or other parameters.
    """
    owner.sync_checkpoint(saved[_WORLD_SIZE]).load_state_dict(saved)


def save_file(checkpoint: Checkpoint, group: str | None, folder: str | Path, name: str) -> None:
    """Write this rank's state to `folder/name-rank<r>.pt`; nothing is sent.

    All ranks call it, or one alone if there are no local parts.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(_on_cpu(checkpoint), file_of(folder, name, groups.rank(group)))


def load_files(owner: HasCheckpoint, group: str | None, folder: str | Path, name: str) -> bool:
    """Set the state of `owner` from the files of `save_file`, written by as many ranks or another number: see `shares`.

    All ranks must call it. As many ranks each read only their own file; another number of ranks reads all files. Where
    the state has no local parts, one file is enough.

    Returns:
        False if there is no file, on any rank.

    Raises:
        FileNotFoundError: On all ranks: files are missing, which it names.
        ValueError: Files that this rank reads have other entries; the other ranks raise a RankMismatchError.
        RankMismatchError: On all ranks: their files have other entries.
        ValueError: On all ranks: all files are of another pipeline, or other parameters.
    """
    owner.sync_checkpoint()  # ends a step that has broken off on this rank, in which the others wait
    mine = file_of(folder, name, groups.rank(group))
    found = sorted(Path(folder).glob(f"{name}-rank*.pt"), key=lambda path: path != mine)  # this rank's own first
    if not any(control.all_gather_object(bool(found), group)):
        return False
    saved: dict[str, Any] = {}
    missing: list[Path] = []

    def read() -> dict[str, str]:
        if not found:
            raise _missing(folder, [mine])
        first = _read(found[0])
        of_ranks = shares(groups.rank(group), groups.world_size(group), first[_WORLD_SIZE])
        has_local_parts = any(key.startswith(f"{LOCAL}/") for key in first[_PARTS])
        wanted = [file_of(folder, name, r) for r in of_ranks] if has_local_parts else found[:1]
        missing.extend(path for path in wanted if path not in found)
        for each in (_read(path) for path in wanted if path in found):
            if _origin(each) != _origin(first):
                raise ValueError(f"{folder} has files of different runs: {_origin(first)}, and {_origin(each)}")
            saved.update(each)
        return _origin(first)

    agree(read, group)  # before any state is set
    if absent := list(dict.fromkeys(path for each in control.all_gather_object(missing, group) for path in each)):
        raise _missing(folder, absent)
    load_gathered(owner, saved)
    return True


def file_of(folder: str | Path, name: str, rank: int) -> Path:
    """Return the path of the file that `save_file` writes on `rank`."""
    return Path(folder) / f"{name}-rank{rank}.pt"


def _origin(saved: Mapping[str, Any]) -> dict[str, str]:
    """Return what files that were saved together have in common."""
    entries = "\n".join(sorted(saved[_PARTS])).encode()
    return {
        "the number of ranks that saved": str(saved[_WORLD_SIZE]),
        "their pipeline": saved[_PIPELINE],
        "their state": f"{len(saved[_PARTS])} entries, whose names have the sum {crc32(entries):08x}",
    }


def _missing(folder: str | Path, paths: Sequence[Path]) -> FileNotFoundError:
    names = ", ".join(path.name for path in paths[:FEW]) + f" and {len(paths) - FEW} more" * (len(paths) > FEW)
    return FileNotFoundError(
        f"there is no {names} in {folder}: each rank has a part of the pipeline's state of its own, for which it must "
        "save a file (accelerator.save_state on all ranks, not on the main process alone) in a folder that all ranks "
        f"see; to go on without that state, give {BEGIN_ANEW}"
    )


def _read(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


def _on_cpu(checkpoint: Checkpoint) -> dict[str, Any]:
    return {key: v.cpu() if isinstance(v, Tensor) else v for key, v in checkpoint.state_dict().items()}
