"""Failures of commands: exit codes, errors, and the line that reports them."""

import sys
from collections.abc import Generator
from contextlib import contextmanager

FAILED, WRONG_ARGUMENTS, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
EXTRA = ("matplotlib", "sklearn")  # modules of the extra "demo"


class Failure(Exception):
    """A command failed; the message is for the user."""

    code = FAILED


class WrongArgument(Failure, ValueError):
    """An argument is wrong, or not possible on this machine."""

    code = WRONG_ARGUMENTS


@contextmanager
def wrong_if(*errors: type[Exception], option: str = "") -> Generator[None]:
    """Raise a WrongArgument if the block raises one of `errors`, with its notes: the position in a pipeline's text."""
    try:
        yield
    except errors as error:
        raise WrongArgument("\n".join([f"{option}{error}", *getattr(error, "__notes__", [])])) from error


def print_error(command: str, code: int, message: object) -> int:
    """Print the reason why `command` stops, in one line on standard error, and return `code`."""
    print(f"{command}: {message}", file=sys.stderr)
    return code
