"""One step of an engine: gradients are put into it, and it ends on all ranks alike."""

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnddp.core.tree import Leaves
from fnddp.device import Stream
from fnddp.ir.program import Segment
from fnddp.run.memory import Buffer
from fnddp.run.program import Code, Input, Program, failure_of, unexpected
from fnddp.run.vote import Vote
from fnddp.run.weighing import Weighing
from fnddp.show.trace import Observer, profiled
from fnddp.torch_private import has_modes, is_held, is_profiling, storage_use_count, without_autocast, without_modes
from fnddp.wire.counter import count_payload
from fnddp.wire.protocol import CollectiveError, Elastic, Wire, Work, waited
from fnddp.wire.weights import FAILED, NO_WEIGHT, Weight, scaled

POLL_SECONDS = 2e-4
"""Time between two looks at collectives under way, while gradients arrive that complete no segment."""

_PROFILED = Observer()
_NOTHING = nullcontext()


class Synchronized(NamedTuple):
    """The result of a step: the means by path, and the leaves that arrived on no rank.

    There are no means of a step that was skipped, nor of leaves for which the pipeline has no update in this step.
    """

    mean: Leaves
    unused: frozenset[str]

    def of(self, leaves: Iterable[str]) -> dict[str, Tensor | None]:
        """Return the mean of each of `leaves`, in their order; None for those without an update."""
        return {path: self.mean.get(path) for path in leaves}


class Status(Enum):
    """The progress of a step."""

    OPEN = "gradients arrive"
    AGREEING = "this rank has voted"
    DONE = "committed"
    FAILED = "given up"


class Course:
    """The part of an engine that a step reads, and changes for the next one. `Engine` is its only subclass.

    Attributes:
        wire: What moves bytes.
        groups: Process groups whose ranks end a step together.
        device: Where payloads are stored.
        own: Leaves that the pipeline does not reduce over ranks.
        positions: Of the leaves, by path.
        parts: The leaves of the pipeline's state, and its `structure`.
        step: The step that is open; None as soon as it has ended.
        begun: The number of steps that have begun.
        steps: The number of those that have ended well.
        failed_steps: The number of those that have not.
        broken: The error after which ranks may be desynchronized.
        exchanges_weights: Whether each step begins with an exchange of weights: from the first one with weights on.
        learns_order: Whether the order in which the gradients of the next step arrive is to be that of later ones.
        arrival: That order, as the first rank has seen it.
    """

    def __init__(self, wire: Wire, groups: Sequence[str | None], device: torch.device, leaves: Iterable[str]) -> None:
        self.wire, self.groups, self.device = wire, groups, device
        self.positions = {path: position for position, path in enumerate(leaves)}
        self.own: frozenset[str] = frozenset()
        self.parts: list[Any] = []
        self.structure: Any = None
        self.step: Step | None = None
        self.begun = self.steps = self.failed_steps = 0
        self.broken: BaseException | None = None
        self.exchanges_weights = self.learns_order = False
        self.arrival: list[str] | None = None


