"""What options may be, and options that several commands have."""

import argparse
import math
from typing import Any

DEFAULT_PIPELINES = (
    "allreduce",
    "fp16(allreduce)",
    "error_feedback(powersgd(fp16(allreduce), rank=2))",
    "warmup(error_feedback(powersgd(fp16(allreduce), rank=2)), steps=30)",
)


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Help that says the default of each option that has one: None and nothing are what its own text says."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, []) else super()._get_help_string(action)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """A whole number from 0 on."""
    return _at_least(0, text)


def positive_float(text: str) -> float:
    """A finite number above 0."""
    number = _float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return number


def share(text: str) -> float:
    """ "1%", or 0.01, or 0."""
    number = _float(text.removesuffix("%"))
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0 or a positive number, such as 1% or 0.01, got {text!r}")
    return number / 100 if text.endswith("%") else number


def add_imports(command: Any) -> None:
    """`--import`."""
    command.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import it first, for the transforms that it registers: a name, or FILE.py",
    )


def _at_least(least: int, text: str) -> int:
    number = int(text) if text.lstrip("-").isdecimal() else None
    if number is None or number < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return number


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
