"""What commands check before they start anything. Each check raises a `WrongArgument` for the user."""

import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from fnddp.cli import models, modules
from fnddp.cli.failures import WrongArgument
from fnddp.cost.link import Link
from fnddp.parse import parse
from fnddp.show.text import count
from fnddp.sync import Sync

RANKS_PER_CORE = 8


def check_model(name: str, *, trains: bool = True) -> dict[str, Tensor]:
    """Return the parameters of the model `name`, without values."""
    workload = models.load(name)
    if trains:
        workload.task(models.BATCH_SIZE)
    parameters = workload.parameters()
    if not parameters:
        raise WrongArgument(f"{name} has no parameters that require gradients: there is nothing to synchronize")
    return parameters


def check_pipeline(text: str, parameters: Mapping[str, Tensor]) -> Sync:
    """Return the pipeline that `text` writes, if it fits `parameters`."""
    try:
        sync = parse(text)
        sync.init(parameters)
    except (TypeError, ValueError) as error:
        raise WrongArgument.of(error) from error
    return sync


def check_imports(names: Iterable[str] | None) -> tuple[str, ...]:
    """Import the modules `names` and return them."""
    for name in names or ():
        try:
            modules.load(name)
        except modules.WrongArgument as error:
            raise WrongArgument(f"--import: {error}") from error
    return tuple(names or ())


def check_world(ranks: str) -> int:
    """Return the number of ranks to plan for that `ranks` writes."""
    if not ranks.isdecimal() or int(ranks) < 1:
        raise WrongArgument(f"--ranks: must be a whole number of at least 1, got {ranks!r}")
    return int(ranks)


def cores() -> int:
    """Return the number of cores that this process may use: a cpuset, of SLURM for example, may have cut it down."""
    return len(os.sched_getaffinity(0))


def check_processes(ranks: int) -> None:
    """Check that so many processes are not more than this machine can run in a reasonable time."""
    most = RANKS_PER_CORE * cores()
    if ranks > most:
        raise WrongArgument(
            f"--ranks {ranks}: each is a process, and on {count(cores(), 'core')} at most {most} are started; "
            f"virtual ranks need none: fnddp tune --ranks {ranks}, or fnddp.simulate"
        )


def check_link(text: str) -> Link:
    """Return the link that `text` writes."""
    try:
        return Link.parse(text)
    except ValueError as error:
        raise WrongArgument(f"--link: {error}") from error


def check_share(text: str) -> float:
    """Return the share that `text` writes: "1%", or 0.01, or 0."""
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise WrongArgument(f"--within: must be 0 or a positive number, such as 1% or 0.01, got {text!r}")
    return number / 100 if text.endswith("%") else number


def check_shaped(link: str) -> str | None:
    """Return `link` if ranks are to be joined by it; None for loopback."""
    if link == "loopback":
        return None
    check_link(link)
    return link


def check_writable(path: Path, option: str, *, is_folder: bool = False) -> None:
    """Try to write where a file or a folder is or will be, and change nothing there."""
    try:
        if path.exists() and not is_folder:
            with path.open("ab"):
                return
        whole = path.absolute()
        made = next(each for each in (whole, *whole.parents) if each.exists()) if is_folder else whole.parent
        with tempfile.TemporaryFile(dir=made):
            pass
    except OSError as error:
        raise WrongArgument(f"{option}: cannot write {path}: {error.strerror}; name another") from error
