"""The reductions of gradients in a backward of FSDP2; all ranks end them with the same outcome."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fnddp import torch_private
from fnddp.adapters.backward import Backward, RankWeight
from fnddp.core import collectives, tree
from fnddp.core.sync import State
from fnddp.device import device_of
from fnddp.integrations.fsdp.unit import Sending, Unit
from fnddp.plan.draft import Donation
from fnddp.reducers.all_reduce import none
from fnddp.run.engine import Engine
from fnddp.run.nonfinite import has_nonfinite, kept, spoil
from fnddp.run.step import Step, applying
from fnddp.torch_private import fsdp_groups, local_of
from fnddp.transforms.weighted import weighted
from fnddp.wire.groups import World, within
from fnddp.wire.protocol import CollectiveError
from fnddp.wire.weights import Weight, no_weight


class Ends:
    """Callbacks that end steps, each after FSDP has ended the step's backward of `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._waiting: list[Callable[[], object]] = []
        torch_private.after_reductions(model, self._run)

    def add(self, backward: Backward, end: Callable[[], None]) -> None:
        """Call `end` once, for the open step of `backward`, unless the backward raises. Keep `end` alive until then."""

        def run() -> None:
            if torch_private.is_within_backward():  # queue it again, after FSDP's own callbacks
                backward.end_with_autograds(end)
            else:
                with applying(backward.engine):
                    end()

        if torch_private.is_within_backward():
            torch_private.at_end_of_backward(run)
        else:  # after all backwards of a pipeline's stage
            self._waiting.append(run)

    @torch_private.skipped_by_dynamo
    def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()


class Reductions:
    """The reductions of a model's gradients in consecutive backwards; `states` are those after the last success.

    Those of one backward are a `Reduction`: part of the step of `compress_replicas`, or of a step that only votes.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], states: dict[str, State], takes_weight: bool) -> None:
        self.model, self.units, self.states, self.weight, self._ends = model, units, states, RankWeight(), Ends(model)
        self.takes_weight = takes_weight  # True if the pipeline of gradients is `weighted`
        device = units[0].fsdp.device
        self.device = device_of(device)
        groups = list(dict.fromkeys(group for unit in units for group in unit.groups))
        engine = Engine(none, {}, donation=Donation(), learns_order=False, groups=groups, device=device)
        self.backward = Backward(engine, undo=self.undo)  # of the steps that reductions are part of
        self._start = self._start_alone
        self.close()

    @property
    def engine(self) -> Engine:
        """The engine of the steps that reductions are part of."""
        return self.backward.engine

    @property
    def part(self) -> "Reduction | None":
        """The part of the open step, kept alive by the callback at the end of its backward; None if that raised."""
        return self._part()

    def join(self, backward: Backward, start: Callable[[], object]) -> None:
        """Run reductions within the steps of `backward` from now on; `start` begins such a step, and calls `begin`."""
        self.backward, self._start = backward, start

    @torch_private.skipped_by_dynamo
    def reduce(self, unit: Unit, mine: Tensor, buffer: Tensor) -> None:
        """Write to `mine`, `[width]`, the mean of this rank's row of `buffer`, `[ranks, width]`."""
        try:
            self._reduce(unit, mine, buffer)
        except (CollectiveError, KeyboardInterrupt) as error:
            self.engine.broken = type(error)(*error.args)  # without frames: they would keep the part alive
            raise

    def _reduce(self, unit: Unit, mine: Tensor, buffer: Tensor) -> None:
        if self.part is None:
            self._start()
        part, messages = self.part, Sending()
        assert part is not None
        with torch.no_grad(), torch_private.without_autocast():
            try:
                part.weigh()
                state = part.states.get(unit.name, self.states[unit.name])
                mean, part.states[unit.name] = unit.reduce(part.weighted(unit, buffer), state, messages)
                mine.copy_(mean)
                part.note(mean)
            except CollectiveError:
                raise
            except BaseException as error:  # FSDP's other collectives must still run on all ranks
                self.backward.keep(error if part.is_weighed else error.with_traceback(None))  # see below
                part.weigh()
                unit.reduce_nothing(buffer, messages)
                mine.zero_()
            finally:
                del part  # the error's frames would keep it alive if this backward fails

    def _start_alone(self) -> None:
        self.backward.require_idle()
        self.require_whole()  # before anything is sent
        part = self.begin()
        self.backward.begin()
        self._ends.add(self.backward, partial(self._finish, part))

    def _finish(self, part: "Reduction") -> None:
        step = self.backward.step
        self.backward.end(partial(part.report_to, step))
        part.commit(step.found_nonfinite)

    def begin(self) -> "Reduction":
        """Return a new `part` of a step. The caller must keep it until the step ends: `part` holds a weak reference."""
        part = Reduction(self)
        self._part = weakref.ref(part)
        return part

    def undo(self) -> None:
        """Restore the gradients from before the open step."""
        if (part := self.part) is not None:
            part.undo()

    def require_whole(self) -> None:
        """Raise a RuntimeError if ranks may be desynchronized, or on an accelerator one has failed."""
        self.engine.refuse_after_failure()
        self.engine.require_noticed()

    def before_forward(self, *_: object) -> None:
        """Fail a step if its backward did not finish. Raise a RuntimeError if ranks may be desynchronized."""
        self.engine.lane.require_whole()
        if self.device.is_asynchronous:  # all ranks raise in backward, after FSDP's gathers
            return
        if not torch_private.is_within_backward():  # activation checkpointing
            self.engine.refuse_after_failure()
            self.backward.require_idle()

    def refuse_capture(self, *_: object) -> None:
        """Raise a RuntimeError if a captured step would replace the memory of its states, or takes a weight."""
        if self.takes_weight or tree.flatten_any(self.states)[0]:
            self.device.refuse_capture("compress_shards has a pipeline of gradients with a state or a weight")

    def close(self) -> None:
        """Drop the part; otherwise an error raised at the end of its step would keep it alive."""
        self._part: Callable[[], Reduction | None] = lambda: None


