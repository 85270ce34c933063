"""The reductions of gradients in a backward of FSDP2, which end on all ranks alike."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fnddp import torch_private
from fnddp.core.sync import State
from fnddp.integrations.fsdp.unit import Unit
from fnddp.run.vote import Vote
from fnddp.run.weighing import Weighing
from fnddp.wire.c10d import C10D
from fnddp.wire.protocol import CollectiveError
from fnddp.wire.weights import NO_WEIGHT, scaled


class Reductions:
    """The reductions of a model's gradients, one backward after the other.

    Args:
        units: The groups of parameters.
        states: Of their pipelines, by the names of the groups.

    Attributes:
        units: As given.
        states: After the last backward that ended well.
        weight: How much this rank's gradients count in backwards that begin from now on.
        begun: The number of backwards that have reduced gradients.
        steps: The number of those that have ended well.
        failed_steps: The number of those that have failed on all ranks.
        vote: The agreement of ranks at the end.
        ending: A reference to the end of the backward that runs.
    """

    def __init__(self, units: Sequence[Unit], states: dict[str, State]) -> None:
        self.units, self.states, self.weight = units, states, NO_WEIGHT
        self.begun = self.steps = self.failed_steps = 0
        self.vote = Vote((), C10D, [group for unit in units for group in unit.groups], units[0].fsdp.device)
        self.ending: weakref.ref[_Ending] | None = None

    def reduce(self, unit: Unit, mine: Tensor, buffer: Tensor) -> None:
        """Write to `mine`, `[width]`, the mean of this rank's row of `buffer`, `[ranks, width]`."""
        step = self._step()
        with torch.no_grad(), torch_private.without_autocast():
            try:
                state = step.states.get(unit.name, self.states[unit.name])
                mean, step.states[unit.name] = unit.reduce(scaled(buffer, step.scales[unit.group]), state)
                mine.copy_(mean)
            except CollectiveError:
                raise
            except Exception as error:
                if not self.vote.is_heeded:  # the others wait, and end with the process group's timeout
                    raise
                step.failure = step.failure or error
                unit.reduce_nothing(buffer)
                mine.zero_()

    def _step(self) -> "_Step":
        ending = None if self.ending is None else self.ending()
        if ending is None:
            self.begun += 1
            ending = _Ending(_Step(self))
            self.ending = weakref.ref(ending)
            torch_private.at_end_of_backward(ending)  # behind FSDP's own, which is there already
        return ending.step


class _Step:
    """A backward that reduces gradients.

    Args:
        course: The reductions of the model.

    Attributes:
        states: What states become if it ends well.
        scales: The factors of this rank's gradients, by process group.
        failure: The first error on this rank, with which all ranks end it.
    """

    def __init__(self, course: Reductions) -> None:
        self._course = course
        self.states: dict[str, State] = {}
        self.failure: Exception | None = None
        self.scales = {unit.group: 1.0 for unit in course.units}
        for group in self.scales:
            try:
                scale = Weighing(course.weight, C10D, [group], course.units[0].fsdp.device).scale()
                self.scales[group] = 1.0 if scale is None else scale
            except ValueError as error:  # on all ranks
                self.failure = error
        parameters = [p for unit in course.units for p in unit.fsdp.parameters]
        self._before = [(p, None if p.grad is None else _local(p.grad).clone()) for p in parameters]

    def end(self) -> None:
        """Commit the states, or restore the gradients and raise, as all ranks do."""
        course, vote = self._course, self._course.vote
        course.ending = None  # which an error that is raised here keeps alive
        try:
            vote.cast(frozenset(), failed=self.failure is not None)
            if self.failure is not None:
                vote.explain(self.failure)
                raise self.failure
            vote.outcome()
        except Exception:
            course.failed_steps += 1
            self._restore()
            raise
        course.states |= self.states
        course.steps += 1

    @torch.no_grad()
    def _restore(self) -> None:
        for parameter, before in self._before:
            if before is None or parameter.grad is None:
                parameter.grad = None
            else:
                _local(parameter.grad).copy_(before)


def _local(grad: Tensor) -> Tensor:
    assert isinstance(grad, DTensor)
    return grad.to_local()


class _Ending:
    """The callback at the end of a backward, which lives as long as that does: not if it raises."""

    def __init__(self, step: _Step) -> None:
        self.step = step

    def __call__(self) -> None:
        self.step.end()


class Comm:
    """What FSDP's `ReduceScatter` and `AllGather` have in common."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a collective."""
        return torch.empty(size, dtype=dtype, device=device)


class Scatter(Comm):
    """FSDP's `ReduceScatter`, of one group of parameters."""

    def __init__(self, reductions: Reductions, unit: Unit) -> None:
        self._reductions, self._unit = reductions, unit

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        self._reductions.reduce(self._unit, output_tensor, input_tensor.view(self._unit.n, -1))
