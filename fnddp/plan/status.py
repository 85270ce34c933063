"""How ranks end a step alike: a byte for each leaf and one for the step, reduced behind the last collective."""

import traceback
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp import collectives
from fnddp.plan.execute import CollectiveError
from fnddp.plan.plan import Plan


class StepFailedError(RuntimeError):
    """Another rank failed in this step. Gradients, state and parameters are what they were before it, on all ranks."""


class Status:
    """Whether any rank has failed in a step, and which leaves have arrived on some rank.

    Args:
        plan: Its process groups are those that must agree. Where it has several, they are asked one after the other.
    """

    def __init__(self, plan: Plan) -> None:
        sizes = {c.group: (c.world_size, c.device) for c in plan.collectives}
        self._groups = [group for group, (size, _) in sizes.items() if size > 1]
        self._device = next((device for _, device in sizes.values()), torch.device("cpu"))
        self._on_cuda = self._device.type == "cuda"
        self._leaves = list(plan.leaves)
        self._flags: Tensor | None = None
        self._work: collectives.Work | None = None

    @property
    def is_heeded(self) -> bool:
        """Whether other ranks wait for what this one says before they end a step. On CUDA they do not."""
        return not (self._groups and self._on_cuda)

    def send(self, missing: Iterable[str], failed: bool = False) -> None:
        """Tells the other ranks, without waiting for them. Once a step, behind its last collective."""
        if self._groups:
            flags = [int(failed), *(int(path not in missing) for path in self._leaves)]
            # From pinned memory: a copy from any other would have the host wait for all that is queued before it.
            on_host = torch.tensor(flags, dtype=torch.uint8, pin_memory=self._on_cuda)
            self._flags = on_host.to(self._device, non_blocking=True)
            self._work = collectives.start_status(self._flags, self._groups[0])
            for group in self._groups[1:] if self._on_cuda else ():  # all, whether this rank will ask or not
                self._work.wait()
                self._work = collectives.start_status(self._flags, group)

    def agree(self, missing: frozenset[str]) -> frozenset[str]:
        """The leaves that have arrived on no rank.

        On CUDA the host does not wait for the answer unless this rank misses a leaf, so failures of other ranks end
        there with the process group's timeout.

        Raises:
            StepFailedError: Another rank has failed, and all ranks raise.
            CollectiveError: Another rank has died, left or hangs; on CUDA also: it has failed. Ranks are out of step.
        """
        if self._work is None or (self._on_cuda and not missing):
            self._work = None
            return frozenset() if self._groups else missing
        flags = self._complete()
        if flags[0] and self._on_cuda:
            raise CollectiveError("another rank has failed in this step; see its own error")
        if flags[0]:
            raise StepFailedError(self._explanation(None))
        return frozenset(path for path, used in zip(self._leaves, flags[1:], strict=True) if not used)

    def fail(self, error: BaseException) -> None:
        """Completes the step in which this rank has failed and told so, and tells the others why."""
        if self._work is not None and not self._on_cuda:
            self._complete()
            self._explanation(error)

    @property
    def has_peers(self) -> bool:
        """Whether the plan has collectives with other ranks."""
        return bool(self._groups)

    def of_first_rank(self, value: Any) -> Any:
        """`value` as the first rank has it. Every rank must ask."""
        for group in self._groups:
            value = collectives.all_gather_object(value, group)[0]
        return value

    def _complete(self) -> list[int]:
        assert self._work is not None
        assert self._flags is not None
        with _named_failures():
            self._work.wait()
            self._work = None
            for group in () if self._on_cuda else self._groups[1:]:
                collectives.start_status(self._flags, group).wait()
        return self._flags.tolist()

    def _explanation(self, error: BaseException | None) -> str:
        reason = None if error is None else "".join(traceback.format_exception_only(error)).strip()
        reasons = [(dist.get_rank(), reason)]
        with _named_failures():
            for group in self._groups:
                reasons = sorted({one for some in collectives.all_gather_object(reasons, group) for one in some})
        failures = "; ".join(f"rank {rank} failed with {why}" for rank, why in reasons if why is not None)
        return f"{failures}. No rank has changed its gradients, state or parameters in this step"


@contextmanager
def _named_failures() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(
            f"the ranks could not end the step together: {error}. Another rank has failed, left, or not called "
            "backward; see its own error"
        ) from error