class Reduction:
    """The reductions of a backward, as a part of its step."""

    def __init__(self, reductions: Reductions) -> None:
        self._reductions = reductions
        self.weight = Weight.of(reductions.weight.given) if reductions.takes_weight else None
        self.is_weighed, self._weights = self.weight is None, Sending()
        self.states: dict[str, State] = {}  # the new states, if it succeeds
        remembers = any(isinstance(each, Tensor) for each in tree.flatten_any(reductions.states)[0])
        self._is_nonfinite: Tensor | bool | None = False if remembers else None  # None where it does not matter
        self.mean_weight: Tensor | None = None  # of the ranks of a mesh, the same for all meshes
        self._scales: dict[str | None, Tensor] = {}  # factors of this rank's gradients
        parameters = [p for unit in reductions.units for p in unit.fsdp.parameters]
        self._before = [(p, None if p.grad is None else local_of(p.grad).clone()) for p in parameters]

    def weigh(self) -> None:
        """Sum the weights of ranks over each mesh, once in a step. After an interrupt, finish the remaining meshes."""
        if self.is_weighed or self.weight is None:
            return
        reductions, means = self._reductions, dict[str | None, Tensor]()
        if not self.weight.is_valid:  # NaN is sent, and counts as 0 until the vote fails the step
            reductions.backward.keep(no_weight(self.weight))
        (mine,) = reductions.device.of_host([self.weight.number], torch.float64)
        self._weights.begin_again()
        with within(World(self._weights)):
            for group, n in {unit.group: unit.n for unit in reductions.units}.items():
                means[group] = collectives.all_reduce({"": mine}, "sum", group)[""] / n
        self._scales = {group: torch.where(mean > 0, mine / mean, 0.0) for group, mean in means.items()}
        self.mean_weight, self.is_weighed = next(iter(means.values())), True
        if not reductions.device.is_asynchronous:  # where the host would wait
            every = [mean.item() for mean in means.values()]
            if max(every) - min(every) > 1e-9 * max(every):  # experts also see tokens of other meshes; False for NaN
                problem = (
                    f"weight: the means over the meshes of this rank are {every}; ranks whose tokens go to the same "
                    "experts must all give one weight, such as the number of tokens of all of them"
                )
                reductions.backward.keep(ValueError(problem))

    def weighted(self, unit: Unit, buffer: Tensor) -> Tensor:
        """Return the gradients in `buffer`, weighted."""
        if self.weight is None:
            return buffer
        if self.weight.number == 0:  # no samples: the mean gradient may be NaN
            return torch.zeros_like(buffer)
        return weighted.scaled(buffer, self._scales[unit.group])

    def note(self, mean: Tensor) -> None:
        """Record whether a mean is finite: if any mean on any rank is not, memory stays unchanged."""
        if self._is_nonfinite is not None:
            self._is_nonfinite = has_nonfinite([mean], self._reductions.device) | self._is_nonfinite

    def report_to(self, step: Step) -> None:
        """Include this rank's result in the vote of `step`."""
        step.counts &= self.weight is None or self.weight.number > 0
        if self._is_nonfinite is not None:
            step.watch(self._is_nonfinite)

    @torch.no_grad()
    def commit(self, found_nonfinite: Tensor | bool) -> None:
        """Keep the new states; if a rank found NaN or infinities, keep the old ones and put NaN into gradients."""
        reductions = self._reductions
        reductions.close()
        before = tree.flatten_any({name: reductions.states[name] for name in self.states})[0]
        after, structure = tree.flatten_any(self.states)
        reductions.states |= tree.unflatten_any(structure, kept(before, after, found_nonfinite))
        if found_nonfinite is not False:
            spoil([local_of(p.grad) for p, _ in self._before if p.grad is not None], found_nonfinite)

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the gradients from before this backward."""
        self._reductions.close()
        for parameter, before in self._before:
            if before is None or parameter.grad is None:
                parameter.grad = None
            else:
                local_of(parameter.grad).copy_(before)


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
