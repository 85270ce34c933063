"""A pipeline's state in other tools' checkpoints: gathered in the first rank's file, or in a file of each rank."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnddp.adapters.checkpoint import WORLD_SIZE, Checkpoint, HasSync, shares
from fnddp.core.agreement import agree
from fnddp.core.state import parts
from fnddp.core.sync import LOCAL
from fnddp.wire import control, groups


def gathered(owner: HasSync, group: str | None) -> dict[str, Any]:
    """Return the state of all ranks in one flat dict on the CPU, on the first rank; on the others an empty one.

    All ranks must call it. Only local parts travel. The wrong choice where they do not fit into the first rank's
    memory, as many times as there are ranks: let `torch.distributed.checkpoint` write a `Checkpoint`.
    """
    mine = _on_cpu(owner, group)
    everyone = [mine]
    if any(part.kind == LOCAL for part in parts(owner.sync_state)):
        everyone = control.gather_object(mine, group)
    if groups.rank(group) != 0:
        return {}
    return {key: value for each in everyone for key, value in each.items()}


def load_gathered(owner: HasSync, group: str | None, saved: Mapping[str, Any]) -> None:
    """Set the state of `owner` to the result of `gathered`, on as many ranks or on others: see `shares`.

    Raises:
        ValueError: It is of another pipeline or other parameters.
    """
    Checkpoint(owner, group, saved[WORLD_SIZE]).load_state_dict(saved)


def save_file(owner: HasSync, group: str | None, folder: str | Path, name: str) -> None:
    """Write this rank's state to `folder/name-rank<r>.pt`. All ranks call it; nothing is sent."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(_on_cpu(owner, group), _path(folder, name, groups.rank(group)))


def load_files(owner: HasSync, group: str | None, folder: str | Path, name: str) -> bool:
    """Set the state of `owner` to what as many ranks, or others, have written with `save_file`; see `shares`.

    All ranks call it. As many ranks need each its own file; others need a folder that all of them see.

    Returns:
        False if there is no file, on any rank.

    Raises:
        FileNotFoundError, ValueError: A file is missing or of another pipeline; the other ranks raise a
            RankMismatchError.
    """
    saved: dict[str, Any] = {}

    def read() -> dict[str, str]:
        mine = _path(folder, name, groups.rank(group))
        first = _read(mine if mine.exists() else _path(folder, name, 0))
        wanted = shares(groups.rank(group), groups.world_size(group), first[WORLD_SIZE])
        saved.update({key: value for r in wanted for key, value in _read(_path(folder, name, r)).items()})
        Checkpoint(owner, group).require_fitting(saved)
        return {"the number of ranks that saved": str(first[WORLD_SIZE])}

    found = any(Path(folder).glob(f"{name}-rank*.pt"))
    if b"\1" not in control.all_gather_bytes(bytes([found]), group):
        return False
    agree(read, group)  # before any state is set
    load_gathered(owner, group, saved)
    return True


def _path(folder: str | Path, name: str, rank: int) -> Path:
    return Path(folder) / f"{name}-rank{rank}.pt"


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(
            f"there is no {path}: each rank has written a file of its own, and another number of ranks reads them all; "
            "put them into a folder that all ranks see"
        )
    return torch.load(path, map_location="cpu", weights_only=True)


def _on_cpu(owner: HasSync, group: str | None) -> dict[str, Any]:
    saved = Checkpoint(owner, group).state_dict()
    return {key: value.cpu() if isinstance(value, Tensor) else value for key, value in saved.items()}
