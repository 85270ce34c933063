"""Checks before ranks are started. Each raises a `WrongArgument` for the user."""

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from fnddp.cli import models, terminal
from fnddp.cli.failures import WrongArgument, wrong_if
from fnddp.core.parse import parse
from fnddp.core.sync import Sync
from fnddp.cost.estimate import Links
from fnddp.cost.link import Link
from fnddp.wire.groups import DEFAULT_GROUP, WorldSize

T = TypeVar("T")


def check_model(name: str, *, trains: bool = True) -> dict[str, Tensor]:
    """Return the parameters of the model `name`, without values."""
    with terminal.progress(f"loading {name}"):
        if trains:
            models.load(name)
        parameters = models.parameters(name)
    if not parameters:
        raise WrongArgument(f"{name} has no parameters that require gradients: there is nothing to synchronize")
    return parameters


def check_pipelines(texts: Sequence[str], parameters: Mapping[str, Tensor], *, runs: bool = True) -> list[Sync]:
    """Return the pipelines that `texts` describe, if they fit `parameters` and, with `runs`, need no weight."""

    def check(text: str) -> Sync:
        with wrong_if(TypeError, ValueError, RuntimeError):  # RuntimeError: a named group does not exist
            sync = parse(text)
            sync.init(parameters)
        if runs and sync.takes_weight:
            raise WrongArgument(f"{text} needs a weight in each step, which commands do not pass; remove weighted")
        return sync

    with terminal.progress("checking pipelines"):
        return [*map(check, texts)]


def check_imports(names: Iterable[str] | None) -> tuple[str, ...]:
    with wrong_if(WrongArgument, option="--import: "):
        for name in names or ():
            models.imported(name)
    return tuple(names or ())


def cores() -> int:
    """Return the number of cores that this process may use: SLURM, for example, may have set a cpuset."""
    return len(os.sched_getaffinity(0))


def check_link(text: str) -> Link:
    with wrong_if(ValueError, option="--link: "):
        return Link.parse(text)


def check_sizes(text: str) -> WorldSize:
    """Return the numbers of ranks that `text` describes: "8", or "node=8,across=128", by group."""

    def read(n: str) -> int:
        if not n.isdecimal() or int(n) < 1:
            raise WrongArgument(
                f"--ranks must be a whole number of at least 1, or one for each group, node=8,across=128, got {text!r}"
            )
        return int(n)

    return _by_group("--ranks", text, read)


def check_links(text: str) -> Links:
    """Return the link that `text` describes, or links by group: "node=100GB/s,across=25gbit:20us"."""
    return _by_group("--link", text, check_link)


def _by_group(option: str, text: str, read: Callable[[str], T]) -> "T | dict[str | None, T]":
    if not {",", "="} & set(text):
        return read(text)
    found: dict[str | None, T] = {}
    for part in text.split(","):
        name, separator, value = part.rpartition("=")
        group = name.strip() if separator else None
        if group in found:
            raise WrongArgument(f"{option} {text}: {_named(group)} is given twice")
        found[group] = read(value.strip())
    return found


def check_groups(option: str, text: str, given: object, syncs: Sequence[Sync]) -> None:
    """Raise a WrongArgument unless `given` is for all groups of `syncs` and for no other."""
    wanted = sorted({group for sync in syncs for group in sync.groups or ()}, key=str)
    if isinstance(given, Mapping):
        fits = given.keys() == set(wanted)
    else:  # one link may be for all groups, but one number of ranks is for one group
        fits = not isinstance(given, int) or given == 1 or all(len(sync.groups or ()) < 2 for sync in syncs)
    if fits:
        return
    names = " and ".join(map(_named, wanted)) or "no group"
    parts = ",".join(f"{group}=..." if group else "..." for group in wanted)
    raise WrongArgument(f"{option} {text}: the pipelines reduce over {names}; give {option} {parts}")


def _named(group: str | None) -> str:
    return f"the {DEFAULT_GROUP} group" if group is None else f"group {group!r}"


def check_writable(path: Path, option: str, *, is_folder: bool = False) -> None:
    """Check that a file or a folder can be written, without changing it."""
    try:
        if path.exists() and not is_folder:
            with path.open("ab"):
                return
        whole = path.absolute()
        made = next(each for each in (whole, *whole.parents) if each.exists()) if is_folder else whole.parent
        with tempfile.TemporaryFile(dir=made):
            pass
    except OSError as error:
        raise WrongArgument(f"{option}: cannot write {path}: {error.strerror}; choose another path") from error
