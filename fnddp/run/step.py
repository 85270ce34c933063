"""One step of an engine: it takes gradients, runs the plan, and ends with the same outcome on all ranks."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, is_grad_enabled

from fnddp.core.tree import Leaves
from fnddp.device import Stream
from fnddp.ir.program import Collective, Segment
from fnddp.run.nonfinite import has_nonfinite, kept, spoil
from fnddp.run.program import BoundSegment, Program, UnexpectedGradient
from fnddp.run.vote import StepFailedError, Vote
from fnddp.show.trace import Observer, profiled
from fnddp.torch_private import foreach_copy, has_modes, is_held, is_profiling, without_autocast, without_modes
from fnddp.wire.c10d import C10d, start_into
from fnddp.wire.counter import count_payload
from fnddp.wire.kinds import Work, waited
from fnddp.wire.protocol import CollectiveError
from fnddp.wire.weights import Weight, require_valid

POLL_SECONDS = 2e-4
"""Seconds between two checks of open collectives while arriving gradients complete no segment."""

_NOTHING = nullcontext()

T = TypeVar("T")


class Synchronized(NamedTuple):
    """The result of a step: the means by path, and the `unused` leaves (no rank had a gradient for them).

    There are no means after a skipped step, and none for leaves without an update in this step.

    `late` are unused leaves that get an update nevertheless, on some rank: from a residual of earlier steps, or because
    a rank sent the mean of an earlier backward again, so that the pipeline's memory contains it.
    """

    mean: Leaves
    unused: frozenset[str]
    late: frozenset[str] = frozenset()

    def has_nothing_for(self, path: str, parameter: Tensor) -> bool:
        """Return whether no rank used `parameter` and it gets no late update; False if it is frozen now."""
        return path in self.unused and not (path in self.late and parameter.requires_grad)

    def of(self, leaves: Iterable[str]) -> dict[str, Tensor | None]:
        """Return the mean of each of `leaves`, in their order; None for those without an update."""
        return {path: self.mean.get(path) for path in leaves}


def require_noticed(notices: Iterable[Callable[[], bool]]) -> None:
    """Raise a CollectiveError if, on an accelerator, another rank failed in the last step: see `Step.notice`."""
    if any(notice() for notice in notices):
        raise CollectiveError(
            "another rank failed in the previous step, or all ranks gave the weight 0, so gradients counted as "
            "zeros: parameters and the pipeline's state have been wrong since then. See that rank's own error, and "
            "restart from an earlier checkpoint"
        )


class Step:
    """A step, from `Engine.begin` on.

    Segments run strictly in the order of the plan. Execution stops at the first segment that needs a gradient or a
    collective that is not complete, and continues at the next `advance`. So collectives start in the same order on all
    ranks, independent of timing, and nothing blocks inside backward. On an accelerator everything is issued on a side
    stream, waits are stream waits, and the host does not block.

    Args:
        parts: The parts of the pipeline's state.
        ended: Callback, called with the step when it ends.
        vote: The vote of the ranks on the outcome; None if it is not known which ranks the pipeline reaches.
        weight: The weight of this rank's gradients, for `weighted`.
        scale: A factor for gradients.
        learns_order: True to learn the order in which gradients arrive, for later steps.
        remembered: Positions of the parts that stay unchanged if NaN or infinity arrives on some rank.
        gives_later: Whether means may contain gradients of earlier steps.
        agrees: Whether all ranks get the same means. If so, each rank knows the late leaves without asking others.
        is_early: See the attribute.
        notices: The `notice` of earlier steps on an accelerator, of this and other engines.
        observer: Names the parts of the step in profiles, and measures their times if it is asked to.
        is_pinned: True to write the next state into the memory of this one.
        captures: True if the step is captured in a graph, and does not run. Then the host waits for nothing.

    Attributes:
        is_open: True until it has ended.
        is_early: True to run segments as soon as they are ready; False to run all of them in `agree`.
        is_done, has_failed: The outcome. Both are False if the step was given up; that happens on all ranks.
        parts: The parts of the next state, once the step is done.
        arrival: The order in which gradients arrived on the first rank, if it is learnt.
        broken: The error after which ranks may be desynchronized.
        substitutes: Tensors to send instead of zeros for leaves that have not arrived.
        counts: False if this rank has the weight 0. At least one rank must have another weight.
        found_nonfinite: Whether some rank received NaN or infinity, if the pipeline's memory or a caller needs to know;
            on an accelerator a scalar tensor there.
        notice: Returns True if another rank failed in this step; None if the host has waited for the vote: see `Vote`.
    """

    def __init__(
        self,
        program: Program,
        parts: list[Any],
        ended: "Callable[[Step], object]",
        *,
        vote: Vote | None = None,
        weight: Weight | None = None,
        scale: float = 1.0,
        learns_order: bool = False,
        remembered: Sequence[int] = (),
        gives_later: bool = False,
        agrees: bool = True,
        is_early: bool = True,
        notices: Iterable[Callable[[], bool]] = (),
        observer: Observer,
        is_pinned: bool = False,
        captures: bool = False,
    ) -> None:
        self._is_pinned, self._captures = is_pinned, captures
        self._program, self._vote, self._ended, self.parts = program, vote, ended, parts
        self._observer = observer if (observer.measures or is_profiling()) and not captures else None
        self.is_open, self.is_done, self.has_failed, self._has_voted = True, False, False, False
        self.broken: BaseException | None = None
        self.notices = () if captures else notices
        self.found_nonfinite: Tensor | bool = False
        self.notice: Callable[[], bool] | None = None
        self.arrival: list[str] | None = None
        self._learns_order, self._remembered, self._watches = learns_order, remembered, bool(remembered)
        self._gives_later, self._agrees = gives_later, agrees
        self._arrived: list[str] = []  # leaves in the order of arrival, if it is to be learnt
        self._zeros = self._unused = frozenset[str]()
        self.substitutes: Leaves = {}
        self._weight, self._scale = weight, scale
        self.counts = weight is None or weight.number > 0
        if weight is not None and not weight.number:  # a rank without samples: its mean may be NaN
            self._scale = 0.0
        self._start()
        # If times are measured, copies count as computation of their segment.
        self._copies_at_once = self._scale == 1 and self._observer is None
        self.is_early = is_early

    def _start(self) -> None:
        program = self._program
        if self._observer is not None:
            self._observer.begins(program.device, program.stream)
        self._buffers, self._values, self._slots = program.begin(self.parts, self._weight)
        self._pending: list[tuple[int, Tensor]] = []  # gradients from `put`, for `_ingest`
        self._to_copy: list[tuple[Tensor, Tensor]] = []  # places and gradients that are only copied, for `_run`
        self._streams: set[Stream] = set()  # on which gradients were computed
        self._remaining = program.needed.copy()
        self._gave_nonfinite: Tensor | bool = False
        self._put = bytearray(len(program.inputs))  # by position: 1 for leaves that have arrived
        self._works: dict[int, list[Work]] = {}  # of collectives under way: empty until they are started
        self._next = 0
        self._polled = 0.0
        if program.stream is not None:
            program.device.wait(program.stream, program.device.current())

    def held(self) -> list[Tensor]:
        """Return references to all memory in registers but the state's. While they live, no other step uses it."""
        values = [each for each in self._values if isinstance(each, Tensor)]
        return [each.data for each in values if all(each is not part for part in self.parts)]

    @property
    def missing(self) -> frozenset[str]:
        """The leaves that have not arrived."""
        inputs = self._program.inputs
        return frozenset(each.path for each, has_arrived in zip(inputs, self._put, strict=True) if not has_arrived)

    # Gradients

    def put(self, position: int, grad: Tensor, *, keep: bool = False, at_once: bool = True) -> bool:
        """Add the gradient of the leaf at `position`. The step may write over it, unless `keep` is True.

        A small CPU gradient that only needs a copy is copied now, while it is in the cache, unless gradients are scaled
        or enabled, or the step is measured. If `at_once` is False, it is copied later, together with others.

        If its shape, dtype or device is not the leaf's, `advance` or `agree` raises a ValueError.

        Returns:
            True if the caller should call `advance`: a segment has its gradients, or collectives may be complete.

        Raises:
            ValueError: The gradient has arrived already.
        """
        program = self._program
        if self._put[position]:
            raise UnexpectedGradient(program.inputs[position].path, grad, "has already arrived in this step")
        self._put[position] = 1
        slot = self._slots[position] if self._copies_at_once else None
        if (
            slot is not None
            and grad.shape == slot.shape
            and grad.dtype == program.dtypes[position]
            and grad.is_cpu
            and not grad.is_neg()  # a copy to float16 loses the sign (torch 2.11 to 2.14)
            and not is_grad_enabled()
        ):
            if at_once:
                slot.copy_(grad)
            else:
                self._to_copy.append((slot, grad))
        else:
            if keep and program.inputs[position].path in program.overwrites:
                grad = grad.clone()
            self._pending.append((position, grad))
        if self._learns_order:
            self._arrived.append(program.inputs[position].path)
        if program.stream is not None:
            self._streams.add(program.device.current())
        segment = program.segment_of[position]
        self._remaining[segment] -= 1
        if not self._remaining[segment]:
            return True
        return program.is_polled and self._is_due()

    def feed(self, path: str, grad: Tensor, *, keep: bool = False) -> None:
        """Call `put` for the gradient of the leaf at `path`, and `advance` if it is time.

        Raises:
            ValueError: The leaf does not exist, its gradient has arrived already, or it does not match the leaf.
        """
        if self.put(self._position_of(path, grad), grad, keep=keep):
            self.advance()

    def feed_all(self, grads: Leaves, *, keep: bool = False) -> None:
        """Call `put` for several gradients by path, and `advance` once."""
        for path, grad in grads.items():
            self.put(self._position_of(path, grad), grad, keep=keep)
        self.advance()

    def put_all(self, positions: Iterable[int], grads: Iterable[Tensor]) -> None:
        """Call `put` for several gradients, copy them together, and call `advance` once."""
        for position, grad in zip(positions, grads, strict=True):
            self.put(position, grad, at_once=False)
        self.advance()

    def _position_of(self, path: str, grad: Tensor) -> int:
        if path not in self._program.positions:
            raise UnexpectedGradient(path, grad, "is not among the plan's leaves")
        position = self._program.positions[path]
        leaf = self._program.inputs[position].leaf
        if not self._put[position] and not leaf.is_like(grad):
            raise UnexpectedGradient(path, grad, leaf=leaf)
        return position

    def advance(self, *, block: bool = False) -> None:
        """Run segments that are ready. With `block`, wait for collectives, and stop only at a missing gradient."""
        if self.is_open and self.is_early:
            self._go_on(block)

    def _go_on(self, block: bool) -> None:
        segments = self._program.segments
        # Backward may run within autocast, and that would compute factors in half precision.
        with torch.no_grad(), without_autocast(), self._on_side_stream():
            self._ingest()
            while self._next < len(segments) and self._is_ready(segments[self._next].segment, block):
                self._run(segments[self._next])
                self._next += 1

    # The end

    def agree(self) -> frozenset[str]:
        """Issue all collectives, vote on the outcome, and wait. Leaves that have not arrived count as zeros.

        Returns:
            The leaves for which no rank had a gradient; empty if ranks do not vote.

        Raises:
            StepFailedError: Another rank has failed in this step.
            ValueError: The pipeline is `weighted`, and this rank has no valid weight; on all ranks: all weights are 0.
            CollectiveError: A collective failed; or, on an accelerator, a rank failed in this or the last step. Ranks
                may be desynchronized.
        """
        require_noticed(self.notices)
        self.require_weight()
        absent = self._issue_all()
        if self._captures and absent:
            raise RuntimeError(
                f"leaves without a gradient cannot be captured, because ranks must agree on them: {sorted(absent)}"
            )
        if self._vote is not None:
            return self._voted(self._vote, absent)
        self._wait_all()
        return frozenset()  # not known without a vote: the zeros of this rank count as gradients

    def require_weight(self) -> None:
        """Raise a ValueError if the pipeline is `weighted`, and this rank has no valid weight."""
        if self._weight is not None:
            require_valid(self._weight)

    def commit(self) -> Synchronized:
        """Compute and return the means, after `agree`. No other method writes over gradients and the state.

        The means may share memory with buffers of the plan. A buffer is not reused while a caller holds such a mean.
        """
        program, stream = self._program, self._program.stream
        with torch.no_grad(), without_autocast(), self._on_side_stream():
            if self._watches and self._vote is not None:
                self.found_nonfinite = self._vote.found_nonfinite()
            self._keep_memory()
            for bound in program.segments[self._next :]:
                self._run(bound)
            means, parts = program.end(self._values)
            self._restore(parts, means)
            if self.found_nonfinite is not False:  # memory kept its gradients, so no optimizer may apply the means
                means |= {path: means[path].clone() for path in program.passed_on & means.keys()}
                spoil(means.values(), self.found_nonfinite)
            if self._is_pinned:
                means, parts = self._write_state(parts, means), self.parts
        if stream is not None:
            current = program.device.current()
            program.device.wait(current, stream)
            for each in [*means.values(), *parts]:
                if isinstance(each, Tensor):
                    program.device.keep(each, current)
            for old, new in zip(self.parts, parts, strict=True):  # the stream of `old` need not have waited, too
                if isinstance(old, Tensor) and old is not new:
                    program.device.keep(old, stream)
        if self._vote is not None and program.device.is_asynchronous and not self._captures:
            with self._on_side_stream():  # after everything that other ranks wait for
                self.notice = self._vote.notice()
        if self._observer is not None and program.plan is not None:
            self._observer.ends(program.plan)
        if self._learns_order and program.plan is not None and self._vote is not None and self._vote.groups:
            arrived = dict.fromkeys(path for path in self._arrived if path not in self._zeros)
            expected = [*arrived, *(path for path in reversed(program.positions) if path not in arrived)]
            self.arrival = self._vote.of_first_rank(expected)
        late = self._late(means)
        self.parts, self.is_done = parts, True
        self._close()
        return Synchronized(means, self._unused, late)

    def _late(self, means: Leaves) -> frozenset[str]:
        """Return the unused leaves that get an update, the same on all ranks: some rank's mean is not zero.

        Or its substitute is not zero: memory contains it now, so if it stayed in `.grad`, it would count twice.
        """
        if not self._gives_later or not self._unused:
            return frozenset()
        given = [(path, of[path]) for of in (means, self.substitutes) for path in self._unused & of.keys()]
        late = frozenset(path for path, value in given if bool(value.any()))
        return late if self._agrees or self._vote is None else self._vote.of_any_rank(late)

    def watch(self, is_nonfinite: Tensor | bool) -> None:
        """Add `is_nonfinite` to this rank's vote on NaN or infinity, and let ranks agree on `found_nonfinite`."""
        self._watches, program = True, self._program
        if program.stream is not None and isinstance(is_nonfinite, Tensor):
            program.device.wait(program.stream, program.device.current())
            program.device.keep(is_nonfinite, program.stream)
        with self._on_side_stream():
            self._gave_nonfinite = self._gave_nonfinite | is_nonfinite

    def _keep_memory(self) -> None:
        """Let segments read whether memory must stay as it is; if the host knows that it must, they work on copies."""
        self._program.set_nonfinite(self._values, self.found_nonfinite)
        if self.found_nonfinite is True and self._remembered:
            self._program.keep_parts(self._values, self.parts)

    def _write_state(self, parts: Sequence[Any], means: Leaves) -> Leaves:
        """Write the next state into the memory of this one; return the means, copied if they are stored there."""
        memory = {part.data_ptr() for part in self.parts}
        means = {path: mean.clone() if mean.data_ptr() in memory else mean for path, mean in means.items()}
        pairs = [
            (old, new.clone() if new.data_ptr() in memory else new)  # a part may take the memory of another
            for old, new in zip(self.parts, parts, strict=True)
            if isinstance(new, Tensor) and (old.data_ptr(), old.stride()) != (new.data_ptr(), new.stride())
        ]
        if pairs:
            foreach_copy(*zip(*pairs, strict=True))
        for old, new in zip(self.parts, parts, strict=True):
            if not isinstance(new, Tensor):
                old.fill_(new)
        return means

    def _restore(self, parts: list[Any], means: Leaves) -> None:
        """Replace next parts by the old ones if NaN or infinity was found. A plan reads a flag on the device itself."""
        has_plan, remembered = self._program.plan is not None, self._remembered
        if remembered and not has_plan:  # received values are unknown, and means are equal on ranks
            self.found_nonfinite = self.found_nonfinite | has_nonfinite(means.values(), self._program.device)
        if self.found_nonfinite is True or not has_plan:
            old, new = ([of[i] for i in remembered] for of in (self.parts, parts))
            for i, part in zip(remembered, kept(old, new, self.found_nonfinite), strict=True):
                parts[i] = part

    def finish(self) -> Synchronized:
        with in_profile("end"):
            self.agree()
            return self.commit()

    def give_up(self, *, failed: bool = False) -> None:
        """End the step without notifying other ranks, because each ends it by itself. Nothing was written over.

        Args:
            failed: True to count the step as failed.
        """
        self.has_failed = failed
        self._wait_for_side_stream()
        self._close()

    def fail(self, error: BaseException) -> None:
        """End the step on this rank because of `error`, and make the others raise `StepFailedError`.

        This engine then refuses further steps if the others cannot be notified within this step: a collective failed,
        this rank has already voted for success, it is unknown which ranks the pipeline reaches, or the device is an
        accelerator, where ranks learn of failures one step later. Does nothing if the step has ended.
        """
        if not self.is_open:
            return
        self.is_open, self.has_failed = False, True
        try:
            if not self._captures:  # nothing has run, so other ranks wait for nothing
                self._notify(error)
        finally:
            self._close()

    def _notify(self, error: BaseException) -> None:
        if self._has_voted and self._program.plan is None and isinstance(error, FloatingPointError):
            return  # fp16(..., check=True) raises on all ranks
        self.broken = error  # until the others are notified
        if self._vote is None or isinstance(error, CollectiveError) or (self._has_voted and self._vote.is_cast):
            return
        is_known = isinstance(error, Exception) or isinstance(self._program.wire, C10d)
        if not is_known and ([] in self._works.values() or self._vote.is_starting):
            return  # an interrupt came while a message was started; others may or may not receive it
        try:
            self.send_zeros()
            with self._on_side_stream():
                self._vote.cast(frozenset(), failed=True)
            self._wait_all()
            self.broken = None if self._vote.explain(error) else error
            self._wait_for_side_stream()
        except RuntimeError as problem:
            error.add_note(f"the other ranks could not be notified: {problem}")

    def _voted(self, vote: Vote, absent: frozenset[str]) -> frozenset[str]:
        """Vote and wait. Return the leaves for which no rank had a gradient."""
        nonfinite: Tensor | bool = False
        if self._watches:
            self._wait_all()
            with torch.no_grad(), self._on_side_stream():
                nonfinite = has_nonfinite(self._program.received(self._buffers), self._program.device)
                if self._gave_nonfinite is not False:
                    nonfinite = nonfinite | self._gave_nonfinite
        self._has_voted = True
        if self._captures and not isinstance(nonfinite, Tensor):  # it can neither fail nor lack a gradient
            self._wait_all()
            return self._unused
        with self._on_side_stream():
            vote.cast(absent, nonfinite=nonfinite, counts=self.counts)
        self._wait_all()
        try:
            with self._on_side_stream():
                self._unused = vote.outcome(waits=self._learns_order)  # no failed rank joins the agreement on the order
        except (StepFailedError, ValueError):  # raised on all ranks; others may leave ranks desynchronized
            self.give_up(failed=True)
            raise
        return self._unused

    def _issue_all(self) -> frozenset[str]:
        self._zeros = self.missing
        for path in self._zeros:
            grad = self.substitutes[path] if path in self.substitutes else self._program.leaves[path].empty().zero_()
            self.put(self._program.positions[path], grad, keep=path in self.substitutes)
        self._go_on(block=True)
        return self._zeros

    def _wait_all(self) -> None:
        with torch.no_grad(), self._on_side_stream():
            for index in list(self._works):
                self._wait(index)

    def send_zeros(self) -> None:
        """Send zeros in each collective that this rank has not issued yet, so that no other rank waits for it."""
        with torch.no_grad(), self._on_side_stream():
            for bound in self._program.segments[self._next :]:
                launches = bound.segment.launches
                if launches is not None and self._works.get(launches.index):  # an interrupt came after it
                    self._wait(launches.index)
                elif launches is not None:
                    self._buffers[launches.index].send.zero_()
                    self._launch(bound.segment)
                self._next += 1

    def _close(self) -> None:
        self._ended(self)  # while the step is open, so that an interrupt in here fails it
        self.is_open = self._copies_at_once = False
        self._values, self._slots, self._buffers, self._pending, self._to_copy = [], [], [], [], []
        self._works, self.parts = {}, []

    # Running

    def _ingest(self) -> None:
        """Check and scale the gradients from `put` since the last call, and assign them to registers."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        program, values, inputs = self._program, self._values, self._program.inputs
        if program.stream is not None:
            for stream in self._streams:
                program.device.wait(program.stream, stream)
            self._streams.clear()
            for _, grad in pending:
                program.device.keep(grad, program.stream)
        if self._scale != 1:
            scaled = partial(torch.mul, other=self._scale) if self._scale else torch.zeros_like  # zeros also for NaN
            pending = [(i, grad if inputs[i].is_own else scaled(grad)) for i, grad in pending]
        if self._watches and program.hides_nonfinite:
            self._gave_nonfinite |= has_nonfinite((grad for _, grad in pending), program.device)
        for position, grad in pending:
            each = inputs[position]
            register = each.register
            is_plain = (grad.shape, grad.dtype, grad.device, grad.stride()) == each.like
            if is_plain and register is not None:
                values[register] = grad.clone() if each.is_cloned and is_held(grad) else grad
            else:
                self._ingest_unusual(position, grad)

    def _ingest_unusual(self, position: int, grad: Tensor) -> None:
        each = self._program.inputs[position]
        if not each.leaf.is_like(grad):
            raise UnexpectedGradient(each.path, grad, leaf=each.leaf)
        grad = grad.resolve_conj().resolve_neg()  # plans are traced without these flags
        if (slot := self._slots[position]) is not None:
            self._to_copy.append((slot, grad))
        if each.register is None:
            return
        if grad.stride() != each.leaf.stride:
            grad = each.leaf.empty().copy_(grad)
        elif each.is_cloned and is_held(grad):
            grad = grad.clone()
        self._values[each.register] = grad

    def _is_due(self) -> bool:
        now, segments = perf_counter(), self._program.segments
        if not self._works or now < self._polled + POLL_SECONDS:
            return False
        self._polled = now
        done = [self._is_completed(index) for index in self._works]
        return any(done) and self._next < len(segments) and self._is_ready(segments[self._next].segment, False)

    def _is_ready(self, segment: Segment, block: bool) -> bool:
        if self._remaining[self._next] or segment.commits:
            return False
        if block or self._program.stream is not None:
            return True
        return all(self._is_completed(index) for index in segment.waits if index in self._works)

    def _run(self, bound: BoundSegment) -> None:
        segment, values, observer = bound.segment, self._values, self._observer
        for index in segment.waits:
            if index in self._works:
                self._wait(index)
        with _NOTHING if observer is None else observer.piece("compute", segment):
            if self._to_copy:
                copies, self._to_copy = self._to_copy, []
                foreach_copy(*zip(*copies, strict=True))
            made = segment.run(*[values[register] for register in bound.inputs])
        for register, value in zip(bound.outputs, made, strict=True):
            values[register] = value
        for register in bound.frees:
            values[register] = None
        if segment.launches is not None:
            self._launch(segment)

    def _launch(self, segment: Segment) -> None:
        collective, observer = segment.launches, self._observer
        assert collective is not None
        index = collective.index
        buffer = self._buffers[index]
        if has_modes():  # checked here too, to skip the call in the usual case: no counter is active
            count_payload(self._program.wire_bytes[index])
        start = partial(
            self._program.wire.start,
            collective.kind,
            buffer.send,
            buffer.receive,
            collective.op,
            collective.group,
        )
        named = _NOTHING if observer is None else observer.piece("launch", collective)
        self._works[index] = works = []
        with named, without_modes():
            _named(collective, partial(start_into, works, start))

    def _is_completed(self, index: int) -> bool:
        return _named(self._program.collectives[index], self._works[index][0].is_completed)

    def _wait(self, index: int) -> None:
        collective, observer = self._program.collectives[index], self._observer
        with _NOTHING if observer is None else observer.piece("wait", collective):
            _named(collective, partial(waited, self._works[index][0]))
        del self._works[index]  # only now: after an interrupt above, memory must not be reused until it is over

    def _wait_for_side_stream(self) -> None:
        """Make the current stream wait for the side stream, before memory that it may still write to is freed."""
        device, stream = self._program.device, self._program.stream
        if stream is not None:
            device.wait(device.current(), stream)

    def _on_side_stream(self) -> AbstractContextManager[Any]:
        stream = self._program.stream
        return _NOTHING if stream is None else self._program.device.on(stream)


def _named(collective: Collective, run: Callable[[], T]) -> T:
    """Return the result of `run`; name `collective` in its errors."""
    try:
        return run()
    except RuntimeError as error:
        carried = ", ".join([payload.label for payload in collective.payloads][:3])
        raise CollectiveError(
            f"{collective.kind.name} {collective.name} of {len(collective.payloads)} payloads ({carried}, ...) over "
            f"{collective.world_size} ranks failed: {error}. Another rank has failed, left, or not called backward; "
            "see its own error"
        ) from error


@contextmanager
def applying(engine: Any) -> Generator[None]:
    """Make `engine` refuse further steps if an interrupt leaves the block after a step has succeeded in it.

    The other ranks apply the result of that step, but this rank has lost it.
    """
    steps = engine.steps
    try:
        yield
    except BaseException as error:
        if engine.steps > steps and not isinstance(error, Exception):
            engine.broken = error
        raise


def in_profile(name: str) -> AbstractContextManager[object]:
    """Mark the block as the range `fnddp NAME` in torch's profiler, if it is active."""
    return profiled(name) if is_profiling() else _NOTHING
