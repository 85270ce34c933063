"""The reductions of gradients in a backward of FSDP2, which end on all ranks alike."""

import math
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fnddp import torch_private
from fnddp.core.sync import State
from fnddp.device import device_of
from fnddp.integrations.fsdp.unit import Unit
from fnddp.run.vote import Vote
from fnddp.torch_private import fsdp_groups
from fnddp.wire.c10d import C10D
from fnddp.wire.protocol import CollectiveError
from fnddp.wire.weights import NO_WEIGHT, Weight, scale_of, scaled


class Ends:
    """Calls of functions at the end of what FSDP does as a backward of `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._waiting: list[Callable[[], object]] = []
        torch_private.after_reductions(model, self._run)

    def add(self, callback: Callable[[], object]) -> None:
        """Have `callback` called once, behind FSDP's own; not if the backward raises."""
        if torch_private.is_within_backward():
            torch_private.at_end_of_backward(callback)
        else:  # after all backwards of a pipeline's stage
            self._waiting.append(callback)

    def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()


class Weights:
    """The weight of this rank in the backwards that begin in a block.

    Attributes:
        given: How much its gradients count.
        begun: The number of backwards so far that have taken it.
    """

    def __init__(self) -> None:
        self.given, self.begun = NO_WEIGHT, 0

    @contextmanager
    def block(self, count: float) -> Generator[None]:
        """Give the weight `count` within it, and raise a RuntimeError at the end if no backward has taken it."""
        self.given, begun = Weight.of(count), self.begun
        try:
            yield
            if self.begun == begun:
                raise RuntimeError(
                    f"weight: {self.given.text} was given for nothing: no backward that synchronizes began within it"
                )
        finally:
            self.given = NO_WEIGHT


class Reductions:
    """The reductions of a model's gradients, one backward after the other.

    Args:
        units: The groups of parameters.
        states: Of their pipelines, by the names of the groups.
        ends: The ends of backwards.

    Attributes:
        units: As given.
        states: After the last backward that ended well.
        steps: The number of those that have ended well.
        failed_steps: The number of those that have failed on all ranks.
        weights: Of the backwards.
        device: Where the shards are.
        vote: The agreement of ranks at the end.
        begin_around: Begins the step of the replicas' pipeline, which these reductions are part of, and ends with.
    """

    def __init__(self, units: Sequence[Unit], states: dict[str, State], ends: Ends) -> None:
        self.units, self.states, self.weights, self._ends = units, states, Weights(), ends
        self.steps = self.failed_steps = 0
        groups = list(dict.fromkeys(group for unit in units for group in unit.groups))
        self.device = device_of(units[0].fsdp.device)
        self.vote = Vote((), C10D, groups, self.device)
        self.begin_around: Callable[[], object] | None = None
        self._ending: weakref.ref[Ending] | None = None

    def reduce(self, unit: Unit, mine: Tensor, buffer: Tensor) -> None:
        """Write to `mine`, `[width]`, the mean of this rank's row of `buffer`, `[ranks, width]`."""
        if self._open() is None and self.begin_around is not None:
            self.begin_around()
        ending = self._open() or self.begin()
        step = ending.step
        with torch.no_grad(), torch_private.without_autocast():
            try:
                state = step.states.get(unit.name, self.states[unit.name])
                mean, step.states[unit.name] = unit.reduce(scaled(buffer, step.scales[unit.group]), state)
                mine.copy_(mean)
            except CollectiveError:
                raise
            except Exception as error:
                if self.device.is_asynchronous:  # the others wait, and end with the process group's timeout
                    raise
                step.failure = step.failure or error
                unit.reduce_nothing(buffer)
                mine.zero_()

    def begin(self, *, is_part: bool = False) -> "Ending":
        """Begin a step, in a backward. One that `is_part` of another ends with that, which keeps what is returned."""
        self.weights.begun += 1
        ending = Ending(Step(self))
        self._ending = weakref.ref(ending)
        if not is_part:
            self._ends.add(ending)
        return ending

    def close(self) -> None:
        """End the step that is open, for those who ask: an error that is raised in its end would keep it alive."""
        self._ending = None

    def _open(self) -> "Ending | None":
        return None if self._ending is None else self._ending()


class Step:
    """A backward that reduces gradients.

    Args:
        course: The reductions of the model.

    Attributes:
        states: What states become if it ends well.
        scales: The factors of this rank's gradients, by process group.
        total: The sum of the weights of the shards' ranks; None if they have none.
        failure: The first error on this rank, with which all ranks end it.
    """

    def __init__(self, course: Reductions) -> None:
        self._course = course
        self.states: dict[str, State] = {}
        self.failure: Exception | None = None
        self.scales = {unit.group: 1.0 for unit in course.units}
        self.total: float | None = None
        for group in self.scales:
            try:
                exchange = Vote((), C10D, [group], course.device)
                exchange.weigh(course.weights.given)
                numbers = exchange.numbers()
                if numbers is not None:
                    self.total = math.fsum(numbers)
                    is_nothing = course.begin_around is not None and self.total == 0  # of this replica
                    self.scales[group] = 0.0 if is_nothing else scale_of(course.weights.given.number, numbers)
            except ValueError as error:  # on all ranks
                self.failure = error
        parameters = [p for unit in course.units for p in unit.fsdp.parameters]
        self._before = [(p, None if p.grad is None else _local(p.grad).clone()) for p in parameters]

    def end(self) -> None:
        """Commit the states, or restore the gradients and raise, as all ranks do."""
        vote = self._course.vote
        try:
            vote.cast(frozenset(), failed=self.failure is not None)
            if self.failure is not None:
                vote.explain(self.failure)
                raise self.failure
            vote.outcome()
        except Exception:
            self.settle(is_well=False)
            raise
        self.settle(is_well=True)

    def settle(self, *, is_well: bool) -> None:
        """Commit the states, or restore the gradients; all ranks have agreed on which."""
        course = self._course
        course.close()
        if is_well:
            course.states |= self.states
            course.steps += 1
        else:
            course.failed_steps += 1
            self._restore()

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


class Ending:
    """The callback at the end of a backward, which lives as long as that does: not if it raises."""

    def __init__(self, step: Step) -> None:
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
        self.reductions, self._unit = reductions, unit

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        self.reductions.reduce(self._unit, output_tensor, input_tensor.view(self._unit.n, -1))


def reductions_of(model: nn.Module) -> Reductions | None:
    """Return the reductions that `compress_shards` has set for `model`, if any."""
    scatters = (group.reduce_scatter for _, groups in fsdp_groups(model).values() for group in groups)
    return next((each.reductions for each in scatters if isinstance(each, Scatter)), None)
