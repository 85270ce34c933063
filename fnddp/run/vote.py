"""The vote that gives a step the same outcome on all ranks: each rank sends `Flags` after the last collective."""

import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp.core.agreement import RankMismatchError
from fnddp.device import Device
from fnddp.wire.c10d import start_into
from fnddp.wire.control import first_over, gather_over
from fnddp.wire.groups import rank
from fnddp.wire.kinds import Work, waited
from fnddp.wire.protocol import CollectiveError, Wire
from fnddp.wire.weights import no_mean


class StepFailedError(RuntimeError):
    """Another rank failed in this step. On all ranks the state and the parameters are as before the step.

    With an outer step they are as after the local step. If `own` or `own_matrices` has changed some of them, the
    message says that you must restart.

    Gradients are not synchronized: clear them, for example with `optimizer.zero_grad()`, and continue. Until then, with
    `register`, `.grad` holds this rank's own gradient added to any earlier one. With `DistributedDataParallel` it does
    so if there was an earlier gradient, and is None otherwise. `value_and_grad` and `jit` do not write to `.grad`.
    """


class Flags(NamedTuple):
    """The vote of one rank, or the maximum over ranks. In the message a flag for each leaf follows: 1 if it was used.

    Attributes:
        failed: The rank has failed.
        nonfinite: The rank has received NaN or infinity.
        counts: Its weight is above 0, or the pipeline takes no weight.
        place, other: The number of its engine, and 255 minus that. Functions share a communicator, and their messages
            may have the same size. Ranks that call them in different orders would mix them up; this detects it.
    """

    failed: Any
    nonfinite: Any
    counts: Any
    place: Any
    other: Any

    @property
    def is_mixed(self) -> bool:
        """True if ranks ended steps of different engines. Valid only for the maximum over ranks."""
        return self.place + self.other != 255


_NONFINITE = Flags._fields.index("nonfinite")


