"""The reductions of gradients in a backward of FSDP2, which end on all ranks alike."""

import math
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fnddp import torch_private
from fnddp.adapters.backward import Backward
from fnddp.core import tree
from fnddp.core.sync import State
from fnddp.device import device_of
from fnddp.integrations.fsdp.unit import Sending, Unit
from fnddp.run.nonfinite import has_nonfinite, spoil, unless
from fnddp.run.step import Synchronized, applying, require_noticed
from fnddp.run.vote import StepFailedError, Vote
from fnddp.torch_private import fsdp_groups
from fnddp.wire.c10d import C10D
from fnddp.wire.protocol import CollectiveError
from fnddp.wire.weights import NO_WEIGHT, Weight, require_even, scale_of, scaled


class Ends:
    """Calls of functions when FSDP has ended a backward of `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._waiting: list[Callable[[], object]] = []
        torch_private.after_reductions(model, self._run)

    def add(self, callback: Callable[[], object]) -> None:
        """Call `callback` once, behind FSDP's own, unless the backward raises."""
        if torch_private.is_within_backward():
            torch_private.at_end_of_backward(callback)
        else:  # after all backwards of a pipeline's stage
            self._waiting.append(callback)

    @torch_private.skipped_by_dynamo
    def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()


class RankWeight:
    """The weight of this rank in the backwards that begin in a block."""

    def __init__(self) -> None:
        self.given, self.begun = NO_WEIGHT, 0  # and the number of backwards so far that have taken one

    @contextmanager
    def block(self, count: float) -> Generator[None]:
        """Give the weight `count` in the block.

        Raises:
            RuntimeError: Within another such block; at the end, if no backward has taken it.
        """
        weight, begun = Weight.of(count), self.begun
        if self.given != NO_WEIGHT:
            raise RuntimeError(
                f"weight: {weight.text} is given within a block of the weight {self.given.text}; end that one first"
            )
        self.given = weight
        try:
            yield
            if self.begun == begun:
                raise RuntimeError(
                    f"weight: {self.given.text} was given for nothing: no backward that synchronizes began within it"
                )
        finally:
            self.given = NO_WEIGHT


class Reductions:
    """The reductions of a model's gradients in consecutive backwards; `states` are those after the last that succeeded.

    They are in the place of an engine: each backward is a `Reduction`, on its own or as a part of a step of replicas.

    Attributes:
        begin_around: Begins the step of replicas of which the next one is a part, if there is one.
    """

    def __init__(self, units: Sequence[Unit], states: dict[str, State], ends: Ends) -> None:
        self.units, self.states, self.weight, self._ends = units, states, RankWeight(), ends
        self.wire = C10D
        self.steps = self.failed_steps = 0  # on all ranks
        groups = list(dict.fromkeys(group for unit in units for group in unit.groups))
        self.device = device_of(units[0].fsdp.device)
        self.vote = Vote((), self.wire, groups, self.device)
        self.begin_around: Callable[[], object] | None = None
        self.notice: Callable[[], bool] | None = None  # `Vote.notice` of the last step, on an accelerator
        self.broken: BaseException | None = None  # this rank's error, of which the others may not have learnt
        self._backward = Backward(self)
        self._step: weakref.ref[Reduction] | None = None

    @property
    def step(self) -> "Reduction | None":
        """The open step. The callback at the end of its backward keeps it alive; if that has raised, it is gone."""
        return None if self._step is None else self._step()

    @torch_private.skipped_by_dynamo
    def reduce(self, unit: Unit, mine: Tensor, buffer: Tensor) -> None:
        """Write to `mine`, `[width]`, the mean of this rank's row of `buffer`, `[ranks, width]`."""
        try:
            self._reduce(unit, mine, buffer)
        except (CollectiveError, KeyboardInterrupt) as error:
            self.broken = type(error)(*error.args)  # without frames, which would keep the step alive
            raise

    def _reduce(self, unit: Unit, mine: Tensor, buffer: Tensor) -> None:
        if self.step is None and self.begin_around is not None:
            self.begin_around()
        step, messages = self.step or self._begin_alone(), Sending()
        with torch.no_grad(), torch_private.without_autocast():
            try:
                step.weigh()
                state = step.states.get(unit.name, self.states[unit.name])
                mean, step.states[unit.name] = unit.reduce(scaled(buffer, step.scales[unit.group]), state, messages)
                mine.copy_(mean)
                step.note(mean)
            except CollectiveError:
                raise
            except BaseException as error:  # FSDP's other collectives must still run on all ranks
                step.backward.keep(error if step.is_weighed else error.with_traceback(None))  # see below
                step.weigh()
                unit.reduce_nothing(buffer, messages)
                mine.zero_()
            finally:
                del step  # which the error's frames would keep alive, if this backward breaks off

    def _begin_alone(self) -> "Reduction":
        self._backward.failure = None
        step: Reduction = self._backward.begin(backward=self._backward)
        self._ends.add(partial(self._end, step))
        return step

    def _end(self, _: "Reduction") -> None:
        with applying(self):
            self._backward.end()

    def begin(self, backward: Backward) -> "Reduction":
        """Begin a step, of which `backward` has the life and keeps the errors."""
        self.require_whole()
        self.weight.begun += 1
        step = Reduction(self, backward)
        self._step = weakref.ref(step)
        return step

    def fail(self, error: BaseException) -> None:
        if self.step is not None:
            self.step.fail(error)

    def require_whole(self) -> None:
        """Raise a CollectiveError if this rank may be apart from others, or on an accelerator one has failed."""
        self.require_unbroken()
        require_noticed([] if self.notice is None else [self.notice])

    def require_unbroken(self, *_: object) -> None:
        """Raise a CollectiveError if this rank may be apart from others."""
        if self.broken is not None:
            raise CollectiveError(
                f"an earlier step failed on this rank ({type(self.broken).__name__}: {self.broken}), and others may "
                "have gone on, with zeros for its gradients or without them; restart from a checkpoint from before"
            ) from self.broken

    def close(self) -> None:
        """Forget the open step, which an error that is raised at its end would keep alive."""
        self._step = None


