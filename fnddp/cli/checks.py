"""What commands check before they start anything."""

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from fnddp.cli import modules
from fnddp.cli.failures import WrongArgument
from fnddp.cli.modules import ModuleError
from fnddp.cost.link import Link
from fnddp.parse import parse
from fnddp.show.text import count
from fnddp.sync import Sync


def check_pipeline(text: str, parameters: Mapping[str, Tensor]) -> Sync:
    """The pipeline that `text` writes, if it fits `parameters`.

    Raises:
        WrongArgument: It does not parse, or cannot be initialized.
    """
    try:
        sync = parse(text)
        sync.init(parameters)
    except (TypeError, ValueError) as error:
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
