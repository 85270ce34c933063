"""The runner of a plan: it runs while gradients arrive.

Segments run strictly in the order of the plan. Execution stops at the first one whose gradients are not there or whose
collectives are not complete, and goes on at the next feed; `drain` and `wait` wait. So collectives leave in the same
order on all ranks, whatever the timing, and nothing blocks inside backward.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnddp.plan.ir import Collective, Grad, LeafSpec, Mean, Name, Part, Ranks, Segment, Span
from fnddp.plan.plan import Plan
from fnddp.run.memory import Buffer, Memory
from fnddp.run.runner import unexpected
from fnddp.show.trace import Observer, Unobserved
from fnddp.torch_private import storage_use_count, without_autocast, without_modes
from fnddp.tree import Leaves
from fnddp.wire.counter import count_payload
from fnddp.wire.protocol import CollectiveError, Wire, Work, waited


POLL_SECONDS = 2e-4
"""How long collectives under way are left alone while gradients arrive that complete no segment."""

_NOWHERE = (None, None)


class _Registers:
    """Where values are kept during a step: a list is faster than a dict of names."""

    def __init__(self, plan: Plan) -> None:
        self._indices: dict[Name, int] = {}
        for segment in plan.segments:
            for name in (*segment.inputs, *segment.outputs):
                self.of(name)

    def of(self, name: Name) -> int:
        """The register of a value."""
        return self._indices.setdefault(name, len(self._indices))

    def filled(self, given: Mapping[Name, Any]) -> list[Any]:
        """All registers, with what is there before the first segment runs."""
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
        observer: Whoever wants to know what is done when.
    """

    def __init__(self, plan: Plan, wire: Wire, memory: Memory, observer: Observer | None = None) -> None:
        self.plan = plan
        self.missing: dict[str, LeafSpec] = {}
        self._wire, self._memory = wire, memory
        self._observer: Observer = observer or Unobserved()
        self._segments, self._collectives = plan.segments, plan.collectives
        self._registers = _Registers(plan)
        register = self._registers.of
        self._spans = [name for s in plan.segments for name in s.inputs if isinstance(name, Span)]
        self._codes = [_Code.of(segment, register) for segment in plan.segments]
        self._means = {path: register(name) for path, name in plan.means.items()}
        self._state = [(register(part), None) if isinstance(part, Name) else (None, part) for part in plan.state]
        self._memories = {path: register(name) for path, name in plan.memories.items()}
        device = next((leaf.device for leaf in plan.leaves.values() if leaf.device.type == "cuda"), None)
        self._stream = None if device is None else memory.stream(device)
        needed = {path: i for i, segment in enumerate(self._segments) for path in segment.needs}
        returned = {name.path for name in (*plan.means.values(), *plan.state) if isinstance(name, Grad)}
        self._grads = {path: (register(Grad(path)), needed.get(path)) for path in {*needed, *returned}}
        self._needs = [len(segment.needs) for segment in self._segments]
        self._lacking: list[int] = []  # gradients that each segment still waits for
        self._works: dict[int, Work] = {}
        self._values: list[Any] = []
        self._buffers: list[Buffer] = []
        self._next = len(self._segments)
        self._to_send = 0
        self._polled = 0.0
        self._awaited: set[torch.cuda.Stream] = set()  # where gradients were made that the side stream will read

    @property
    def has_sent(self) -> bool:
        return self._to_send < len(self._collectives)

    def start(self, parts: Sequence[Any], ranks: Mapping[str | None, int]) -> None:
        plan = self.plan
        self._observer.begins()
        self._buffers = [self._memory.take(collective) for collective in self._collectives]
        given: dict[Name, Any] = {**plan.constants, **{Ranks(group): ranks[group] for group in plan.phase.groups}}
        for buffer in self._buffers:
            given |= buffer.parts
        for span in self._spans:
            given[span] = self._buffers[span.collective].span(span)
        for path in plan.results:
            given[Mean(path)] = self._memory.take_mean(path, plan.leaves[path])
        for index, part in enumerate(parts):
            is_read = index in plan.overwrites_state and storage_use_count(part) > 1  # by somebody else
            given[Part(index)] = part.clone() if is_read else part
        self._values = self._registers.filled(given)
        self._next, self._to_send = 0, len(self._collectives)
        self._lacking = list(self._needs)
        self.missing = plan.leaves.copy()
        if self._stream is not None:
            self._awaited = {torch.cuda.current_stream(self._stream.device)}

    def feed(self, path: str, grad: Tensor) -> bool:
        leaf = self.missing.pop(path, None)
        if leaf is None or not leaf.is_like(grad):
            raise unexpected(path, grad, self.plan.leaves, leaf)
        register, segment = self._grads.get(path, _NOWHERE)
        if register is None:
            return False
        if grad.stride() != leaf.stride:
            grad = leaf.empty().copy_(grad)
        if self._stream is not None and grad.is_cuda:
            self._awaited.add(torch.cuda.current_stream(self._stream.device))
            grad.record_stream(self._stream)
        self._values[register] = grad
        if segment is not None:
            self._lacking[segment] -= 1
            if not self._lacking[segment]:
                return True
        return bool(self._works) and self._stream is None and perf_counter() > self._polled + POLL_SECONDS

    def advance(self, *, block: bool = False) -> None:
        # Without autocast, which would compute factors in half precision where backward runs within it.
        with torch.no_grad(), without_autocast(), self._on_side_stream():
            if self._stream is None:
                for index in self._works:
                    self._is_completed(index)  # which carries on what takes several messages
                self._polled = perf_counter()
            else:
                for stream in self._awaited:
                    self._stream.wait_stream(stream)
                self._awaited = set()
            while self._next < len(self._segments) and self._is_ready(self._segments[self._next], block):
                self._run(self._codes[self._next])
                self._next += 1

    def drain(self) -> None:
        for path, leaf in list(self.missing.items()):
            self.feed(path, leaf.empty().zero_())
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
        self._values, self._buffers, self.missing = [], [], {}
        self._next, self._to_send = len(self._segments), 0

    def _is_ready(self, segment: Segment, block: bool) -> bool:
        if self._lacking[self._next] or segment.commits:
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
        count_payload(collective.wire_bytes)
        try:
            with self._observer.launches(collective, self._stream), without_modes():
                self._works[collective.index] = self._wire.start(
                    collective.kind,
                    buffer.send,
                    buffer.receive,
                    collective.op,
                    collective.group,
                    collective.index,
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
