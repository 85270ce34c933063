"""What commands check before they start anything."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fnddp.cli.failures import WrongArgument
from fnddp.cost.link import Link
from fnddp.parse import parse
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
