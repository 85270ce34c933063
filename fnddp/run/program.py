"""A plan as steps run it: registers in place of names. A pipeline without a plan is one segment that commits."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.sync import State, Sync, parts_of, require_means
from fnddp.device import device_of
from fnddp.ir.program import Collective, Divisor, Grad, LeafSpec, Mean, Name, Part, Received, Segment, Sent, Span, Temp
from fnddp.ir.schedule import Phase
from fnddp.plan.plan import Plan
from fnddp.run.backends import segments_of
from fnddp.run.memory import Buffer, BufferSlice, Memory
from fnddp.show.trace import Observer
from fnddp.wire.groups import World, within
from fnddp.wire.protocol import CollectiveError, Elastic, Wire

T = TypeVar("T")


class _Registers:
    """The places of values during a step: a list is faster than a dict of names."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._indices: dict[Name, int] = {}
        for segment in segments:
            for name in (*segment.inputs, *segment.outputs):
                self.of(name)

    def of(self, name: Name) -> int:
        """Return the register of a value."""
        return self._indices.setdefault(name, len(self._indices))

    def all(self, kind: type[T]) -> list[tuple[int, T]]:
        """Return the registers of all values of a kind, and their names."""
        return [(index, name) for name, index in self._indices.items() if isinstance(name, kind)]

    def filled(self, given: Mapping[Any, Any]) -> list[Any]:
        """Return all registers, with the values that are known before any step."""
        return [given.get(name) for name in self._indices]


class Code(NamedTuple):
    """A segment, with registers for names."""

    segment: Segment
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...]


class Input(NamedTuple):
    """A leaf, and what a step does with its gradient.

    Attributes:
        path: Of the leaf.
        leaf: What the gradient must be like.
        register: Where the gradient is put; None for a leaf that was dropped.
        like: Shape, dtype, device and strides of a gradient that is put there as it is; None if each is looked at.
        is_cloned: Whether a gradient that somebody else holds is copied first, since it is written over.
    """

    path: str
    leaf: LeafSpec
    register: int | None
    like: tuple[Any, ...] | None
    is_cloned: bool


class Program:
    """The code that steps of one phase run.

    Args:
        plan: The plan.
        wire: What moves its collectives.
        memory: The source of buffers; plans that follow each other may share it.
        clones_shared: Whether gradients that share memory with something are copied before they are written over.
        is_static: False for a plan of `without_schedule`.

    Attributes:
        plan: As given; None if it is of `without_schedule`.
        wire, memory: As given.
        leaves: What gradients are like.
        inputs: For each leaf what is done with its gradient.
        codes: The segments.
        collectives: In the order in which they are issued, and `wire_bytes` of each.
        segment_of: For each leaf the segment that first needs it. Leaves that only the result needs count for an extra
            entry at the end, which is never complete.
        needed: For each segment the number of leaves that it needs.
        is_polled: Whether segments wait for collectives, too.
        overwrites: Leaves whose gradients are written over.
        parts: For each part of the state that is read its register, position, and whether it is written over.
        results: Registers of means that have memory of their own.
        ranks: The registers of what means divide by, and their groups.
        means: For each leaf the register of its mean.
        state: For each part of the next state its register, or its value.
        memories: For each leaf the register of memory that is free for its mean in the next step.
        pools: The memory of each collective.
        slices: The registers of what is stored there.
        constants: All registers, with what is known before any step.
        filled: All registers, with what is stored in the buffers of the last step.
        rows: The collectives whose payloads have a row for each rank.
        counted: The groups on whose sizes the plan depends: those of the phase, then those of `rows`.
        numbers: The counters and sizes with which the plan was found to be the right one the last time.
        device: Where the leaves are.
        stream: Its side stream; None on the CPU, and for a plan of `without_schedule`.
        observer: What is notified of all that steps do.
    """

    def __init__(
        self, plan: Plan, wire: Wire, memory: Memory, *, clones_shared: bool = False, is_static: bool = True
    ) -> None:
        self.plan = plan if is_static else None
        self.observer: Observer | None = None
        self.wire, self.memory, self.leaves = wire, memory, plan.leaves
        segments, self.collectives = segments_of(plan), plan.collectives
        self.wire_bytes = [collective.wire_bytes for collective in self.collectives]
        views_apart = plan.backend == "inductor"
        self.pools = [memory.pool(collective, views_apart=views_apart) for collective in self.collectives]
        self.numbers: list[int] | None = None
        self.rows = [collective for collective in self.collectives if not collective.kind.is_in_place]
        self.counted = [*plan.phase.groups, *(collective.group for collective in self.rows)]
        registers = _Registers(segments)
        names = [(segment.inputs, segment.outputs, segment.frees) for segment in segments]
        self.codes = [
            Code(segment, *(tuple(map(registers.of, each)) for each in three))
            for segment, three in zip(segments, names, strict=True)
        ]
        self.means = {path: registers.of(name) for path, name in plan.means.items()}
        self.state = [(registers.of(part), None) if isinstance(part, Name) else (None, part) for part in plan.state]
        self.memories = {path: registers.of(name) for path, name in plan.memories.items()}
        written = frozenset(plan.overwrites_state)
        self.parts = [(register, part.index, part.index in written) for register, part in registers.all(Part)]
        self.results = registers.all(Mean)
        self.ranks = [(register, each.group) for register, each in registers.all(Divisor)]
        self.slices: list[tuple[int, BufferSlice]] = [
            each for kind in (Sent, Received, Span) for each in registers.all(kind)
        ]
        scratch = {name: spec.empty() for name, spec in plan.scratch.items()}
        self.constants = registers.filled({**plan.constants, **scratch})
        self.filled: tuple[list[Buffer], list[Any]] | None = None
        self.device = device_of(next((leaf.device for leaf in plan.leaves.values()), torch.device("cpu")))
        self.stream = memory.stream(self.device) if is_static else None
        self.overwrites = plan.overwrites
        register_of = {name.path: index for index, name in registers.all(Grad)}
        self.inputs = [
            _input(path, leaf, register_of.get(path), self.stream, clones_shared and path in plan.overwrites)
            for path, leaf in plan.leaves.items()
        ]
        needed_by = {path: i for i, segment in enumerate(segments) for path in segment.needs}
        self.segment_of = [needed_by.get(path, len(segments)) for path in plan.leaves]
        self.needed = [*(len(segment.needs) for segment in segments), len(plan.leaves) + 1]
        self.is_polled = not self.device.is_asynchronous and any(one.waits and not one.commits for one in segments)


