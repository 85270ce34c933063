"""The vote with which ranks end a step alike: a byte for each leaf and three more, after its last collective."""

import traceback
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp.device import device_of
from fnddp.run.weighing import refusal
from fnddp.wire.control import first_over, gather_over
from fnddp.wire.groups import rank
from fnddp.wire.protocol import CollectiveError, Wire, Work, waited
from fnddp.wire.weights import NO_WEIGHT, Weight


class StepFailedError(RuntimeError):
    """Another rank failed in this step. State and parameters are what they were before it, on all ranks.

    Gradients are not synchronized: clear them, as `optimizer.zero_grad()` does, and go on. Until then `.grad` is this
    rank's own with `register`: what this backward gave, added to what was there. So it is with
    `DistributedDataParallel` where there was a gradient before; elsewhere it is None. `value_and_grad` and `jit` write
    to no `.grad`.
    """


class Vote:
    """The agreement of ranks on whether one has failed in a step, and which leaves have arrived on some rank.

    A step's vote is `cast` once, behind the last collective, and then `outcome`, or `explain` where this rank has
    reported that it failed.

    Args:
        leaves: Their paths.
        wire: Who carries it.
        groups: The process groups that must agree. Where several have other ranks, they are asked one after the other.
        device: Where their payloads live.

    Attributes:
        wire: As given.
    """

    def __init__(self, leaves: Iterable[str], wire: Wire, groups: Iterable[str | None], device: torch.device) -> None:
        self.wire = wire
        self._all_groups = tuple(dict.fromkeys(groups))
        self._device = device_of(device)
        self._leaves = list(leaves)
        self._absent: frozenset[str] = frozenset()
        self._weight: Weight | None = None
        self._flags: Tensor | None = None  # of all ranks: [ranks, 3 + leaves]
        self._work: Work | None = None

    @property
    def groups(self) -> list[str | None]:
        """The groups that have other ranks: as many as there are now."""
        return [group for group in self._all_groups if self.wire.size(group) > 1]

    @property
    def has_peers(self) -> bool:
        """True if there are other ranks that must agree."""
        return bool(self.groups)

    @property
    def is_heeded(self) -> bool:
        """True if other ranks wait for this one's vote before they end a step. On CUDA they do not."""
        return not (self.groups and self._device.is_asynchronous)

    def cast(self, absent: frozenset[str], failed: bool = False, weight: Weight | None = None) -> None:
        """Tells the other ranks, without waiting for them.

        Args:
            absent: Leaves that have not arrived here.
            failed: Whether this rank has failed.
            weight: Given by this rank in a step that began without an exchange of weights.
        """
        self._absent, self._weight, self._work = absent, weight, None
        if self.groups:
            has_weight, has_none = weight is not None, weight is None and not failed
            flags = [failed, has_weight, has_none, *(path not in absent for path in self._leaves)]
            with _named_failures():
                self._start(self._device.of_host(flags, torch.uint8), self.groups[0])
                for group in (
                    self.groups[1:] if self._device.is_asynchronous else ()
                ):  # all, whether this rank will ask or not
                    self._start(self._waited(), group)

    def outcome(self) -> frozenset[str]:
        """The leaves that have arrived on no rank.

        On CUDA the host does not wait for the answer unless this rank misses a leaf, so failures of other ranks end
        there with the process group's timeout. A rank with a weight waits.

        Raises:
            StepFailedError: Another rank has failed, and all ranks raise.
            CollectiveError: Another rank has died, left or hangs; on CUDA also: it has failed. Ranks are out of step.
            ValueError: On all ranks: some have given a weight, and others none.
        """
        absent = self._absent
        if self._work is None or (self._device.is_asynchronous and not absent and self._weight is None):
            self._work = None
            return frozenset() if self.groups else absent
        failed, has_weight, has_none, *used = self._complete()
        is_mixed = has_weight and has_none
        if failed and self._device.is_asynchronous:
            raise CollectiveError("another rank has failed in this step; see its own error")
        if is_mixed and self._device.is_asynchronous:
            raise CollectiveError("weight: all ranks of a step give one, or none does, but only some have")
        if failed:
            raise StepFailedError(self._explanation(None))
        if is_mixed:
            raise refusal(self._weight or NO_WEIGHT, self.wire, self.groups[0], self._device.device)
        return frozenset(path for path, is_used in zip(self._leaves, used, strict=True) if not is_used)

    def explain(self, error: BaseException) -> None:
        """Complete the vote of a step that this rank has reported as failed, and give the others the reason."""
        if self._work is not None and not self._device.is_asynchronous:
            self._complete()
            self._explanation(error)

    def of_first_rank(self, value: Any) -> Any:
        """`value` as the first rank has it. Every rank must ask."""
        with _named_failures(), self._device.selected():
            for group in self.groups:
                value = first_over(self.wire, value, group, self._device.device)
        return value

    def _start(self, flags: Tensor, group: str | None) -> None:
        self._flags, self._work = self.wire.vote(flags, group)

    def _waited(self) -> Tensor:
        """Each flag as it is on some rank."""
        assert self._work is not None
        assert self._flags is not None
        waited(self._work)
        self._work = None
        return self._flags.amax(0)

    def _complete(self) -> list[int]:
        with _named_failures():
            flags = self._waited()
            for group in () if self._device.is_asynchronous else self.groups[1:]:
                self._start(flags, group)
                flags = self._waited()
        return flags.tolist()

    def _explanation(self, error: BaseException | None) -> str:
        reason = None if error is None else "".join(traceback.format_exception_only(error)).strip()
        reasons = [(rank(None) if dist.is_initialized() else None, reason)]
        with _named_failures(), self._device.selected():
            for group in self.groups:
                told = gather_over(self.wire, reasons, group, self._device.device)
                named = {(i if who is None else who, why) for i, some in enumerate(told) for who, why in some}
                reasons = sorted(named, key=str)
        failures = "; ".join(f"rank {rank} failed with {why}" for rank, why in reasons if why is not None)
        return (
            f"{failures}. State and parameters are unchanged on all ranks, and gradients are not synchronized: clear "
            "them and go on"
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