class Reduction:
    """A backward that reduces gradients: on its own it ends like a step of an engine, with `agree` and `commit`."""

    def __init__(self, course: Reductions, backward: Backward) -> None:
        self._course, self.backward, self._has_voted, self.is_weighed = course, backward, False, False
        self.states: dict[str, State] = {}  # what they become if it ends well
        remembers = any(isinstance(each, Tensor) for each in tree.flatten_any(course.states)[0])
        self.is_nonfinite: Tensor | bool | None = False if remembers else None  # None where it does not matter
        self.scales = {unit.group: 1.0 for unit in course.units}  # factors of this rank's gradients
        self.total: float | None = None  # of the weights of the shards' ranks; None if they have none
        self._exchanges = {group: Vote((), C10D, [group], course.device) for group in self.scales}
        parameters = [p for unit in course.units for p in unit.fsdp.parameters]
        self._before = [(p, None if p.grad is None else _local(p.grad).clone()) for p in parameters]

    def weigh(self) -> None:
        """Exchange weights, unless that is done; after an interrupt, what is left of it."""
        if self.is_weighed:
            return
        course, everyone = self._course, list[list[float]]()  # weights, by mesh
        for group, exchange in self._exchanges.items():
            exchange.weigh(course.weight.given)
            try:
                # Where the host would wait for them, ranks without a weight do not look at those of others, which fail.
                is_blind = course.device.is_asynchronous and course.weight.given == NO_WEIGHT
                numbers = exchange.skip_numbers() if is_blind else exchange.numbers()
                if numbers is not None:
                    everyone.append(numbers)
                    require_even(everyone)
                    self.total = max(math.fsum(numbers), self.total or 0.0)
                    is_nothing = course.begin_around is not None and self.total == 0  # of this replica
                    self.scales[group] = 0.0 if is_nothing else scale_of(course.weight.given.number, numbers)
            except ValueError as error:  # on all ranks
                self.backward.keep(error.with_traceback(None))  # whose frame would keep this step alive
        self.is_weighed = True

    def note(self, mean: Tensor) -> None:
        """Note whether a mean is finite: if one is not, on any rank, memory stays as it was."""
        if self.is_nonfinite is not None:
            self.is_nonfinite = has_nonfinite([mean], self._course.device) | self.is_nonfinite

    def agree(self) -> frozenset[str]:
        """Vote; see `fnddp.run.step.Step.agree`."""
        self._has_voted = True
        found = False if self.is_nonfinite is None else self.is_nonfinite  # for `or` an accelerator's host would wait
        self._course.vote.cast(frozenset(), nonfinite=found)
        return self._course.vote.outcome()

    def commit(self) -> Synchronized:
        """Commit the states; the gradients are FSDP's."""
        self._course.notice = self._course.vote.notice()
        found = self._course.vote.found_nonfinite()
        self.keep(found)
        if found is not False:  # what memory has kept must not be applied by any optimizer
            with torch.no_grad():
                spoil([_local(p.grad) for p, _ in self._before if p.grad is not None], found)
        return Synchronized({}, frozenset())

    def fail(self, error: BaseException) -> None:
        """Notify the other ranks, unless all have voted, and undo it."""
        course = self._course
        course.broken = None if isinstance(error, StepFailedError) else error  # until the others know
        try:
            if not (self._has_voted and course.vote.is_cast):
                course.vote.cast(frozenset(), failed=True)
                course.broken = None if course.vote.explain(error) else error
        except RuntimeError as problem:
            error.add_note(f"the other ranks could not be notified: {problem}")
        self.undo()

    def keep(self, found_nonfinite: Tensor | bool) -> None:
        """Keep the new states, unless a rank has found what is not finite."""
        course = self._course
        course.close()
        if isinstance(found_nonfinite, Tensor):
            before, structure = tree.flatten_any({name: course.states[name] for name in self.states})
            after, _ = tree.flatten_any(self.states)
            self.states = tree.unflatten_any(structure, unless(found_nonfinite, before, after))
        if found_nonfinite is not True:
            course.states |= self.states
        course.steps += 1

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the gradients from before it."""
        self._course.close()
        self._course.failed_steps += 1
        for parameter, before in self._before:
            if before is None or parameter.grad is None:
                parameter.grad = None
            else:
                _local(parameter.grad).copy_(before)


def _local(grad: Tensor) -> Tensor:
    assert isinstance(grad, DTensor)
    return grad.to_local()


class Comm:
    """The method that FSDP's `ReduceScatter` and `AllGather` share."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
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
