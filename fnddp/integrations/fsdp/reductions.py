"""The reductions of gradients in a backward of FSDP2, which end on all ranks alike."""

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
from fnddp.core import collectives, tree
from fnddp.core.sync import State, Sync, require_takes_weight
from fnddp.device import device_of
from fnddp.integrations.fsdp.unit import Sending, Unit
from fnddp.run.nonfinite import has_nonfinite, spoil, unless
from fnddp.run.step import Synchronized, applying, require_noticed
from fnddp.run.vote import StepFailedError, Vote
from fnddp.torch_private import fsdp_groups
from fnddp.transforms.weighted import weighted
from fnddp.wire.c10d import C10D
from fnddp.wire.groups import World, within
from fnddp.wire.protocol import CollectiveError
from fnddp.wire.weights import Weight, no_weight


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
    """The weight of this rank in the backwards that begin in a block; None outside of one."""

    given: float | None = None

    @contextmanager
    def block(self, sync: Sync, count: float) -> Generator[None]:
        """Set the weight in the block. Raise a TypeError if `sync` takes none."""
        require_takes_weight(sync, count)
        before, self.given = self.given, count
        try:
            yield
        finally:
            self.given = before


class Reductions:
    """The reductions of a model's gradients in consecutive backwards; `states` are those after the last that succeeded.

    They are in the place of an engine: each backward is a `Reduction`, on its own or as a part of a step of replicas.

    Attributes:
        takes_weight: True if the pipeline of gradients is `weighted`.
        begin_around: Begins the step of replicas of which the next one is a part, if there is one.
    """

    def __init__(self, units: Sequence[Unit], states: dict[str, State], ends: Ends, takes_weight: bool) -> None:
        self.units, self.states, self.weight, self._ends = units, states, RankWeight(), ends
        self.takes_weight = takes_weight
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
                mean, step.states[unit.name] = unit.reduce(step.weighted(unit, buffer), state, messages)
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

    def __init__(self, reductions: Reductions, backward: Backward) -> None:
        self._reductions, self.backward, self._has_voted = reductions, backward, False
        self._is_known = False  # to all ranks, that it has failed
        self.weight = Weight.of(reductions.weight.given) if reductions.takes_weight else None
        self.is_weighed, self._weights = self.weight is None, Sending()
        self.states: dict[str, State] = {}  # what they become if it ends well
        remembers = any(isinstance(each, Tensor) for each in tree.flatten_any(reductions.states)[0])
        self.is_nonfinite: Tensor | bool | None = False if remembers else None  # None where it does not matter
        self.mean_weight: Tensor | None = None  # of the ranks of a mesh, the same for all meshes
        self._scales: dict[str | None, Tensor] = {}  # factors of this rank's gradients
        parameters = [p for unit in reductions.units for p in unit.fsdp.parameters]
        self._before = [(p, None if p.grad is None else _local(p.grad).clone()) for p in parameters]

    def weigh(self) -> None:
        """Send this rank's weight over each mesh, unless that is done; after an interrupt, what is left of it."""
        if self.is_weighed or self.weight is None:
            return
        reductions, means = self._reductions, dict[str | None, Tensor]()
        if not self.weight.is_valid:  # NaN is sent, and counts as 0 until the vote fails the step
            self.backward.keep(no_weight(self.weight))
        (mine,) = reductions.device.of_host([self.weight.number], torch.float64)
        self._weights.begin_again()
        with within(World(self._weights)):
            for group, n in {unit.group: unit.n for unit in reductions.units}.items():
                means[group] = collectives.all_reduce({"": mine}, "sum", group)[""] / n
        self._scales = {group: torch.where(mean > 0, mine / mean, 0.0) for group, mean in means.items()}
        self.mean_weight, self.is_weighed = next(iter(means.values())), True
        if not reductions.device.is_asynchronous:  # where the host would wait
            self._require_even([mean.item() for mean in means.values()])

    def _require_even(self, means: Sequence[float]) -> None:
        """Fail the step if this rank's meshes have unlike mean weights: experts see tokens of other meshes, too."""
        if max(means) - min(means) > 1e-9 * max(means):  # False for NaN
            problem = (
                f"weight: the means over the meshes of this rank are {means}; ranks whose tokens go to the same "
                "experts must all give one weight, such as the number of tokens of all of them"
            )
            self.backward.keep(ValueError(problem))

    def weighted(self, unit: Unit, buffer: Tensor) -> Tensor:
        """Return the gradients in `buffer`, weighted."""
        if self.weight is None:
            return buffer
        if self.weight.number == 0:  # of no samples: their mean may be NaN
            return torch.zeros_like(buffer)
        return weighted.scaled(buffer, self._scales[unit.group])

    def note(self, mean: Tensor) -> None:
        """Note whether a mean is finite: if one is not, on any rank, memory stays as it was."""
        if self.is_nonfinite is not None:
            self.is_nonfinite = has_nonfinite([mean], self._reductions.device) | self.is_nonfinite

    def agree(self) -> frozenset[str]:
        """Vote; see `fnddp.run.step.Step.agree`."""
        self._has_voted = True
        found = False if self.is_nonfinite is None else self.is_nonfinite  # for `or` an accelerator's host would wait
        counts = self.weight is None or self.weight.number > 0
        self._reductions.vote.cast(frozenset(), nonfinite=found, counts=counts)
        try:
            return self._reductions.vote.outcome()
        except (StepFailedError, ValueError):  # on all ranks
            self._is_known = True
            raise

    def commit(self) -> Synchronized:
        """Commit the states; the gradients are FSDP's."""
        self._reductions.notice = self._reductions.vote.notice()
        found = self._reductions.vote.found_nonfinite()
        self.keep(found)
        if found is not False:  # what memory has kept must not be applied by any optimizer
            with torch.no_grad():
                spoil([_local(p.grad) for p, _ in self._before if p.grad is not None], found)
        return Synchronized({}, frozenset())

    def fail(self, error: BaseException) -> None:
        """Notify the other ranks, unless all have voted, and undo it."""
        reductions = self._reductions
        has_voted = self._has_voted and reductions.vote.is_cast
        reductions.broken = None if self._is_known else error  # until the others know
        try:
            if not has_voted and not isinstance(error, CollectiveError):
                reductions.vote.cast(frozenset(), failed=True)
                reductions.broken = None if reductions.vote.explain(error) else error
        except RuntimeError as problem:
            error.add_note(f"the other ranks could not be notified: {problem}")
        self.undo()

    def keep(self, found_nonfinite: Tensor | bool) -> None:
        """Keep the new states, unless a rank has found what is not finite."""
        reductions = self._reductions
        reductions.close()
        if isinstance(found_nonfinite, Tensor):
            before, structure = tree.flatten_any({name: reductions.states[name] for name in self.states})
            after, _ = tree.flatten_any(self.states)
            self.states = tree.unflatten_any(structure, unless(found_nonfinite, before, after))
        if found_nonfinite is not True:
            reductions.states |= self.states
        reductions.steps += 1

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the gradients from before it."""
        self._reductions.close()
        self._reductions.failed_steps += 1
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
