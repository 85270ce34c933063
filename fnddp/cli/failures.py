"""How a command ends that cannot do what was asked: its exit codes, and what it says."""

import sys

FAILED, WRONG_ARGUMENTS, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


class WrongArgument(ValueError):
    """What was asked for cannot be done; the message is for the user."""

    @classmethod
    def of(cls, error: Exception) -> "WrongArgument":
        """`error`, with its notes: where in a pipeline's text it is."""
        return cls("\n".join([str(error), *getattr(error, "__notes__", [])]))


def stop(command: str, code: int, message: object) -> int:
    """Says why `command` stops, and returns its exit code.

    Raises:
        BrokenPipeError: That is why, and nobody listens.
    """
    if isinstance(message, BrokenPipeError):
        raise message
    print(f"fnddp {command}: {message}", file=sys.stderr)
    return code
