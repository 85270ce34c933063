"""The runner of a plan: it runs while gradients arrive.

Segments run strictly in the order of the plan. Execution stops at the first one whose gradients are not there or whose
collectives are not complete, and goes on at the next feed; `drain` and `wait` wait. So collectives leave in the same
order on all ranks, whatever the timing, and nothing blocks inside backward.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fnddp.core.tree import Leaves
from fnddp.ir.program import Collective, Divisor, Grad, LeafSpec, Mean, Name, Part, Received, Segment, Sent, Span
from fnddp.plan.plan import Plan
from fnddp.run.backends import segments_of
from fnddp.run.inbox import Inbox
from fnddp.run.memory import Buffer, Memory
from fnddp.run.runner import unexpected
from fnddp.show.trace import Observer, Ranges
from fnddp.torch_private import is_held, storage_use_count, without_autocast, without_modes
from fnddp.wire.counter import count_payload
from fnddp.wire.protocol import CollectiveError, Wire, Work, waited

POLL_SECONDS = 2e-4
"""How long collectives under way are left alone while gradients arrive that complete no segment."""

T = TypeVar("T")


class _Registers:
    """Where values are kept during a step: a list is faster than a dict of names."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._indices: dict[Name, int] = {}
        for segment in segments:
            for name in (*segment.inputs, *segment.outputs):
                self.of(name)

    def of(self, name: Name) -> int:
        """The register of a value."""
        return self._indices.setdefault(name, len(self._indices))

    def all(self, kind: type[T]) -> list[tuple[int, T]]:
        """The registers of all values of a kind, and their names."""
        return [(index, name) for name, index in self._indices.items() if isinstance(name, kind)]

    def filled(self, given: Mapping[Any, Any]) -> list[Any]:
        """All registers, with what is known before any step."""
        return [given.get(name) for name in self._indices]


class _Code(NamedTuple):
    """A segment, with registers for names."""

    segment: Segment
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...]

    @classmethod
    def of(cls, segment: Segment, register: Callable[[Name], int]) -> "_Code":
        names = segment.inputs, segment.outputs, segment.frees
        return cls(segment, *(tuple(map(register, each)) for each in names))


