"""The vote by which a step has the same outcome on all ranks: each rank sends six flags and one for each leaf.

The vote follows the last collective. In steps with weights, ranks exchange these before the first collective.
"""

import math
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp.core.agreement import RankMismatchError
from fnddp.device import Device
from fnddp.wire.c10d import start_into
from fnddp.wire.control import first_over, gather_over, gathering, result_of
from fnddp.wire.groups import rank
from fnddp.wire.kinds import Work, waited
from fnddp.wire.protocol import CollectiveError, Elastic, Wire
from fnddp.wire.weights import FAILED, NO_WEIGHT, Weight, require_weights, scale_of


class StepFailedError(RuntimeError):
    """Another rank failed in this step. State and parameters are what they were before it, on all ranks.

    Gradients are not synchronized: clear them, for example with `optimizer.zero_grad()`, and continue. Until then
    `.grad` holds, with `register`, this rank's own gradient added to any earlier one. `DistributedDataParallel` does
    the same where there was an earlier gradient, and sets None elsewhere. `value_and_grad` and `jit` do not write to
    `.grad`.
    """


class EndedSteps(NamedTuple):
    """How many steps end with one that fails: those with a weight, and all, which includes that one."""

    weighted: int
    all: int


ALONE = EndedSteps(1, 1)


