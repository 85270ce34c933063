"""Each wait and each keep of the library, left out in turn: whether the device finds that, and in which order of streams.

`tests/test_streams.py` shows for each that the checker finds it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest

from fnddp import device as devices
from fnddp.wire.c10d import C10d
from fnddp.wire.kinds import Work
from tests.accelerator import test_training as ways
from tests.accelerator.conftest import ORDERS
from tests.streams import site
from tests.test_streams import waits

pytestmark = pytest.mark.thorough


class WithoutWait:
    """A collective for which streams wait in all places but one."""

    def __init__(self, work: Work, left_out: str) -> None:
        self._work, self._left_out = work, left_out
        self.is_completed = work.is_completed

    def wait(self) -> object:
        return None if site() == self._left_out else self._work.wait()


def without(left_out: str, rank: int, device: str, trained: Callable[..., Any], *given: Any) -> Any:
    """The result of `trained`, where the wait or keep at the line `left_out` of the library does nothing."""
    wait, keep, start, vote = (
        devices.Accelerator.wait,
        devices.Accelerator.keep,
        C10d.start,
        C10d.vote,
    )

    def waiting(self: Any, *streams: Any) -> None:
        if site() != left_out:
            wait(self, *streams)

    def keeping(self: Any, *given: Any) -> None:
        if site() != left_out:
            keep(self, *given)

    def starting(self: Any, *given: Any, **options: Any) -> Any:
        return WithoutWait(start(self, *given, **options), left_out)

    def voting(self: Any, *given: Any) -> Any:
        flags, work = vote(self, *given)
        return flags, WithoutWait(work, left_out)

    with (
        mock.patch.object(devices.Accelerator, "wait", waiting),
        mock.patch.object(devices.Accelerator, "keep", keeping),
        mock.patch.object(C10d, "start", starting),
        mock.patch.object(C10d, "vote", voting),
    ):
        try:
            return trained(rank, device, *given)
        except Exception as error:  # such as of numbers that are not there yet
            return f"{type(error).__name__}: {error}"
