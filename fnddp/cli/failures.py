"""Failures of commands: exit codes, errors, and the line that reports them."""

import sys

FAILED, WRONG_ARGUMENTS, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
EXTRA = ("matplotlib", "sklearn")  # modules of the extra "demo"


class Failure(Exception):
    """A command failed; the message is for the user."""

    code = FAILED


class WrongArgument(Failure, ValueError):
    """An argument is wrong, or cannot be met here."""

    code = WRONG_ARGUMENTS

    @classmethod
    def of(cls, error: Exception) -> "WrongArgument":
        """Return `error` with its notes: its place in a pipeline's text."""
        return cls("\n".join([str(error), *getattr(error, "__notes__", [])]))


def print_error(command: str, code: int, message: object) -> int:
    """Print why `command` stops, in one line on standard error, and return `code`."""
    print(f"{command}: {message}", file=sys.stderr)
    return code
