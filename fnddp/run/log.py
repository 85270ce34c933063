"""Warnings, through the logger `fnddp`."""

import logging

from fnddp.wire.groups import rank

_log = logging.getLogger("fnddp")


def warn(message: str, *arguments: object) -> None:
    """Log a warning on the first rank."""
    if rank(None) == 0:
        _log.warning(message, *arguments)