class Step:
    """A step, from `Engine.begin` on.

    Segments run strictly in the order of the plan. Execution stops at the first one whose gradients are not there or
    whose collectives are not complete, and goes on at the next `advance`. So collectives leave in the same order on all
    ranks, whatever the timing, and nothing blocks inside backward. On CUDA everything is issued on a side stream, waits
    are stream waits, and the host never blocks.

    On a process group on which steps of other engines are open, this one issues nothing before those are over.

    A rank cannot know whether the others give a weight. So the first step with weights begins as one without: a rank
    that has a weight sends zeros, and reports it in the vote. If all do, the step runs again. From then on each step
    begins with an exchange of weights, in which a rank without one reports that. So the collectives of ranks match
    whichever rank gives a weight, and ranks that never do send nothing for it.

    Args:
        course: Of the engine.
        program: What the step runs.
        vote: The agreement of ranks; None where it is not known which ranks the pipeline reaches.
        weight: How much this rank's gradients count.
        scale: What gradients are multiplied by in a step without weights.
        ahead: Open steps on the same process groups.

    Attributes:
        status: Its progress.
    """

    def __init__(
        self,
        course: Course,
        program: Program,
        vote: Vote | None,
        *,
        weight: Weight | None = None,
        scale: float = 1.0,
        ahead: Sequence["Step"] = (),
    ) -> None:
        self._course, self._program, self._vote = course, program, vote
        self._observer = program.observer or (_PROFILED if is_profiling() else None)
        self._arrived: list[str] = []  # in this order, where that is to be learnt
        self._zeros = self._unused = frozenset[str]()
        self._start()
        self.status = Status.OPEN
        self._weight, self._weighing, self._again = weight, None, list[tuple[int, Tensor]]()
        has_weight, has_peers = weight is not None and weight != FAILED, vote is not None and vote.has_peers
        # This rank has a weight, in a step that began without an exchange: it sends zeros, and then runs again.
        self._asks = has_weight and has_peers and not course.exchanges_weights
        self._plain_scale = scale
        self._scale: float | None = None if has_weight or (course.exchanges_weights and has_peers) else scale
        self._ahead = [weakref.ref(step) for step in ahead]
        self._behind: list[weakref.ref[Step]] = []
        for step in ahead:
            step._behind.append(weakref.ref(self))
        if not self.is_held:
            self._weigh()

    def _start(self) -> None:
        course, program = self._course, self._program
        if self._observer is not None:
            self._observer.begins()
        self._buffers: list[Buffer] = [pool.take() for pool in program.pools]
        if program.filled is None or any(a is not b for a, b in zip(self._buffers, program.filled[0], strict=True)):
            values = program.constants.copy()
            for register, name in program.slices:
                values[register] = self._buffers[name.collective].view(name)
            program.filled = self._buffers, values
        values = program.filled[1].copy()
        for register, group in program.ranks:
            values[register] = course.wire.size(group)
        for register, mean in program.results:
            values[register] = program.memory.take_mean(mean.path, program.leaves[mean.path])
        for register, index, is_overwritten in program.parts:
            value = course.parts[index]
            is_read = is_overwritten and storage_use_count(value) > 1  # by somebody else
            values[register] = value.clone() if is_read else value
        self._values = values
        self._noted: list[tuple[int, Tensor]] = []  # gradients that have been put, and not looked at
        self._streams: set[Stream] = set()  # where those were made
        self._remaining = program.needed.copy()
        self._put = set[int]()  # positions of the leaves that have arrived
        self._works: dict[int, Work] = {}
        self._next = 0
        self._polled = 0.0
        if program.stream is not None:
            program.device.wait(program.stream, program.device.current())

    @property
    def is_open(self) -> bool:
        """True until it has ended."""
        return self.status in (Status.OPEN, Status.AGREEING)

    @property
    def missing(self) -> frozenset[str]:
        """The leaves that have not arrived."""
        return frozenset(each.path for i, each in enumerate(self._program.inputs) if i not in self._put)

    @property
    def has_sent(self) -> bool:
        """True once a collective has been issued."""
        return any(code.segment.launches is not None for code in self._program.codes[: self._next])

    @property
    def is_held(self) -> bool:
        """True while the step of another engine goes first on a process group of this one."""
        return bool(self._ahead) and bool(self._in_front())

    @property
    def is_polled(self) -> bool:
        """True if it can go on when a collective is complete, without another gradient: see `poll`."""
        return self._program.is_polled

    # Gradients

    def put(self, position: int, grad: Tensor, *, keep: bool = False) -> bool:
        """Take the gradient of the leaf at `position`. If it is not like the leaf, `advance` or `agree` raises that.

        Args:
            position: Of the leaf among all.
            grad: Its gradient, which is the step's from now on.
            keep: It stays the caller's.

        Returns:
            Whether it is time for `advance`: a segment has all that it needs, or collectives may be complete.

        Raises:
            ValueError: The gradient has arrived already.
        """
        program = self._program
        if position in self._put:
            raise unexpected(program.inputs[position].path, grad, program.leaves, None)
        self._put.add(position)
        if keep and program.inputs[position].path in program.overwrites:
            grad = grad.clone()
        self._noted.append((position, grad))
        if program.stream is not None:
            self._streams.add(program.device.current())
        segment = program.segment_of[position]
        self._remaining[segment] -= 1
        if not self._remaining[segment]:
            return True
        return program.is_polled and self._is_due()

    def feed(self, path: str, grad: Tensor, *, keep: bool = False) -> None:
        """`put` the gradient of the leaf at `path`, and `advance` if it is time.

        Raises:
            ValueError: There is no such leaf, it has arrived already, or it is not like the leaf; on all ranks: their
                weights are invalid.
        """
        if self.put(self._position_of(path, grad), grad, keep=keep):
            self.advance()

    def feed_all(self, grads: Leaves, *, keep: bool = False) -> None:
        """`put` several gradients by path, and `advance` once."""
        for path, grad in grads.items():
            self.put(self._position_of(path, grad), grad, keep=keep)
        self.advance()

    def _position_of(self, path: str, grad: Tensor) -> int:
        position = self._course.positions.get(path)
        leaf = None if position is None or position in self._put else self._program.inputs[position].leaf
        if position is None or leaf is None or not leaf.is_like(grad):
            raise unexpected(path, grad, self._program.leaves, leaf)
        return position

    def advance(self, *, block: bool = False) -> None:
        """Run what can run, without waiting; with `block`, all that needs no missing gradient."""
        if self.is_open and not self.is_held:
            self._go_on(block)

    def _go_on(self, block: bool) -> None:
        codes = self._program.codes
        # Without autocast, which would compute factors in half precision where backward runs within it.
        with torch.no_grad(), without_autocast(), self._on_side_stream():
            self._ingest()
            while self._next < len(codes) and self._is_ready(codes[self._next].segment, block):
                self._run(codes[self._next])
                self._next += 1

    def poll(self) -> None:
        """`advance`, if some time has passed and a collective is complete for which a segment waits."""
        if self.is_open and self._is_due():
            self.advance()

    # The end

    def agree(self) -> frozenset[str]:
        """Issue all collectives, agree with the other ranks, and wait. Leaves that have not arrived count as zeros.

        Returns:
            The leaves that have arrived on no rank; none of them where ranks do not vote.

        Raises:
            StepFailedError: Another rank has failed in this step.
            ValueError: On all ranks: their weights are invalid, or only some have one.
            CollectiveError: A collective failed. Ranks may be desynchronized.
        """
        for step in self._in_front():  # as far as their gradients allow: other ranks do the same at this point
            step.advance(block=True)
        if self._asks:
            self._ask()
        self._weigh()
        absent = self._issue_all()
        if self._vote is not None:
            return self._voted(absent)
        self._wait_all()
        return frozenset()  # nobody knows: the zeros of this rank count as gradients

    def commit(self) -> Synchronized:
        """Compute and return the means, after `agree`; only now is anything written over.

        They may be parts of the plan's buffers, which are not written again while somebody holds them.
        """
        course, program, stream = self._course, self._program, self._program.stream
        with torch.no_grad(), without_autocast(), self._on_side_stream():
            for code in program.codes[self._next :]:
                self._run(code)
        values = self._values
        # New tensors (not views, which would hold what they view): a caller that holds one of them holds its memory.
        made = {path: values[register] for path, register in program.means.items()}
        means = {path: value.data for path, value in made.items() if value is not None}
        parts = [part if register is None else values[register] for register, part in program.state]
        parts = [part.data if isinstance(part, Tensor) else part for part in parts]
        for path, register in program.memories.items():
            program.memory.give_mean(path, values[register].view(program.leaves[path].shape).data)
        if stream is not None:
            current = program.device.current()
            program.device.wait(current, stream)
            for each in [*means.values(), *parts]:
                if isinstance(each, Tensor):
                    program.device.keep(each, current)
        if self._observer is not None and program.plan is not None:
            self._observer.ends(program.plan)
        course.parts = parts
        self._learn_order()
        course.steps += 1
        self._close(Status.DONE)
        return Synchronized(means, self._unused)

    def finish(self) -> Synchronized:
        """`agree` and `commit`."""
        with in_profile("end"):
            self.agree()
            return self.commit()

    def give_up(self, *, failed: bool = False) -> None:
        """End the step without a message, where all ranks do so by themselves; nothing was written over.

        Args:
            failed: Count it as failed, and end the steps that wait for it.
        """
        if failed:
            self._course.failed_steps += 1
            self._drop_behind()
        self._wait_for_side_stream()
        self._close(Status.FAILED)

    def fail(self, error: BaseException) -> None:
        """End the step on this rank because of `error`, and notify the others, which raise `StepFailedError`.

        Where they cannot be notified, because a collective failed or because this rank has voted that all is well, and
        on CUDA, where they do not wait for it, this engine refuses further steps; so it does for a pipeline that does
        not know which ranks it reaches. Does nothing after the step has ended.
        """
        if not self.is_open:
            return
        for step in self._in_front():  # in the order in which other ranks end theirs
            step.fail(error)
        if not self.is_open:  # it has sent nothing yet
            return
        has_voted, self.status = self.status is Status.AGREEING, Status.FAILED
        try:
            self._notify(error, has_voted)
        finally:
            self._close(Status.FAILED)

    def _notify(self, error: BaseException, has_voted: bool) -> None:
        course, vote = self._course, self._vote
        self._drop_behind()
        course.failed_steps += 1
        if has_voted and self._program.plan is None and isinstance(error, FloatingPointError):
            course.broken = None  # of fp16(..., check=True), which raises on all ranks
            return
        course.broken = error  # until the others know
        if vote is None or isinstance(error, CollectiveError) or has_voted:
            return
        try:
            if self._are_weights_valid():
                self._send_zeros()
                vote.cast(frozenset(), failed=True)
                self._wait_all()
                vote.explain(error)
                course.broken = None if vote.is_heeded else error
            else:
                course.broken = None
            self._wait_for_side_stream()
        except RuntimeError as broken:
            course.broken = broken

    def _voted(self, absent: frozenset[str], weight: Weight | None = None) -> frozenset[str]:
        """Vote and wait. Return the leaves that have arrived on no rank."""
        assert self._vote is not None
        self._vote.cast(absent, weight=weight)
        self.status = Status.AGREEING
        self._wait_all()
        try:
            self._unused = self._vote.outcome()
        except CollectiveError:  # ranks are desynchronized
            raise
        except Exception:
            self.give_up(failed=True)
            raise
        return self._unused

    def _issue_all(self) -> frozenset[str]:
        self._zeros = self.missing
        for path in self._zeros:
            self.put(self._course.positions[path], self._program.leaves[path].empty().zero_())
        self._go_on(block=True)
        return self._zeros

    def _wait_all(self) -> None:
        with torch.no_grad(), self._on_side_stream():
            for index in list(self._works):
                self._wait(index)

    def _send_zeros(self) -> None:
        """Send zeros where this rank has still to send: give the step up without leaving other ranks alone."""
        with torch.no_grad(), self._on_side_stream():
            for code in self._program.codes[self._next :]:
                if code.segment.launches is not None:
                    self._buffers[code.segment.launches.index].send.zero_()
                    self._launch(code.segment)
        self._next = len(self._program.codes)

    def _learn_order(self) -> None:
        course = self._course
        if not course.learns_order:
            return
        course.learns_order = False
        if self._program.plan is not None and self._vote is not None and self._vote.has_peers:
            arrived = dict.fromkeys(path for path in self._arrived if path not in self._zeros)
            expected = [*arrived, *(path for path in reversed(course.positions) if path not in arrived)]
            course.arrival = self._vote.of_first_rank(expected)

    def _close(self, status: Status) -> None:
        self.status = status
        self._values, self._buffers, self._noted, self._again, self._works = [], [], [], [], {}
        if self._course.step is self:
            self._course.step = None

    def _drop_behind(self) -> None:
        for entry in self._behind:
            step = entry()
            if step is not None and step.is_open:
                step.give_up()
        self._behind = []

    def _in_front(self) -> "list[Step]":
        return [step for step in (entry() for entry in self._ahead) if step is not None and step.is_open]

    # Weights

    def _weigh(self) -> None:
        """Start the exchange of weights, if the step has one that has not been started."""
        if self._scale is None and not self._asks and self._weighing is None:
            course = self._course
            wire = course.wire if self._vote is None else self._vote.wire
            self._weighing = Weighing(self._weight or NO_WEIGHT, wire, course.groups, course.device)

    def _known_scale(self) -> float:
        """Return what gradients are scaled by, once all weights are known.

        Raises:
            ValueError: The weights are invalid, and all ranks raise before any has sent a gradient.
        """
        if self._asks:
            return 0.0
        if self._scale is None:
            self._weigh()
            assert self._weighing is not None
            try:
                scale = self._weighing.scale()
            except CollectiveError as error:
                self.fail(error)
                raise
            except ValueError as error:
                self.give_up(failed=True)
                if isinstance(self._course.wire, Elastic):
                    self._course.wire.report(error)
                raise
            self._scale = self._plain_scale if scale is None else scale
        return self._scale

    def _are_weights_valid(self) -> bool:
        """Return whether other ranks go on with a step that fails on this one: not if its weights are invalid."""
        if self._scale is not None or self._asks:
            return True
        self._weigh()
        assert self._weighing is not None
        try:
            self._weighing.scale()
        except ValueError:
            return False
        return True

    def _ask(self) -> None:
        """End a step that began without an exchange of weights, and begin it again with one.

        Raises:
            StepFailedError: Another rank has failed in this step.
            ValueError: On all ranks: not all have a weight.
        """
        absent = self._issue_all()
        self._voted(absent, self._weight)
        again = [(i, grad) for i, grad in self._again if self._program.inputs[i].path not in absent]
        self._wait_for_side_stream()
        self._start()
        self.status, self._asks, self._again = Status.OPEN, False, []
        self._course.exchanges_weights = True
        for position, grad in again:
            self.put(position, grad)

    # Running

    def _ingest(self) -> None:
        """Look at the gradients that have been put."""
        if not self._noted:
            return
        scale = self._known_scale()
        noted, self._noted = self._noted, []
        program = self._program
        if self._asks:
            self._again += noted
        if self._course.learns_order:
            self._arrived += [program.inputs[position].path for position, _ in noted]
        if scale != 1:
            own = frozenset[str]() if self._asks else self._course.own  # what runs again must not be written over
            noted = [(i, grad if program.inputs[i].path in own else scaled(grad, scale)) for i, grad in noted]
        if program.stream is not None:
            for stream in self._streams:
                program.device.wait(program.stream, stream)
            self._streams.clear()
        values, inputs = self._values, program.inputs
        for position, grad in noted:
            each = inputs[position]
            register = each.register
            is_plain = (grad.shape, grad.dtype, grad.device, grad.stride()) == each.like
            if is_plain and register is not None:
                values[register] = grad.clone() if each.is_cloned and is_held(grad) else grad
            else:
                self._ingest_unusual(each, grad)

    def _ingest_unusual(self, each: Input, grad: Tensor) -> None:
        if not each.leaf.is_like(grad):
            raise unexpected(each.path, grad, self._program.leaves, each.leaf)
        if each.register is None:
            return
        grad = grad.resolve_conj().resolve_neg()  # plans were traced without these bits
        if grad.stride() != each.leaf.stride:
            grad = each.leaf.empty().copy_(grad)
        elif each.is_cloned and is_held(grad):
            grad = grad.clone()
        if self._program.stream is not None:
            self._program.device.keep(grad, self._program.stream)
        self._values[each.register] = grad

    def _is_due(self) -> bool:
        now, codes = perf_counter(), self._program.codes
        if not self._program.is_polled or not self._works or now < self._polled + POLL_SECONDS:
            return False
        self._polled = now
        done = [self._is_completed(index) for index in self._works]
        return any(done) and self._next < len(codes) and self._is_ready(codes[self._next].segment, False)

    def _is_ready(self, segment: Segment, block: bool) -> bool:
        if self._remaining[self._next] or segment.commits:
            return False
        if block or self._program.stream is not None:
            return True
        return all(self._is_completed(index) for index in segment.waits if index in self._works)

    def _run(self, code: Code) -> None:
        segment, values, observer = code.segment, self._values, self._observer
        for index in segment.waits:
            if index in self._works:
                self._wait(index)
        with _NOTHING if observer is None else observer.computes(segment, self._program.stream):
            made = segment.run(*[values[register] for register in code.inputs])
        for register, value in zip(code.outputs, made, strict=True):
            values[register] = value
        for register in code.frees:
            values[register] = None
        if segment.launches is not None:
            self._launch(segment)

    def _launch(self, segment: Segment) -> None:
        collective, observer, stream = segment.launches, self._observer, self._program.stream
        assert collective is not None
        index = collective.index
        buffer = self._buffers[index]
        if has_modes():  # as it asks itself: mostly there is no counter, and nothing to enter
            count_payload(self._program.wire_bytes[index])
        try:
            with _NOTHING if observer is None else observer.launches(collective, stream), without_modes():
                self._works[index] = self._program.wire.start(
                    collective.kind, buffer.send, buffer.receive, collective.op, collective.group
                )
        except RuntimeError as error:
            raise failure_of(collective, error) from error

    def _is_completed(self, index: int) -> bool:
        try:
            return self._works[index].is_completed()
        except RuntimeError as error:
            raise failure_of(self._program.collectives[index], error) from error

    def _wait(self, index: int) -> None:
        collective, observer = self._program.collectives[index], self._observer
        try:
            with _NOTHING if observer is None else observer.waits(collective, self._program.stream):
                waited(self._works.pop(index))
        except RuntimeError as error:
            raise failure_of(collective, error) from error

    def _wait_for_side_stream(self) -> None:
        """Wait on the current stream, before memory is freed that the side stream still writes to."""
        stream = self._program.stream
        if stream is not None:
            device = self._program.device
            device.wait(device.current(), stream)

    def _on_side_stream(self) -> AbstractContextManager[Any]:
        stream = self._program.stream
        return _NOTHING if stream is None else self._program.device.on(stream)


def in_profile(name: str) -> AbstractContextManager[object]:
    """Enclose a range of torch's profiler, `fnddp NAME`, if one is active."""
    return profiled(name) if is_profiling() else _NOTHING