class Vote:
    """The vote of all ranks on a step: whether a rank has failed, and for which leaves some rank had a gradient.

    Call `cast` after the last collective, and then `outcome`, or `explain` on a rank that reported a failure. If there
    are several `groups`, they vote one after the other. Groups of one rank are left out.
    """

    def __init__(
        self,
        leaves: Iterable[str],
        wire: Wire,
        groups: Sequence[str | None],
        device: Device,
        place: int = 0,
    ) -> None:
        self._leaves, self._wire, self._device, self._place = leaves, wire, device, place
        self.groups = [group for group in groups if wire.size(group) > 1]
        self._absent: frozenset[str] = frozenset()
        self._flags: Tensor | None = None  # flags of all ranks, [ranks, flags]
        self._is_over = False  # True once the host has waited for the flags
        self._is_nonfinite: Tensor | bool = False  # on any rank, once that is known
        self._counts = True
        self._work: Work | None = None
        self._cast: list[Any] = []  # the wire's result for this vote; empty before it
        self._last: list[Any] | None = None  # the list for the message that was started last

    @property
    def is_cast(self) -> bool:
        """True if this rank has voted, even if an interrupt came just then."""
        return bool(self._cast)

    @property
    def is_starting(self) -> bool:
        """True if a message was being started when an interrupt came."""
        return self._last == []

    def cast(
        self,
        absent: frozenset[str],
        failed: bool = False,
        nonfinite: Tensor | bool = False,
        counts: bool = True,
    ) -> None:
        """Start the vote without waiting for it.

        Args:
            absent: The leaves for which this rank has no gradient.
            failed: True if this rank has failed.
            nonfinite: True if this rank has received NaN or infinity; on an accelerator a scalar tensor there.
            counts: True if its weight is above 0, or the pipeline takes no weight.
        """
        self._absent, self._work, self._is_over = absent, None, False
        self._is_nonfinite, self._counts, self._cast = nonfinite, counts, []
        if self.groups:
            known = nonfinite if isinstance(nonfinite, bool) else False
            flags = Flags(failed, known, counts, self._place, 255 - self._place)
            with _named_failures():
                sent = self._device.of_host([*flags, *(path not in absent for path in self._leaves)], torch.uint8)
                if isinstance(nonfinite, Tensor):
                    sent[_NONFINITE] = nonfinite
                self._start(self._cast, sent, self.groups[0])
                if self._device.is_asynchronous:  # gather from all groups, even if this rank will not read the result
                    for group in self.groups[1:]:
                        self._pass_on_to(group)

    def outcome(self, *, waits: bool = False) -> frozenset[str]:
        """Return the leaves for which no rank had a gradient.

        On an accelerator the host waits only if this rank misses a leaf, or with `waits`. Otherwise the result is
        empty, and `notice` reports a failure later.

        Raises:
            StepFailedError: On all ranks: a rank has failed. Not on an accelerator.
            CollectiveError: Another rank has died, left or hangs; on an accelerator, also if it has failed.
            RankMismatchError: On all ranks: they end steps of different functions. Not on an accelerator.
            ValueError: On all ranks: all weights are 0. Not on an accelerator.
        """
        absent = self._absent
        if self._work is None or (self._device.is_asynchronous and not absent and not waits):
            if not self.groups and not self._counts:
                raise no_mean()
            return frozenset() if self.groups else absent
        flags, used = self._complete()
        self._is_nonfinite = bool(flags.nonfinite)
        if (flags.failed or flags.is_mixed) and self._device.is_asynchronous:
            raise CollectiveError("another rank has failed in this step; see its own error")
        if flags.failed:
            raise StepFailedError(self._explanation(None))
        if flags.is_mixed:
            raise RankMismatchError(
                "ranks ended steps of different functions at the same time, or with leaves of different shapes or "
                "dtypes. State and parameters are unchanged on all ranks; call the functions in the same order, with "
                "the same leaves, on all ranks, or give each its own process group"
            )
        if not flags.counts and self._device.is_asynchronous:
            raise CollectiveError("all ranks gave the weight 0 in this step, and some may have applied it already")
        if not flags.counts:
            raise no_mean()
        return frozenset(path for path, is_used in zip(self._leaves, used, strict=True) if not is_used)

    def found_nonfinite(self) -> Tensor | bool:
        """Return, after `outcome`, whether some rank has received NaN or infinity.

        On an accelerator the result is a scalar tensor there: the current stream waits for it, but the host does not.
        """
        if isinstance(self._is_nonfinite, Tensor) and self.groups and not self._is_over:
            return self._gathered()[:, _NONFINITE].amax().view(torch.bool)
        return self._is_nonfinite

    def notice(self) -> Callable[[], bool] | None:
        """Return a function that makes the host wait for the vote and returns True if the step has failed.

        Return None if the host has waited for the outcome, or there are no other ranks.
        """
        if not self.groups or self._is_over:
            return None
        numbers = self._device.to_host(self._highest()[: len(Flags._fields)])

        def has_failed() -> bool:
            flags = Flags(*numbers())
            return bool(flags.failed or flags.is_mixed or not flags.counts)

        return has_failed

    def explain(self, error: BaseException) -> bool:
        """Complete the vote of a step that this rank has reported as failed, and send the reason to the other ranks.

        Returns:
            True if the other ranks wait for this vote before they end the step; False on an accelerator.
        """
        if self._work is not None and not self._device.is_asynchronous:
            self._complete()
            self._explanation(error)
        return not (self.groups and self._device.is_asynchronous)

    def of_first_rank(self, value: Any) -> Any:
        """Return the `value` of the first rank. Every rank must call it."""
        with _named_failures(), self._device.selected():
            for group in self.groups:
                value = first_over(self._wire, value, group, self._device.device)
        return value

    def of_any_rank(self, paths: frozenset[str]) -> frozenset[str]:
        """Return the union of the `paths` of all ranks. Every rank must call it."""
        with _named_failures(), self._device.selected():
            for group in self.groups:
                paths = frozenset().union(*gather_over(self._wire, paths, group, self._device.device))
        return paths

    def _start(self, sent: list[Any], flags: Tensor, group: str | None) -> None:
        self._last = sent
        if not sent:
            start_into(sent, partial(self._wire.vote, flags, group))
        self._flags, self._work = sent[0]

    def _gathered(self) -> Tensor:
        assert self._flags is not None
        if self._work is not None:
            waited(self._work)
            self._work = None
        return self._flags

    def _highest(self) -> Tensor:
        """Return the maximum of each flag over the ranks that have voted."""
        return self._gathered().amax(0)

    def _pass_on_to(self, group: str | None) -> None:
        """Vote in the next group on behalf of all ranks that have voted so far."""
        self._start([], self._highest(), group)

    def _complete(self) -> tuple[Flags, list[int]]:
        """Return the maximum of each flag over all ranks, and for each leaf whether some rank used it."""
        with _named_failures():
            for group in () if self._device.is_asynchronous else self.groups[1:]:
                self._pass_on_to(group)
            highest = self._highest()
        self._is_over = True
        n, numbers = len(Flags._fields), highest.tolist()
        return Flags(*numbers[:n]), numbers[n:]

    def _explanation(self, error: BaseException | None) -> str:
        """Return a text of the ranks that failed and their errors; `error` is this rank's own."""
        reason = None if error is None else "".join(traceback.format_exception_only(error)).strip()
        reasons = [(rank(None) if dist.is_initialized() else None, reason)]
        with _named_failures(), self._device.selected():
            for group in self.groups:
                told = gather_over(self._wire, reasons, group, self._device.device)
                named = {(i if who is None else who, why) for i, some in enumerate(told) for who, why in some}
                reasons = sorted(named, key=str)
        failures = "; ".join(f"rank {rank} failed with {why}" for rank, why in reasons if why is not None)
        return (
            f"{failures}. State and parameters are unchanged on all ranks, and gradients are not synchronized: clear "
            "them and continue"
        )


@contextmanager
def _named_failures() -> Generator[None]:
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError(
            f"the ranks could not end the step together: {error}. Another rank has failed, left, or not called "
            "backward; see its own error"
        ) from error