class Vote:
    """The agreement of ranks on a step: whether a rank has failed, which leaves have arrived on some rank, and weights.

    Call `cast` after the last collective, and then `outcome`, or `explain` on a rank that reported a failure. In a step
    with weights, call `weigh` and `scale` before the first collective.

    Groups that have other ranks, `groups`, vote one after the other. Weights are exchanged in the first group given.

    `places` has the number of the engine on a group, the same on all ranks of it, where that is known: messages of two
    models may have one size, and ranks that come to them in another order would take one's for the other's.
    """

    def __init__(
        self,
        leaves: Iterable[str],
        wire: Wire,
        groups: Sequence[str | None],
        device: Device,
        places: Mapping[str | None, int] | None = None,
    ) -> None:
        self._leaves, self._wire, self._device, self._places = leaves, wire, device, places or {}
        self.groups = [group for group in groups if wire.size(group) > 1]
        self._weight_group = groups[0] if groups else None
        self._absent: frozenset[str] = frozenset()
        self._weight: Weight | None = None
        self._flags: Tensor | None = None  # flags of all ranks, [ranks, 6 + leaves], or weights, [ranks, 1]
        self._is_over = False  # the host has waited for them
        self._is_nonfinite: Tensor | bool = False  # on any rank, once that is known
        self._work: Work | None = None
        self._weighed: list[Any] = []  # what the wire has returned for the exchange of weights: empty before it
        self._cast: list[Any] = []  # and for the vote itself
        self._last: list[Any] | None = None  # for what was started last

    @property
    def is_cast(self) -> bool:
        """True if this rank has voted, also where an interrupt came just then."""
        return bool(self._cast)

    @property
    def is_starting(self) -> bool:
        """True if a message was being started when an interrupt came."""
        return self._last == []

    def weigh(self, weight: Weight) -> None:
        """Start the exchange of weights, once. `weight` is NO_WEIGHT or FAILED on a rank that gave none."""
        self._weight = weight
        if self._wire.size(self._weight_group) > 1:
            self._start(self._weighed, self._device.of_host([weight.number], torch.float64), self._weight_group)

    def scale(self, ends: EndedSteps = ALONE) -> float | None:
        """Return the factor of this rank's gradients. Raise as `numbers`, and a ValueError if all weights are zero."""
        numbers = self.numbers(ends)
        return None if numbers is None or self._weight is None else scale_of(self._weight.number, numbers)

    @property
    def is_weighed(self) -> bool:
        """True if `scale` does not wait for other ranks: their weights are here, and valid. Not on an accelerator.

        Ranks that fail because of a weight tell each other why.
        """
        if self._work is None or self._flags is None:
            return True
        if not self._work.is_completed():
            return False
        return bool((self._flags >= NO_WEIGHT.number).all())

    @property
    def is_refusable(self) -> bool:
        """True if a rank that fails before it has begun ends a step with weights here, whatever step it is.

        Other steps go on to the vote: those that several groups vote on, and those on elastic wires. (On an
        accelerator, where ranks do not wait for the vote, `numbers` raises a CollectiveError.)
        """
        return len(self.groups) == 1 and not self._device.is_asynchronous and not isinstance(self._wire, Elastic)

    def refuse(self, error: BaseException, steps: int, are_joint: bool) -> Generator[Work]:
        """Fail the next `steps` steps on the group, of any engines, because of `error`. Yield what it waits for.

        Args:
            are_joint: They belong to one backward; False if they are of weight blocks.
        """
        while steps > 0:
            self._weighed = []
            self.weigh(FAILED)
            assert self._work is not None
            yield self._work
            with _named_failures("exchange their weights"):
                has_peers = bool((self._gathered() != FAILED.number).any())
            _, ends = (yield from self._telling(error, ALONE)) if has_peers else ("", ALONE)  # else nobody asks why
            steps -= ends.all if are_joint else ends.weighted

    def numbers(self, ends: EndedSteps = ALONE) -> list[float] | None:
        """Wait for all weights and return them, in rank order; None if no rank gave one, or one has failed.

        The vote reports a failure, unless the step `is_refusable`.

        Args:
            ends: The steps that end with this one if another rank has failed.

        Raises:
            StepFailedError: Another rank has failed, and all ranks raise.
            CollectiveError: A rank has died or left, or on an accelerator failed; the ranks are desynchronized.
            ValueError: On all ranks: one is invalid, or some ranks gave one and others none.
        """
        assert self._weight is not None
        numbers = [self._weight.number]
        if self._weighed:
            try:
                with _named_failures("exchange their weights"):
                    numbers = self._gathered().flatten().tolist()
            except CollectiveError as error:
                if not isinstance(self._wire, Elastic):
                    raise
                self._wire.report(error)  # the vote of the step will report it
                return None
        if FAILED.number in numbers:
            if self._device.is_asynchronous and self._weight != FAILED:
                raise CollectiveError("another rank has failed in this step; see its own error")
            if self.is_refusable:
                raise StepFailedError(result_of(self._telling(None, ends))[0])
            return None
        if all(number == NO_WEIGHT.number for number in numbers):
            return None
        if NO_WEIGHT.number in numbers:
            require_weights([NO_WEIGHT if each == NO_WEIGHT.number else Weight.of(each) for each in numbers])
        if any(map(math.isnan, numbers)):
            raise self._refusal()
        return numbers

    def skip_numbers(self) -> None:
        """Leave the weights of the other ranks unread, on a rank that gave none: the host does not wait for them."""
        if self._work is not None:
            self._gathered()

    def cast(
        self,
        absent: frozenset[str],
        failed: bool = False,
        weight: Weight | None = None,
        nonfinite: Tensor | bool = False,
    ) -> None:
        """Start the vote, without waiting for it.

        Args:
            absent: The leaves that this rank has no gradient of.
            failed: It has failed.
            weight: Its weight, in a step that began without an exchange of weights.
            nonfinite: It has received something that is not finite; on an accelerator a scalar there.
        """
        self._absent, self._weight, self._work, self._is_over = absent, weight, None, False
        self._is_nonfinite, self._cast = nonfinite, []
        if self.groups:
            has_weight, has_none = weight is not None, weight is None and not failed
            known = nonfinite if isinstance(nonfinite, bool) else False
            place = self._place_in(self.groups[0])
            flags = [failed, has_weight, has_none, False, known, place, *(path not in absent for path in self._leaves)]
            with _named_failures():
                sent = self._device.of_host(flags, torch.uint8)
                if isinstance(nonfinite, Tensor):
                    sent[4] = nonfinite
                self._start(self._cast, sent, self.groups[0])
                if self._device.is_asynchronous:  # gather from all groups, even if this rank will not read the result
                    for group in self.groups[1:]:
                        self._pass_on_to(group)

    def outcome(self) -> frozenset[str]:
        """Return the leaves that have arrived on no rank.

        On an accelerator the host waits only if this rank misses a leaf or has a weight. Otherwise the result is empty,
        and `notice` reports a failure later.

        Raises:
            StepFailedError: Another rank has failed, and all ranks raise. Not on an accelerator.
            CollectiveError: Another rank has died, left or hangs; on an accelerator also: failed, or gave no weight.
            RankMismatchError: On all ranks: they end steps of different engines. Not on an accelerator.
            ValueError: On all ranks: some have given a weight, and others none. Not on an accelerator.
        """
        absent = self._absent
        if self._work is None or (self._device.is_asynchronous and not absent and self._weight is None):
            return frozenset() if self.groups else absent
        failed, has_weight, has_none, is_of_others, nonfinite, _, *used = self._complete()
        self._is_nonfinite = bool(nonfinite)
        is_mixed = has_weight and has_none
        if (failed or is_of_others) and self._device.is_asynchronous:
            raise CollectiveError("another rank has failed in this step; see its own error")
        if is_mixed and self._device.is_asynchronous:
            raise CollectiveError("weight: all ranks must give one in a step, or none, but only some ranks gave one")
        if failed:
            raise StepFailedError(self._explanation(None))
        if is_of_others:
            raise RankMismatchError(
                f"ranks have ended steps of different models at once: that of this rank is number "
                f"{self._place_in(self.groups[0])} of those that synchronize on their process group, in the order in "
                "which they were set up. State and parameters are unchanged on all ranks, and gradients are not "
                "synchronized; run models in one order on all ranks, or give each a process group of its own"
            )
        if is_mixed:
            raise self._refusal()
        return frozenset(path for path, is_used in zip(self._leaves, used, strict=True) if not is_used)

    def found_nonfinite(self) -> Tensor | bool:
        """Return, after `outcome`, whether a rank has received something that is not finite.

        On an accelerator a scalar there, for which the current stream waits, and not the host.
        """
        if isinstance(self._is_nonfinite, Tensor) and self.groups and not self._is_over:
            return self._gathered()[:, 4].amax() > 0
        return self._is_nonfinite

    def notice(self) -> Callable[[], bool] | None:
        """Return a function that waits, on the host, for the vote, and returns True if the step has failed.

        None if the host has waited for the outcome, or there are no other ranks.
        """
        if not self.groups or self._is_over:
            return None
        flags = self._device.to_host(self._highest()[:4])

        def has_failed() -> bool:
            failed, has_weight, has_none, is_of_others = flags()
            return bool(failed or is_of_others or (has_weight and has_none))

        return has_failed

    def explain(self, error: BaseException) -> bool:
        """Complete the vote of a step that this rank has reported as failed, and send the reason to the other ranks.

        Returns:
            True if the other ranks wait for this vote before they end the step. On an accelerator they do not.
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

    def _place_in(self, group: str | None) -> int:
        return self._places.get(group, 0) % 256

    def _highest(self) -> Tensor:
        """Return the maximum of each flag over the ranks that have voted."""
        flags = self._gathered()
        highest = flags.amax(0)
        highest[3] |= flags[:, 5].amin() != highest[5]
        return highest

    def _pass_on_to(self, group: str | None) -> None:
        """Vote in the next group, for all ranks that have voted."""
        flags = self._highest()
        flags.select(0, 5).fill_(self._place_in(group))  # for an assignment of a number CUDA's host would wait
        self._start([], flags, group)

    def _complete(self) -> list[int]:
        """Return the maximum of each flag over all ranks."""
        with _named_failures():
            for group in () if self._device.is_asynchronous else self.groups[1:]:
                self._pass_on_to(group)
            flags = self._highest()
        self._is_over = True
        return flags.tolist()

    def _refusal(self) -> ValueError:
        """Return the error that all ranks raise about their weights. Every rank must call it."""
        everyone = [self._weight or NO_WEIGHT]
        if self._wire.size(self._weight_group) > 1:
            with _named_failures("exchange their weights"):
                everyone = gather_over(self._wire, everyone[0], self._weight_group, self._device.device)
        try:
            require_weights(everyone)
        except ValueError as error:
            return error
        raise AssertionError("all ranks gave a weight")

    def _explanation(self, error: BaseException | None) -> str:
        return result_of(self._telling(error, ALONE))[0]

    def _telling(self, error: BaseException | None, ends: EndedSteps) -> Generator[Work, None, tuple[str, EndedSteps]]:
        """Return why ranks have failed, and how many steps end by that: the most of any rank. Yield before waits."""
        reason = None if error is None else "".join(traceback.format_exception_only(error)).strip()
        reasons = [(rank(None) if dist.is_initialized() else None, reason)]
        with _named_failures(), self._device.selected():
            for group in self.groups:
                told = yield from gathering(self._wire, (reasons, ends), group, self._device.device)
                named = {(i if who is None else who, why) for i, (some, _) in enumerate(told) for who, why in some}
                reasons, ends = (
                    sorted(named, key=str),
                    EndedSteps(*map(max, zip(*(ended for _, ended in told), strict=True))),
                )
        failures = "; ".join(f"rank {rank} failed with {why}" for rank, why in reasons if why is not None)
        return (
            f"{failures}. State and parameters are unchanged on all ranks, and gradients are not synchronized: clear "
            "them and go on"
        ), ends


@contextmanager
def _named_failures(what: str = "end the step together") -> Generator[None]:
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError(
            f"the ranks could not {what}: {error}. Another rank has failed, left, or not called backward; see its own "
            "error"
        ) from error
