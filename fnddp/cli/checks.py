"""What commands check before they start anything."""

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from fnddp.cli import modules
from fnddp.cli.failures import WrongArgument
from fnddp.cli.modules import ModuleError
from fnddp.cost.link import Link
from fnddp.cost.queue import Links
from fnddp.parse import parse
from fnddp.show.text import count
from fnddp.sync import Sync
from fnddp.wire.groups import DEFAULT_GROUP, WorldSize

T = TypeVar("T")


def check_pipeline(text: str, parameters: Mapping[str, Tensor]) -> Sync:
    """The pipeline that `text` writes, if it fits `parameters`.

    Raises:
        WrongArgument: It does not parse, or cannot be initialized.
    """
    try:
        sync = parse(text)
        sync.init(parameters)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a group that is named, and is not there
        raise WrongArgument.of(error) from error
    return sync


def check_imports(names: Iterable[str]) -> None:
    """Imports the modules `names`.

    Raises:
        WrongArgument: One of them is not there, or raises.
    """
    for name in names:
        try:
            modules.load(name)
        except ModuleError as error:
            raise WrongArgument(f"--import: {error}") from error


RANKS_PER_CORE = 8


def cores() -> int:
    """Those that this process may use: a cpuset, of SLURM for example, may have cut them down."""
    return len(os.sched_getaffinity(0))


def check_processes(ranks: int) -> None:
    """Raises a WrongArgument if so many processes are more than this machine can run in a reasonable time."""
    most = RANKS_PER_CORE * cores()
    if ranks > most:
        raise WrongArgument(
            f"--ranks {ranks}: each is a process, and on {count(cores(), 'core')} at most {most} are started; "
            f"virtual ranks need none: fnddp tune --ranks {ranks}, or fnddp.simulate"
        )


def check_link(text: str) -> Link:
    """The link that `text` writes.

    Raises:
        WrongArgument: It is no link.
    """
    try:
        return Link.parse(text)
    except ValueError as error:
        raise WrongArgument(f"--link: {error}") from error


def check_sizes(text: str) -> WorldSize:
    """Return the numbers of ranks that `text` writes: "8", or "node=8,across=128", by group.

    Raises:
        WrongArgument: One of them is no positive whole number.
    """

    def read(n: str) -> int:
        if not n.isdecimal() or int(n) < 1:
            raise WrongArgument(
                f"--ranks must be a whole number of at least 1, or one for each group, node=8,across=128, got {text!r}"
            )
        return int(n)

    return _by_group("--ranks", text, read)


def check_links(text: str) -> Links:
    """Return the link that `text` writes, or those by group: "node=100GB/s,across=25gbit:20us".

    Raises:
        WrongArgument: One of them is no link.
    """
    return _by_group("--link", text, check_link)


def check_groups(option: str, text: str, given: object, syncs: Sequence[Sync]) -> None:
    """Raise a WrongArgument unless what is `given` by group has all groups of `syncs`, and no other.

    One link is that of all groups; one number of ranks is that of one group.
    """
    if not isinstance(given, Mapping):
        several = next((sync for sync in syncs if len(sync.groups or ()) > 1), None)
        if several is not None and isinstance(given, int) and given > 1:
            groups = sorted(several.groups or (), key=str)
            raise WrongArgument(
                f"{option} {text}: {several!r} reduces over {' and '.join(map(_named, groups))}; give the number of "
                f"ranks of each: {option} {','.join(f'{group}=N' if group else 'N' for group in groups)}"
            )
        return
    wanted = {group for sync in syncs for group in sync.groups or ()}
    if other := [group for group in given if group not in wanted]:
        raise WrongArgument(
            f"{option} {text}: no pipeline here reduces over {_named(other[0])}; there are "
            f"{', '.join(map(_named, sorted(wanted, key=str))) or 'none'}"
        )
    if missing := sorted(wanted - set(given), key=str):
        example = "a part without a name, such as 1024,node=8" if missing[0] is None else f"{missing[0]}=..."
        raise WrongArgument(f"{option} {text}: nothing is given for {_named(missing[0])}; add {example}")


def _by_group(option: str, text: str, read: Callable[[str], T]) -> "T | dict[str | None, T]":
    if not {",", "="} & set(text):
        return read(text)
    parts = [part.rpartition("=") for part in text.split(",")]
    names = [name.strip() if separator else None for name, separator, _ in parts]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise WrongArgument(f"{option} {text}: {_named(twice[0])} is given twice")
    return {name: read(value.strip()) for name, (_, _, value) in zip(names, parts, strict=True)}


def _named(group: str | None) -> str:
    return f"the {DEFAULT_GROUP} group" if group is None else f"group {group!r}"


def check_folder(out: Path) -> None:
    """Tries to write where `out` is or will be, and leaves nothing there.

    Raises:
        WrongArgument: It cannot be written to.
    """
    try:
        existing = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise WrongArgument(f"cannot write to {out}: {error.strerror}; choose another folder with --out") from error


def check_file(option: str, file: Path) -> None:
    """Tries to write where `file` is or will be, and changes nothing there.

    Raises:
        WrongArgument: It cannot be written.
    """
    try:
        if file.exists():
            with file.open("ab"):
                pass
        else:
            with tempfile.TemporaryFile(dir=file.absolute().parent):
                pass
    except OSError as error:
        raise WrongArgument(f"{option}: cannot write {file}: {error.strerror}; name another file") from error