class Planned:
    """Runs one plan, once for each `start`. See `Runner`.

    On CUDA everything is issued on a side stream, waits are stream waits, and the host never blocks.

    Args:
        plan: What to run.
        wire: Who moves its collectives.
        memory: Where buffers come from; plans that follow each other may share them.
        clones_shared: Whether gradients that share memory with something are copied before they are written over.
        observer: Whoever wants to know what is done when.

    Attributes:
        inbox: Where hooks may put gradients themselves, by the position of their leaf in the plan, instead of `feed`.
            `advance` must then be called when it says that a segment is complete.
    """

    def __init__(
        self, plan: Plan, wire: Wire, memory: Memory, *, clones_shared: bool = False, observer: Observer | None = None
    ) -> None:
        self.plan = plan
        self._wire, self._memory, self._clones_shared = wire, memory, clones_shared
        self._observer: Observer = observer or Ranges()
        self._segments, self._collectives = segments_of(plan), plan.collectives
        self._wire_bytes = [collective.wire_bytes for collective in self._collectives]
        registers = _Registers(self._segments)
        self._codes = [_Code.of(segment, registers.of) for segment in self._segments]
        self._means = {path: registers.of(name) for path, name in plan.means.items()}
        self._state = [(registers.of(part), None) if isinstance(part, Name) else (None, part) for part in plan.state]
        self._memories = {path: registers.of(name) for path, name in plan.memories.items()}
        overwrites = frozenset(plan.overwrites_state)
        self._parts = [(register, part.index, part.index in overwrites) for register, part in registers.all(Part)]
        self._results, self._ranks = registers.all(Mean), registers.all(Divisor)
        self._lying = [each for kind in (Sent, Received, Span) for each in registers.all(kind)]
        scratch = {name: spec.empty() for name, spec in plan.scratch.items()}
        self._constants = registers.filled({**plan.constants, **scratch})
        device = next((leaf.device for leaf in plan.leaves.values() if leaf.device.type == "cuda"), None)
        self._stream = None if device is None else memory.stream(device)
        register_of = {name.path: index for index, name in registers.all(Grad)}
        self._leaves = [
            (path, leaf, register_of.get(path), path in plan.overwrites) for path, leaf in plan.leaves.items()
        ]
        # As most gradients are, and what is to be done with them: nothing but to keep them, if nobody else does where
        # they are written over. Not complex ones, which autograd conjugates lazily, and scalars: it negates imaginary
        # parts lazily, which are views with gaps otherwise.
        self._plain = [
            (path, register, (leaf.shape, leaf.dtype, leaf.device, leaf.stride), is_overwritten and clones_shared)
            if register is not None and self._stream is None and leaf.shape and not leaf.dtype.is_complex
            else (path, 0, None, False)
            for path, leaf, register, is_overwritten in self._leaves
        ]
        needed = {path: i for i, segment in enumerate(self._segments) for path in segment.needs}
        self._positions = {path: position for position, path in enumerate(plan.leaves)}
        # Behind the last segment there is one that needs what is only returned, and that is never complete.
        nobody = len(self._segments)
        lacking = [*(len(segment.needs) for segment in self._segments), len(plan.leaves) + 1]
        is_polled = device is None and any(one.waits and not one.commits for one in self._segments)
        segment_of = [needed.get(path, nobody) for path in plan.leaves]
        self.inbox = Inbox(segment_of, lacking, device, is_polled=is_polled)
        self._missing: dict[str, LeafSpec] = {}
        self._works: dict[int, Work] = {}
        self._values: list[Any] = []
        self._buffers: list[Buffer] = []
        self._next = len(self._segments)
        self._to_send = 0
        self._polled = 0.0
        self._filled_with: tuple[list[Buffer], list[Any]] | None = None

    def watch(self, observer: Observer) -> None:
        """Lets `observer` know what is done when, and nobody else."""
        self._observer = observer

    @property
    def missing(self) -> dict[str, LeafSpec]:
        self._look()
        return self._missing

    @property
    def has_sent(self) -> bool:
        return self._to_send < len(self._collectives)

    def start(self, parts: Sequence[Any], ranks: Mapping[str | None, int]) -> None:
        plan = self.plan
        self._observer.begins()
        apart = plan.backend == "inductor"
        self._buffers = [self._memory.take(collective, views_apart=apart) for collective in self._collectives]
        values = self._filled(self._buffers)
        for register, group in self._ranks:
            values[register] = ranks[group.group]
        for register, mean in self._results:
            values[register] = self._memory.take_mean(mean.path, plan.leaves[mean.path])
        for register, index, is_overwritten in self._parts:
            value = parts[index]
            is_read = is_overwritten and storage_use_count(value) > 1  # by somebody else
            values[register] = value.clone() if is_read else value
        self._values = values
        self._next, self._to_send = 0, len(self._collectives)
        self._missing = plan.leaves.copy()
        self.inbox.open()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def _filled(self, buffers: list[Buffer]) -> list[Any]:
        """All registers, with constants and what lies in these buffers: mostly those of the last step."""
        if self._filled_with is None or not all(map(is_, buffers, self._filled_with[0])):
            values = self._constants.copy()
            for register, name in self._lying:
                values[register] = buffers[name.collective].view(name)
            self._filled_with = buffers, values
        return self._filled_with[1].copy()

    def feed(self, path: str, grad: Tensor, *, keep: bool = False) -> bool:
        leaf = self.missing.get(path)
        if leaf is None or not leaf.is_like(grad):
            raise unexpected(path, grad, self.plan.leaves, leaf)
        if keep and path in self.plan.overwrites:
            grad = grad.clone()
        return self.inbox.put(self._positions[path], grad) or self.is_due()

    def advance(self, *, block: bool = False) -> None:
        # Without autocast, which would compute factors in half precision where backward runs within it.
        with torch.no_grad(), without_autocast(), self._on_side_stream():
            self._look()
            while self._next < len(self._segments) and self._is_ready(self._segments[self._next], block):
                self._run(self._codes[self._next])
                self._next += 1

    def drain(self) -> None:
        for path, leaf in list(self.missing.items()):
            self.inbox.put(self._positions[path], leaf.empty().zero_())
        self.advance(block=True)

    def wait(self) -> None:
        with torch.no_grad(), self._on_side_stream():
            for index in list(self._works):
                self._wait(index)

    def commit(self) -> tuple[Leaves, list[Any]]:
        with torch.no_grad(), without_autocast(), self._on_side_stream():
            for code in self._codes[self._next :]:
                self._run(code)
        self._next = len(self._segments)
        self.inbox.close()
        values, stream = self._values, self._stream
        # New tensors (not views, which would hold what they view): whoever holds one of them holds its memory.
        means = {path: values[register].data for path, register in self._means.items()}
        parts = [part if register is None else values[register] for register, part in self._state]
        state = [part.data if isinstance(part, Tensor) else part for part in parts]
        for path, register in self._memories.items():
            self._memory.give_mean(path, values[register].view(self.plan.leaves[path].shape).data)
        self._values, self._buffers = [], []
        if stream is not None:
            current = torch.cuda.current_stream(stream.device)
            current.wait_stream(stream)
            for made in [*means.values(), *state]:
                if isinstance(made, Tensor) and made.is_cuda:
                    made.record_stream(current)
        self._observer.ends(self.plan)
        return means, state

    def abort(self) -> None:
        """See `Runner.abort`.

        Raises:
            CollectiveError: A collective failed; the ranks are out of step.
        """
        with torch.no_grad(), self._on_side_stream():
            for segment in self._segments[self._next :]:
                if segment.launches is not None:
                    self._buffers[segment.launches.index].send.zero_()
                    self._launch(segment.launches)
        self._next = len(self._segments)

    def forget(self) -> None:
        if self._stream is not None:  # before memory is freed that the side stream still writes to
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._values, self._buffers, self._missing = [], [], {}
        self.inbox.close()
        self._next, self._to_send = len(self._segments), 0

    def _look(self) -> None:
        """Takes over the gradients that have been noted."""
        if not self.inbox.noted:
            return
        noted, self.inbox.noted = self.inbox.noted, []
        if self._stream is not None:
            for stream in self.inbox.streams:
                self._stream.wait_stream(stream)
            self.inbox.streams.clear()
        with torch.no_grad(), self._on_side_stream():
            values, missing, plain = self._values, self._missing, self._plain
            for position, grad in noted:
                path, register, like, is_cloned = plain[position]
                if (grad.shape, grad.dtype, grad.device, grad.stride()) == like and path in missing:
                    del missing[path]
                    values[register] = grad.clone() if is_cloned and is_held(grad) else grad
                else:
                    self._take_over(position, grad)

    def _take_over(self, position: int, grad: Tensor) -> None:
        path, leaf, register, is_overwritten = self._leaves[position]
        is_missing = self._missing.pop(path, None) is not None
        if not is_missing or not leaf.is_like(grad):
            raise unexpected(path, grad, self.plan.leaves, leaf if is_missing else None)
        if register is None:
            return
        grad = grad.resolve_conj().resolve_neg()  # plans were traced without these bits
        if grad.stride() != leaf.stride:
            grad = leaf.empty().copy_(grad)
        elif is_overwritten and self._clones_shared and is_held(grad):
            grad = grad.clone()
        if self._stream is not None and grad.is_cuda:
            grad.record_stream(self._stream)
        self._values[register] = grad

    def is_due(self) -> bool:
        now = perf_counter()
        if not self.inbox.is_polled or not self._works or now < self._polled + POLL_SECONDS:
            return False
        self._polled = now
        done = [self._is_completed(index) for index in self._works]
        return any(done) and self._next < len(self._segments) and self._is_ready(self._segments[self._next], False)

    def _is_ready(self, segment: Segment, block: bool) -> bool:
        if self.inbox.lacking[self._next] or segment.commits:
            return False
        if block or self._stream is not None:
            return True
        return all(self._is_completed(index) for index in segment.waits if index in self._works)

    def _run(self, code: "_Code") -> None:
        segment, values = code.segment, self._values
        for index in segment.waits:
            if index in self._works:
                self._wait(index)
        with self._observer.computes(segment, self._stream):
            made = segment.run(*[values[register] for register in code.inputs])
        for register, value in zip(code.outputs, made, strict=True):
            values[register] = value
        for register in code.frees:
            values[register] = None
        if segment.launches is not None:
            self._launch(segment.launches)

    def _is_completed(self, index: int) -> bool:
        try:
            return self._works[index].is_completed()
        except RuntimeError as error:
            raise self._failure(index, error) from error

    def _launch(self, collective: Collective) -> None:
        buffer = self._buffers[collective.index]
        count_payload(self._wire_bytes[collective.index])
        try:
            with self._observer.launches(collective, self._stream), without_modes():
                self._works[collective.index] = self._wire.start(
                    collective.kind, buffer.send, buffer.receive, collective.op, collective.group
                )
        except RuntimeError as error:
            raise self._failure(collective.index, error) from error
        self._to_send -= 1

    def _wait(self, index: int) -> None:
        try:
            with self._observer.waits(self._collectives[index], self._stream):
                waited(self._works.pop(index))
        except RuntimeError as error:
            raise self._failure(index, error) from error

    def _failure(self, index: int, error: RuntimeError) -> CollectiveError:
        collective = self._collectives[index]
        carried = ", ".join([payload.label for payload in collective.payloads][:3])
        return CollectiveError(
            f"{collective.kind.name} {collective.name} of {len(collective.payloads)} payloads ({carried}, ...) over "
            f"{collective.world_size} ranks failed: {error}. Another rank has failed, left, or not called backward; "
            "see its own error"
        )

    def _on_side_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
