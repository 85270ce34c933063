"""A plan prepared to run: values are in registers, and the memory of collectives and means outlives steps.

A pipeline without a plan is one segment that commits.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.sync import State, Sync, parts_of, require_means
from fnddp.core.tree import Leaves, is_inexact
from fnddp.device import Device, Stream, device_of
from fnddp.ir.plan_data import Phase
from fnddp.ir.program import (
    BufferSlice,
    Collective,
    Divisor,
    FoundNonfinite,
    Grad,
    LeafSpec,
    Mean,
    Name,
    PayloadRange,
    Received,
    Segment,
    Sent,
    StatePart,
    StepWeight,
    Temp,
)
from fnddp.plan.plan import Plan
from fnddp.run.backends import segments_of
from fnddp.torch_private import foreach_copy, storage_use_count
from fnddp.wire.groups import World, within
from fnddp.wire.protocol import CollectiveError, Elastic, Wire
from fnddp.wire.weights import Weight

T = TypeVar("T")


class Buffer:
    """The memory of a collective: a send buffer and a receive buffer, the same one for an in-place collective.

    With `views_apart` each slice looks like separate memory. Inductor needs this: it otherwise computes each element of
    a buffer from everything that is written to the buffer.
    """

    def __init__(self, collective: Collective, *, views_apart: bool) -> None:
        self._collective, self._views_apart = collective, views_apart
        # Padding is sent, and the result is checked for NaN and infinity, so it must be zero.
        empty = torch.zeros if collective.has_padding else torch.empty
        self.send = empty(collective.send_shape, dtype=collective.dtype, device=collective.device)
        is_in_place = collective.kind.is_in_place
        self.receive = self.send if is_in_place else self.send.new_empty(collective.receive_shape)
        self._tensors = (self.send,) if is_in_place else (self.send, self.receive)
        self._views: dict[BufferSlice, Tensor] = {}
        self._own_uses = [storage_use_count(tensor) for tensor in self._tensors]

    def view(self, name: BufferSlice) -> Tensor:
        """Return the slice named `name`."""
        if name not in self._views:
            index = -1 if isinstance(name, Received) else 0
            memory = self._tensors[index]
            before = storage_use_count(memory)
            self._views[name] = self._made(name, memory)
            self._own_uses[index] += storage_use_count(memory) - before
        return self._views[name]

    def _made(self, name: BufferSlice, memory: Tensor) -> Tensor:
        collective = self._collective
        if isinstance(name, PayloadRange):
            first, last = collective.payloads[name.first], collective.payloads[name.last]
            return memory.narrow(-1, first.offset, last.offset + last.width - first.offset)
        payload = collective.payloads[name.position]
        shape = (collective.sent_shape if isinstance(name, Sent) else collective.received_shape)(name.position)
        columns = memory.narrow(-1, payload.offset, payload.width)
        if self._views_apart and columns.numel():  # make a separate storage with this tensor only
            return torch.from_dlpack(columns.view(torch.uint8)).view(payload.dtype).view(shape).data
        # Contiguous if the buffer has no other payload and no padding.
        return columns.view(payload.dtype).view(shape)

    @property
    def is_held(self) -> bool:
        """True while a caller holds a tensor of this memory."""
        if any(storage_use_count(t) > own for t, own in zip(self._tensors, self._own_uses, strict=True)):
            return True
        return self._views_apart and any(storage_use_count(view) > 1 for view in self._views.values() if view.numel())


class Pool:
    """The buffers of one collective. There are two if a caller still held the first when it was needed."""

    def __init__(self, collective: Collective, views_apart: bool) -> None:
        self._collective, self._views_apart = collective, views_apart
        self._buffers: list[Buffer] = []

    def take(self) -> Buffer:
        """Return a buffer that no caller holds. It stays in the pool."""
        free = next((buffer for buffer in self._buffers if not buffer.is_held), None)
        if free is None:
            free = Buffer(self._collective, views_apart=self._views_apart)
            self._buffers = [*self._buffers[-1:], free]
        return free


class PlanMemory:
    """Memory that consecutive plans share. A tensor that a caller still holds is not reused."""

    def __init__(self) -> None:
        self.clear()
        self._streams: dict[Device, Stream] = {}

    def clear(self) -> None:
        """Release all memory, before plans with another layout."""
        self._collectives: dict[Collective, Pool] = {}
        self._means: dict[str, list[Tensor]] = {}

    def stream(self, device: Device) -> Stream:
        """Return the side stream of `device`, shared by all plans because the allocator caches memory by stream."""
        if device not in self._streams:
            self._streams[device] = device.stream()
        return self._streams[device]

    def pool(self, collective: Collective, *, views_apart: bool) -> Pool:
        """Return the buffers of `collective`. Plans that share memory must have the same backend."""
        return self._collectives.setdefault(collective, Pool(collective, views_apart))

    def take_mean(self, path: str, leaf: LeafSpec) -> Tensor:
        """Return unused memory for the mean of a leaf. Return it later with `give_mean`."""
        pool = self._means.setdefault(path, [])
        free = next((tensor for tensor in pool if storage_use_count(tensor) == 1), None)
        if free is None:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        pool[:] = [tensor for tensor in pool if tensor is not free]
        return free

    def give_mean(self, path: str, memory: Tensor) -> None:
        """Keep memory for later means of a leaf, and reuse it once no caller holds it."""
        self._means[path] = [*self._means.get(path, [])[-1:], memory]


class BoundSegment(NamedTuple):
    """A segment with register numbers instead of names: a list of values is faster than a dict by name."""

    segment: Segment
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...]


class Input(NamedTuple):
    """How a step handles the gradient of a leaf."""

    path: str
    leaf: LeafSpec
    register: int | None  # of the gradient; None for a leaf that is dropped or has a slot
    like: tuple[Any, ...] | None  # shape, dtype, device and strides of gradients that can be used as is
    slot: int | None  # register of the slice that is sent, if the gradient is only copied there
    is_cloned: bool  # copy the gradient if a caller holds it, since a segment writes over it
    is_own: bool  # True if it is not reduced over ranks


class Program:
    """The code that the steps of one phase run.

    Args:
        groups: Process groups of ranks that end a step together; None if they are unknown.
        clones_shared: True to copy gradients that share memory with other tensors before they are written over.
        is_static: False for a plan of `without_schedule`.

    Attributes:
        plan: The plan; None for a plan of `without_schedule`.
        segment_of: For each leaf, the index of the first segment that needs it. For leaves that only the result needs,
            the index of an extra last entry in `needed` that never becomes complete.
        needed: For each segment, the number of leaves that it needs.
        dtypes: The dtype of each leaf.
        hides_nonfinite: See `Sync.hides_nonfinite`.
        passed_on: Leaves with a mean that may be the gradient itself, so that the caller may own its memory.
        is_polled: True if segments also wait for collectives that the host must poll.
        device: The device of the leaves and of the vote.
        stream: Its side stream; None on the CPU, and for a plan of `without_schedule`.
    """

    def __init__(
        self,
        plan: Plan,
        wire: Wire,
        memory: PlanMemory,
        groups: Sequence[str | None] | None = None,
        *,
        device: torch.device,
        clones_shared: bool = False,
        is_static: bool = True,
    ) -> None:
        self.plan = plan if is_static else None
        self.wire, self.groups, self._memory, self.leaves = wire, groups, memory, plan.leaves
        segments, self.collectives = segments_of(plan), plan.collectives
        self.wire_bytes = [collective.wire_bytes for collective in self.collectives]
        views_apart = plan.backend == "inductor"
        self.pools = [memory.pool(collective, views_apart=views_apart) for collective in self.collectives]
        self._rows = [collective for collective in self.collectives if not collective.kind.is_in_place]
        self._counted = [*plan.phase.groups, *(collective.group for collective in self._rows)]
        self._numbers: list[int] | None = None  # counters and sizes for which the plan last held
        state = [part for part in plan.state if isinstance(part, Name)]
        of_segments = chain.from_iterable((*segment.inputs, *segment.outputs) for segment in segments)
        fills = {path: place for segment in segments for path, place in segment.fills}
        names = dict.fromkeys([*of_segments, *plan.means.values(), *state, *plan.memories.values()])
        register = {name: index for index, name in enumerate(names)}

        def all_of(kind: type[T]) -> list[tuple[int, T]]:
            return [(index, name) for name, index in register.items() if isinstance(name, kind)]

        def at(names: Sequence[Name]) -> tuple[int, ...]:
            return tuple(register[name] for name in names)

        self.segments = [BoundSegment(each, at(each.inputs), at(each.outputs), at(each.frees)) for each in segments]
        self._means = {path: register[name] for path, name in plan.means.items()}
        self._state = [(register[part], None) if isinstance(part, Name) else (None, part) for part in plan.state]
        self._memories = {path: register[name] for path, name in plan.memories.items()}
        self._parts = [(i, part.index, part.index in plan.overwrites_state) for i, part in all_of(StatePart)]
        self.passed_on = {path for path, name in plan.means.items() if not is_static or isinstance(name, Grad)}
        self._found = all_of(FoundNonfinite)
        self._results, self._divisors, self._weights = all_of(Mean), all_of(Divisor), all_of(StepWeight)
        self._slices = [*all_of(Sent), *all_of(Received), *all_of(PayloadRange)]
        known: dict[Any, Tensor] = {**plan.constants, **{name: spec.empty() for name, spec in plan.scratch.items()}}
        self._constants = [known.get(name) for name in names]
        # The last step's buffers, registers that hold their slices, and slots of gradients that are only copied.
        self._filled: tuple[list[Buffer], list[Any], list[Tensor | None]] | None = None
        self.device = device_of(device)
        self.stream = memory.stream(self.device) if is_static else None
        self.overwrites, self.hides_nonfinite = plan.overwrites, plan.sync.hides_nonfinite
        register_of = {name.path: index for index, name in all_of(Grad)}
        slots = {path: register[place] for path, place in fills.items()}
        self.inputs = [
            self._input(path, register_of.get(path), slots.get(path), plan, clones_shared) for path in plan.leaves
        ]
        self.dtypes = [leaf.dtype for leaf in plan.leaves.values()]
        self.positions = {path: position for position, path in enumerate(plan.leaves)}
        needed_by = {path: i for i, segment in enumerate(segments) for path in segment.needs}
        self.segment_of = [needed_by.get(path, len(segments)) for path in plan.leaves]
        self.needed = [*(len(segment.needs) for segment in segments), len(plan.leaves) + 1]
        self.is_polled = not self.device.is_asynchronous and any(one.waits and not one.commits for one in segments)

    def _input(self, path: str, register: int | None, slot: int | None, plan: Plan, clones_shared: bool) -> Input:
        leaf = plan.leaves[path]
        # Autograd conjugates complex gradients lazily, and negates imaginary parts (views with gaps, or scalars).
        is_plain = leaf.shape and not leaf.dtype.is_complex
        like = (leaf.shape, leaf.dtype, leaf.device, leaf.stride) if is_plain else None
        is_own = not plan.sync.reduces(path)
        return Input(path, leaf, register, like, slot, clones_shared and path in plan.overwrites, is_own)

    def is_for(self, parts: Sequence[Any]) -> bool:
        """Return True if the plan is valid for the counters in `parts` and the current sizes of its groups."""
        if self.plan is None:
            return True
        phase = self.plan.phase
        numbers = [*(parts[i] for i in phase.counters), *map(self.wire.size, self._counted)]
        if numbers != self._numbers:
            n = len(numbers) - len(self._rows)
            if not phase.holds(numbers[:n]) or numbers[n:] != [each.world_size for each in self._rows]:
                return False
            self._numbers = numbers
        return True

    def begin(self, parts: Sequence[Any], weight: Weight | None) -> tuple[list[Buffer], list[Any], list[Tensor | None]]:
        """Return the memory of a step: buffers of collectives, registers with all values known in advance, and slots.

        Slots, by position of the leaf: the slice of a send buffer to copy its gradient to; None if operations read it.
        """
        buffers = [pool.take() for pool in self.pools]
        if self._filled is None or any(a is not b for a, b in zip(buffers, self._filled[0], strict=True)):
            values = self._constants.copy()
            for register, name in self._slices:
                values[register] = buffers[name.collective].view(name)
            slots = [None if each.slot is None else values[each.slot] for each in self.inputs]
            self._filled = buffers, values, slots
        _, filled, slots = self._filled
        values = filled.copy()
        for register, divisor in self._divisors:
            values[register] = self.wire.size(divisor.group)
        for register, _ in self._weights:
            assert weight is not None
            given = weight.tensor
            given = self.device.of_host([weight.number], torch.float64)[0] if given is None else given.double()
            values[register] = given
            if self.stream is not None:
                self.device.keep(given, self.stream)
        for register, mean in self._results:
            values[register] = self._memory.take_mean(mean.path, self.leaves[mean.path])
        for register, index, is_overwritten in self._parts:
            part = parts[index]
            is_held = is_overwritten and storage_use_count(part) > 1  # by a caller
            values[register] = part.clone() if is_held else part
        return buffers, values, slots

    def end(self, values: list[Any]) -> tuple[Leaves, list[Any]]:
        """Return the means, and the parts of the next state, from the registers of a step that has run."""
        # Return new tensors, since views would hold their bases. A caller that holds a new one holds its memory only.
        means = {path: mean.data for path, i in self._means.items() if (mean := values[i]) is not None}
        parts = [part if register is None else values[register] for register, part in self._state]
        for path, register in self._memories.items():
            self._memory.give_mean(path, values[register].view(self.leaves[path].shape).data)
        return means, [part.data if isinstance(part, Tensor) else part for part in parts]

    def received(self, buffers: Sequence[Buffer]) -> list[Tensor]:
        """Return all received payloads of floating-point or complex dtypes."""
        found: list[Tensor] = []
        for collective, buffer in zip(self.collectives, buffers, strict=True):
            if is_inexact(buffer.receive):  # all payloads at once
                found.append(buffer.receive)
                continue
            for position, payload in enumerate(collective.payloads):
                if payload.dtype.is_floating_point or payload.dtype.is_complex:
                    found.append(buffer.view(Received(collective.index, position)))
        return found

    def set_nonfinite(self, values: list[Any], found: Tensor | bool) -> None:
        """Set the value that segments read to keep parts of the state, whether NaN or infinity was received."""
        for register, _ in self._found:
            is_there = isinstance(found, Tensor)
            values[register] = found if is_there else torch.full((), found, device=self.device.device)

    def keep_parts(self, values: list[Any], parts: Sequence[Any]) -> None:
        """Replace the parts of the state that segments write over by copies in the registers."""
        own = {
            register: torch.empty_like(parts[index])
            for register, index, is_overwritten in self._parts
            if is_overwritten and values[register] is parts[index]
        }
        if own:
            foreach_copy(list(own.values()), [values[register] for register in own])
        for register, copy in own.items():
            values[register] = copy


class UnexpectedGradient(ValueError):
    """A step got an unexpected gradient: for an unknown leaf, a second one, or one that does not match `leaf`."""

    def __init__(self, path: str, grad: Tensor, problem: str = "", leaf: LeafSpec | None = None) -> None:
        if leaf is not None:
            problem = (
                f"is {LeafSpec.of(grad)} on {grad.device}, but the plan was made for {leaf} on {leaf.device}; lower "
                "the pipeline again for the new parameters"
            )
        super().__init__(f"gradient {path!r} {problem}")
        self.path, self.grad, self.is_unlike = path, grad, leaf is not None


def without_schedule(
    sync: Sync, leaves: Mapping[str, LeafSpec], state: State, groups: Sequence[str | None], world: World
) -> Plan:
    """Return a plan of one segment that commits, for a pipeline without a static schedule.

    `leaves` and `state` have the shapes of those in steps; `groups` are the groups over which means are taken.
    """
    given, structure = tree.flatten_any(state)
    n, end = len(leaves), len(leaves) + len(given)  # not the state itself: `run` would keep it alive

    def run(*inputs: Any) -> tuple[Any, ...]:
        grads, parts, numbers = inputs[:n], inputs[n:end], inputs[end:]
        ranks, weight = dict(zip(groups, numbers, strict=False)), numbers[-1] if sync.takes_weight else None
        with within(World(world.wire, ranks=ranks, weight=weight)):
            grads = dict(zip(leaves, grads, strict=True))
            mean, _, after = sync.exchange(grads, tree.unflatten_any(structure, list(parts)))
        if isinstance(world.wire, Elastic) and world.wire.lost is not None:
            raise CollectiveError(f"a rank was lost: {world.wire.lost}")
        require_means(sync, leaves, mean)
        return *(mean.get(path) for path in leaves), *parts_of(sync, after, structure)

    means: dict[str, Name] = {path: Temp(f"mean of {path}") for path in leaves}
    state_after = tuple(Temp(f"part {i}") for i in range(len(given)))
    segment = Segment(
        slot=0,
        needs=tuple(leaves),
        waits=(),
        inputs=(
            *map(Grad, leaves),
            *(StatePart(i) for i in range(len(given))),
            *map(Divisor, groups),
            *([StepWeight()] if sync.takes_weight else []),
        ),
        outputs=(*means.values(), *state_after),
        frees=(),
        run=run,
        launches=None,
        operations=(),
        commits=True,
    )
    return Plan(
        sync=sync,
        leaves=dict(leaves),
        buckets={},
        segments=(segment,),
        means=means,
        state=state_after,
        phase=Phase((), tuple(groups), lambda _: True),
        following=lambda _: (),
    )