def _input(path: str, leaf: LeafSpec, register: int | None, stream: Any, is_cloned: bool) -> Input:
    # Autograd conjugates complex gradients lazily, and negates imaginary parts, which are views with gaps or scalars.
    is_plain = register is not None and stream is None and leaf.shape and not leaf.dtype.is_complex
    like = (leaf.shape, leaf.dtype, leaf.device, leaf.stride) if is_plain else None
    return Input(path, leaf, register, like, is_cloned)


class UnexpectedGradient(ValueError):
    """A gradient is not of a leaf that is missing, or `is_unlike` it."""

    def __init__(self, message: str, path: str, grad: Tensor, is_unlike: bool) -> None:
        super().__init__(message)
        self.path, self.grad, self.is_unlike = path, grad, is_unlike


def unexpected(path: str, grad: Tensor, leaves: Mapping[str, LeafSpec], missing: LeafSpec | None) -> UnexpectedGradient:
    """Return the error about a gradient.

    Args:
        path: Of the leaf that it is meant for.
        grad: The gradient.
        leaves: The plan's.
        missing: The leaf at `path`, if it is one that has not arrived in this step.
    """
    if missing is None:
        problem = "has arrived already in this step" if path in leaves else "is not among the plan's leaves"
        return UnexpectedGradient(f"gradient {path!r} {problem}", path, grad, is_unlike=False)
    message = (
        f"gradient {path!r} is {LeafSpec.of(grad)} on {grad.device}, but the plan was made for {missing} on "
        f"{missing.device}; lower the pipeline again for the new parameters"
    )
    return UnexpectedGradient(message, path, grad, is_unlike=True)


def failure_of(collective: Collective, error: RuntimeError) -> CollectiveError:
    """Return the error of a collective that failed with `error`."""
    carried = ", ".join([payload.label for payload in collective.payloads][:3])
    return CollectiveError(
        f"{collective.kind.name} {collective.name} of {len(collective.payloads)} payloads ({carried}, ...) over "
        f"{collective.world_size} ranks failed: {error}. Another rank has failed, left, or not called backward; "
        "see its own error"
    )


def without_schedule(
    sync: Sync, leaves: Mapping[str, LeafSpec], state: State, groups: Sequence[str | None], world: World
) -> Plan:
    """Return a plan of one segment, which commits: for a pipeline that has no static schedule.

    Args:
        sync: The pipeline.
        leaves: What gradients are like.
        state: What states are like.
        groups: The process groups that means are taken over.
        world: What the pipeline meets.
    """
    given, structure = tree.flatten_any(state)
    n, end = len(leaves), len(leaves) + len(given)  # not the state itself: what runs would keep it

    def run(*inputs: Any) -> tuple[Any, ...]:
        grads, parts, ranks = inputs[:n], inputs[n:end], inputs[end:]
        with within(World(world.wire, ranks=dict(zip(groups, ranks, strict=True)))):
            mean, _, after = sync.exchange(
                dict(zip(leaves, grads, strict=True)), tree.unflatten_any(structure, list(parts))
            )
        if isinstance(world.wire, Elastic) and world.wire.lost is not None:
            raise CollectiveError(f"a rank was lost: {world.wire.lost}")
        require_means(sync, leaves, mean)
        return *(mean.get(path) for path in leaves), *parts_of(sync, after, structure)

    means = {path: Temp(f"mean of {path}") for path in leaves}
    state_after = tuple(Temp(f"part {i}") for i in range(len(given)))
    segment = Segment(
        slot=0,
        needs=tuple(leaves),
        waits=(),
        inputs=(*map(Grad, leaves), *(Part(i) for i in range(len(given))), *map(Divisor, groups)),
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
        means=dict(means),
        state=state_after,
        phase=Phase((), tuple(groups), lambda _: True),
        following=lambda _: (),
        overwrites=frozenset(),
        overwrites_state=(),
        results=frozenset(),
        memories={},
        constants={},
        scratch={},
        peak_bytes=0,
        backend=None,
    )
