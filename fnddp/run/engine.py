"""The engine, used by all adapters: it runs a pipeline on the same leaves, step after step.

It owns the pipeline's state, keeps a plan for each phase, and learns the order in which gradients arrive. Each step
has the same outcome on all ranks: either all have the result, or all raise (on an accelerator, one step later).
"""

import logging
import weakref
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial, reduce
from operator import attrgetter
from time import perf_counter
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.buckets import BUCKET_CAPS
from fnddp.core.state import parts, require_like, shared
from fnddp.core.sync import REMEMBERED, State, Sync, all_in, groups_of, require_takes_weight
from fnddp.core.tree import Leaves, without_wrappers
from fnddp.device import device_of, one_of
from fnddp.ir.plan_data import require_backend
from fnddp.ir.program import LeafSpec, LoweringError
from fnddp.plan.draft import Donation
from fnddp.plan.lower import Traces, lower_leaves
from fnddp.plan.plan import Plan
from fnddp.run.lane import Lane
from fnddp.run.program import PlanMemory, Program, without_schedule
from fnddp.run.step import Step, Synchronized, in_profile, require_noticed
from fnddp.run.vote import Vote
from fnddp.show.text import count
from fnddp.show.trace import Observer, Taken, debug_level
from fnddp.wire.c10d import C10D, over
from fnddp.wire.groups import World, identity, rank
from fnddp.wire.protocol import Elastic, Wire
from fnddp.wire.weights import Weight

_log = logging.getLogger("fnddp")

SLOW_SECONDS = 2
"""Seconds after which a lowering is logged, because the step that waits for it may seem to hang."""

_NO_PLAN = "it has no plan: it reads values, or runs foreign code"

_NUMBERS = 128  # of engines on a lane; digests are above, and both fit a byte

MAX_PHASES = 8  # plans kept: few phases suffice, unless each plan holds for one value of a growing counter


def delegated(path: str) -> Any:
    """Return a property that reads and writes the attribute at a dotted `path`."""
    *owner, name = path.split(".")
    return property(attrgetter(path), lambda self, value: setattr(reduce(getattr, owner, self), name, value), doc="")


class Engine:
    """Run `sync` on `leaves` in consecutive steps: `begin`, a `put` for each gradient, `agree`, `commit`.

    Args:
        state: The pipeline's state before the first step; None if `begin` is given one.
        bucket_caps: Sizes of gradient buckets in bytes: of the first ones, and the last size for all others.
        learns_order: True to lay out later steps by the order in which gradients arrive on the first rank in the first
            step. Ignored on an elastic wire, because a rank that joins later has not seen that order.
        groups: Process groups of ranks that end a step together, for a pipeline that does not know its own groups.
        other_groups: Further groups of ranks that end a step together, in addition to those of the pipeline.
        backend: The backend that runs segments, see `lower`. With a backend, a pipeline without a plan is an error.
        traces: Traces of this pipeline for such leaves, to be shared by several engines.
        lane: The lane of the engine that this one replaces, if any.
        device: The device on which ranks vote; None for the device of the leaves.

    Attributes:
        positions: Positions of the leaves, by path.
        step: The open step; None as soon as it has ended.
        steps, failed_steps: Numbers of steps that have succeeded, and failed.
        learns_order: True if the order in which gradients arrive is still to be learnt.
        number, broken, refused: See `Lane`.
        counters: The ints in the state that was released last, by position.
        place: Number of this engine among the engines of its lane, for ranks to detect mixed-up steps: see `Flags`.
        places: The numbers of its lane if it shares it; it takes one after its first step, which has succeeded on all
            ranks. Until then its number is a digest of the types of the pipeline's transforms and of the leaves.
        counts: The ints in the state by position, if `pin` has moved them to the device; None otherwise.
        owns_state: False if the caller passes the state to each step.
        captured: Memory that captured steps of this engine use.
    """

    number = delegated("lane.number")
    broken, refused = delegated("lane.broken"), delegated("lane.refused")
    counters: Mapping[int, int] = {}
    place = 0
    places: Iterator[int] | None = None
    counts: dict[int, int] | None = None
    owns_state = True

    def __init__(
        self,
        sync: Sync,
        leaves: Mapping[str, LeafSpec],
        *,
        state: State = None,
        donation: Donation,
        bucket_caps: Sequence[float] = BUCKET_CAPS,
        learns_order: bool,
        groups: Collection[str | None] = (),
        other_groups: Collection[str | None] = (),
        wire: Wire = C10D,
        backend: str | None = None,
        traces: Traces | None = None,
        lane: Lane | None = None,
        device: torch.device | None = None,
    ) -> None:
        require_backend(backend)
        self.sync, self.leaves, self.wire = sync, dict(leaves), wire
        self._own_wire = wire  # with the lane's communicators, once it is connected
        self.positions = {path: position for position, path in enumerate(leaves)}
        self.lane = Lane() if lane is None else lane
        self.lane.engines += 1
        self.device = device or one_of({path: leaf.device for path, leaf in leaves.items()})
        self.groups = tuple(dict.fromkeys([*groups_of(sync), *(() if sync.groups else groups), *other_groups]))
        self._gives_later, self._agrees = sync.gives_later, sync.agrees and not other_groups
        self.step: Step | None = None
        self.steps = self.failed_steps = 0
        self.learns_order = self._can_learn_order = learns_order and not isinstance(wire, Elastic)
        self._strides: list[Any] = []  # of the parts of the first state: plans are made for these
        self._take(state)
        self._knows_groups = sync.groups is not None or bool(groups)
        self._overwrites_early = donation.gradients == "yes"
        self._world = World(None if wire is C10D else wire)
        options: Any = {"bucket_caps": bucket_caps, "donation": donation, "backend": backend}
        self._lower: Any = partial(lower_leaves, sync, self.leaves, world=self._world, **options)
        self._traces = Traces() if traces is None else traces
        self._has_plans, self._needs_plans = True, backend is not None
        self._memory = PlanMemory()
        self._observer = Observer(debug_level())
        self._memories: list[int] | None = None
        self._measured_from: int | None = None  # number of steps at the first call of `taken`
        self._order: list[str] | None = None  # the order of arrival that plans expect
        self.learnt: list[str] = []  # that order, if learnt in this run or in the run that it continues
        self._dropped: frozenset[str] = frozenset()
        self._programs: list[Program] = []
        self._current: Program | None = None
        self._is_connected = False
        self.captured: list[Tensor] = []
        self._pinned_by: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def is_open(self) -> bool:
        return self.step is not None

    @property
    def state(self) -> State:
        """The pipeline's state after the last step. Later steps do not write to it.

        To continue from another state of the same pipeline and leaves, set it on all ranks, between steps.

        Raises:
            CollectiveError: On an accelerator: another rank has failed in the last step.
        """
        self.require_noticed()
        state = self._own_state()
        if self.counts is not None:  # replays write over it
            return tree.map_tensors(Tensor.clone, state)
        # An open step may write to parts that nobody but the engine held when it began.
        return shared(state) if self.step is None else tree.map_tensors(Tensor.clone, state)

    @state.setter
    def state(self, state: State) -> None:
        if self.step is not None:
            raise RuntimeError("the state cannot be set while a step is open, because the step would overwrite it")
        state = require_like(repr(self.sync), state, self._own_state())
        if self.counts is None:
            self._take(state)
            return
        for i, part in enumerate(tree.flatten_any(state)[0]):  # into the memory that graphs read
            if i in self.counts:
                self.counts[i] = part
            self._parts[i].fill_(part) if i in self.counts else self._parts[i].copy_(part)

    def pin(self, user: object) -> None:
        """Keep the state in the same memory, with its counters on the device, so that graphs of `user` can use it.

        Raises:
            RuntimeError: No step of the pipeline can be captured.
        """
        self._pinned_by.add(user)
        if self.counts is not None:
            return
        if isinstance(self.wire, Elastic) or self.plan is None:
            raise _not_captured(self.sync, _NO_PLAN if self.plan is None else "its ranks come and go")
        device = device_of(self.device)
        self.counts = {i: part for i, part in enumerate(self._parts) if not isinstance(part, Tensor)}
        self._parts = [
            device.of_host([self.counts[i]], torch.int64)[0] if i in self.counts else part.clone()
            for i, part in enumerate(self._parts)
        ]

    def unpin(self, user: object) -> None:
        """Undo `pin`, if no other user needs it."""
        self._pinned_by.discard(user)
        if not self._pinned_by:
            self._parts, self.counts = self._known_parts(), None

    def end_capture(self, *, failed: bool = False, counts: dict[int, int] | None = None) -> list[Tensor]:
        """Return the memory that captured steps use. If one has failed, drop it, and restore `counts` instead."""
        captured, self.captured = self.captured, []
        if failed:  # buffers that were made in it have no values
            self.counts, self._programs, self.broken = counts, [], None
            self._memory.clear()
        return captured

    def next_program(self) -> Program | None:
        """Return the program of the next step; None if it has not run yet."""
        parts = self._known_parts()
        return next((program for program in self._programs if program.is_for(parts)), None)

    def count(self, program: Program) -> None:
        """Count a step of `program` on the host. On the device the step has counted itself."""
        if self.counts and program.plan is not None:
            self.counts |= zip(program.plan.phase.counters, self._following(program), strict=True)

    def _following(self, program: Program) -> list[int]:
        """Return the counters after a step of `program`."""
        assert program.plan is not None
        phase, parts = program.plan.phase, self._known_parts()
        numbers = [*(parts[i] for i in phase.counters), *map(self._own_wire.size, phase.groups)]
        return [*program.plan.following(numbers)]

    def require_noticed(self) -> None:
        """Raise a CollectiveError if another rank has failed in the last step, on an accelerator."""
        require_noticed(self.lane.notices)
        self.lane.notices = ()  # for which the host need not wait again

    def release_state(self) -> State:
        """Return the state and drop it, so that the caller must pass one to the next `begin`."""
        self.counters = {i: part for i, part in enumerate(self._parts) if isinstance(part, int)}
        state, self._parts = self._own_state(), []
        return state

    def _take(self, state: State) -> None:
        """Use `state` for the next step; copy parts with other strides than in the first state."""
        self._parts, self._structure = tree.flatten_any(state)
        strides = [_dense_strides(part) if isinstance(part, Tensor) else None for part in self._parts]
        self._strides = self._strides or strides
        if strides != self._strides:
            pairs = zip(self._parts, strides, self._strides, strict=True)
            self._parts = [part if now == first else _strided(part, first) for part, now, first in pairs]

    def _own_state(self) -> State:
        return tree.unflatten_any(self._structure, self._known_parts())

    def _known_parts(self) -> list[Any]:
        """Return the parts of the state, with counters as ints."""
        return [self.counts.get(i, part) for i, part in enumerate(self._parts)] if self.counts else self._parts

    @property
    def plan(self) -> Plan | None:
        """The plan of the current or last step; None before the first, and for a pipeline that cannot be lowered."""
        return None if self._current is None else self._current.plan

    def taken(self) -> Taken | None:
        """Return the times of the last step; None without a plan, and on the first call: that starts measuring."""
        if self._measured_from is None:
            self._observer.measures, self._measured_from = True, self.steps
        if self.plan is None or self.steps == self._measured_from:
            return None
        return self._observer.taken(len(self.plan.collectives))

    def begin(self, state: State = None, *, weight: Any = None, scale: float = 1.0, sends: bool = True) -> Step:
        """Begin a step. It is the attribute `step` until it ends.

        Args:
            state: The state to begin from; None for the state after the last step.
            weight: The weight of this rank's gradients, for `weighted`. `Step.agree` raises if it is not valid.
            scale: Factor for gradients in a step without weights.
            sends: False to send the weight with the first gradients, not now.

        Raises:
            RuntimeError: An earlier step left ranks desynchronized.
            TypeError: A weight is given, but the pipeline is not `weighted`.
        """
        self.refuse_after_failure()
        if weight is not None:
            require_takes_weight(self.sync, weight)
        self.owns_state = state is None
        if state is not None:
            self._take(state)
        if isinstance(self.wire, Elastic):
            self.lane.epoch = self.wire.epoch
        captures = device_of(self.device).is_capturing()
        if captures:
            self._require_capturable()
        given = Weight.of(weight, captures) if self.sync.takes_weight else None
        try:
            with in_profile("start"):
                step = self._begin(given, 1.0 if self.sync.takes_weight else scale, captures)
        except BaseException as error:
            # Other ranks may have begun.
            if not captures and any(self.wire.size(group) > 1 for group in self.groups or {None}):
                self.broken = error
            raise
        if given is not None and sends:
            try:
                step.advance()  # sends the weight
            except BaseException as error:
                step.fail(error)
                raise
        return step

    def _require_capturable(self) -> None:
        """Raise a RuntimeError, before anything has happened, if the next step cannot be captured."""
        program = self.next_program()
        problem = None
        if program is None or self.learns_order:
            problem = "the first steps lower it and agree on an order: run three before"
        elif program.plan is None or isinstance(self.wire, Elastic):
            problem = _NO_PLAN if program.plan is None else "its ranks come and go"
        elif self.counts is None and self.owns_state and self._parts:
            problem = "its state changes memory; capture it with fnddp.make_graphed_callable"
        elif not self.owns_state and [self._parts[i] for i in program.plan.phase.counters] != self._following(program):
            problem = "its state counts steps on the host; capture it through fnddp.DistributedDataParallel"
        if problem is not None:
            raise _not_captured(self.sync, problem)

    def _begin(self, weight: Weight | None, scale: float, captures: bool) -> Step:
        for engines in _noted:
            engines[self] = None
        self.connect()
        program = self._choose()
        groups = program.groups
        self.step = step = Step(
            program,
            self._parts,
            self._ended,
            vote=None if groups is None else Vote(self.leaves, program.wire, groups, program.device, self.place),
            weight=weight,
            scale=scale,
            learns_order=self.learns_order,
            remembered=self._remembered(),
            gives_later=self._gives_later,
            agrees=self._agrees,
            is_early=not self.lane.shared or self.lane.is_alone,
            notices=self.lane.notices,
            observer=self._observer,
            is_pinned=self.counts is not None,
            captures=captures,
        )
        if captures:
            self.captured += step.held()
        self.lane.begun += 1
        return step

    def _remembered(self) -> list[int]:
        """Return the positions of those parts of the state that a step with NaN or infinity leaves unchanged."""
        if self._memories is None:  # the same for all states of the pipeline
            items = tree.annotated_items(self._own_state())
            self._memories = [
                place
                for place, (_, marks, part) in enumerate(items)
                if REMEMBERED in marks and isinstance(part, Tensor) and part.numel()
            ]
        return self._memories

    def _ended(self, step: Step) -> None:
        self.steps += step.is_done  # first: see `applying`
        self.lane.ended += 1
        self.step = None if self.step is step else self.step
        self.failed_steps += step.has_failed
        self.broken = step.broken or self.broken
        if step.is_done:
            if self.places is not None:
                self.place, self.places = next(self.places) % _NUMBERS, None
            self._parts, self.learns_order = step.parts, False
            if self._current is not None:
                self.count(self._current)
            unseen = [notice for notice in self.lane.notices if notice not in step.notices]
            self.lane.notices = (*unseen, *filter(None, [step.notice]))
        if step.arrival is not None:
            self.learnt = step.arrival
            self.expect(step.arrival)

    def run(self, leaves: Leaves, state: State = None, *, weight: Any = None) -> Synchronized:
        """Run a whole step on complete gradients. If it fails, it has failed on all ranks."""
        try:
            step = self.begin(state, weight=weight)
            step.feed_all({path: leaves[path] for path in reversed(leaves)})
            return step.finish()
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Fail the open step, if any, on all ranks."""
        if self.step is not None:
            self.step.fail(error)

    def refuse_after_failure(self) -> None:
        """Raise a RuntimeError if this rank may be desynchronized.

        Other ranks may still wait in collectives of the failed step, and would match them with those of the next step.
        """
        if self.refused is not None:
            self.lane.require_whole()
        if isinstance(self.wire, Elastic) and (self.wire.epoch != self.lane.epoch or self.wire.lost is not None):
            self.broken = None  # an epoch that lost a rank sends nothing more, so steps stay consistent
        if self.broken is not None:
            raise RuntimeError(
                f"an earlier step failed on this rank ({type(self.broken).__name__}: {self.broken}), so ranks may "
                "be desynchronized; restart from a checkpoint, with the process group set up again"
            ) from self.broken

    def connect(self) -> None:
        """Create the lane's communicators unless they exist. All ranks call it at set-up.

        The first step may be too late: models that share a backward may begin their steps in a rank-dependent order.
        """
        if not self._is_connected:
            self.lane.connect(self.wire, self.groups, self.device)
            self._own_wire = self.lane.wire(self.wire, self.groups)
            for program in self._programs:
                program.wire = self._own_wire
            self._is_connected = True

    def prepare(self, state: State = None) -> Plan | None:
        """Make the plan for `state`, or for the current state, now instead of in the first step."""
        if state is not None:
            self._parts, self._structure = tree.flatten_any(state)
        return self._choose().plan

    def fail_next_from(self, state: State, error: BaseException) -> None:
        """Fail the next step on all ranks because of `error`; the others begin that step from a state like `state`."""
        self.prepare(state)
        begin_next([self])
        self.fail(error)
        self.release_state()

    def expect(self, arrival: list[str]) -> None:
        """Expect gradients in the order `arrival` from the next step on. It must be the same on all ranks."""
        if self.plan is not None and arrival != list(self.plan.buckets):
            self._order, self._programs = arrival, []
            self._memory.clear()

    def continue_with(self, learnt: list[str]) -> None:
        """Expect gradients in the order that an earlier run, continued here, has learnt; if empty, learn the order."""
        named = {without_wrappers(name): name for name in self.leaves}  # either run may be compiled
        learnt = [named.get(without_wrappers(name), name) for name in learnt]
        if self.step is not None:
            raise RuntimeError("the order of gradients cannot be set while a step is open, which uses that order")
        if not learnt and self._can_learn_order:  # lays out the next step as any first step
            self.learnt, self.learns_order, self._order, self._programs = [], True, None, []
            self._memory.clear()
        elif learnt and {*learnt} == self.leaves.keys():
            self.learnt, self.learns_order = learnt, False
            if self.plan is None:
                self._order = learnt
            else:
                self.expect(learnt)

    def drop(self, leaves: frozenset[str]) -> None:
        """Leave out `leaves`, unused on all ranks, from the next step on. They must be the same on all ranks."""
        if leaves:
            self._dropped, self._programs = leaves, []

    def learn_from(self, before: "Engine") -> bool:
        """Copy the learnt order and the dropped leaves of `before`, and return True; return False if leaves differ.

        A rank that alone replaces its engine then still sends the same messages as the other ranks.
        """
        if list(self.leaves) != list(before.leaves):
            return False
        self._order, self.learnt, self._dropped = before._order, before.learnt, before._dropped
        self.learns_order &= before.learns_order
        return True

    def _choose(self) -> Program:
        program = self.next_program()
        if program is None:
            program = (self._lowered() if self._has_plans else None) or self._without_plan()
            self._programs = [program, *self._programs[: MAX_PHASES - 1]]
        self._current = program
        return program

    def _without_plan(self) -> Program:
        plan = without_schedule(self.sync, self.leaves, self._own_state(), self.groups, self._world)
        groups = self.groups if self._knows_groups else None
        return Program(plan, self._own_wire, self._memory, groups, device=self.device, is_static=False)

    def _lowered(self) -> Program | None:
        begun = perf_counter()
        try:
            plan = self._lower(self._own_state(), arrival=self._order, dropped=self._dropped, traces=self._traces)
        except LoweringError:
            if self._needs_plans:
                raise
            self._has_plans = False  # nor is it tried in later phases: a trace takes longer than a step
            return None
        if self._order is not None:  # the order is final, so no other plan needs them
            self._traces.clear()
        named = {group: group for group in self.groups}  # a trace has plain names; later groups may reuse them
        groups = tuple(dict.fromkeys([*(named.get(group, group) for group in plan.groups), *self.groups]))
        # Autograd may return gradients that share memory.
        program = Program(
            plan, self._own_wire, self._memory, groups, device=self.device, clones_shared=self._overwrites_early
        )
        self._observer.show(plan)
        if (seconds := perf_counter() - begun) > SLOW_SECONDS and rank(None) == 0:
            _log.warning(
                "made a plan of %r for %s in %.1f s; this happens once for each phase and order of gradients",
                self.sync,
                count(len(self.leaves), "gradient"),
                seconds,
            )
        return program


def _dense_strides(part: Tensor) -> tuple[int, ...]:
    return part.stride() if part.is_contiguous() else torch.empty_like(part, device="meta").stride()


def _strided(part: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(part.shape, strides, dtype=part.dtype, device=part.device).copy_(part)


def _not_captured(sync: Sync, problem: str) -> RuntimeError:
    return RuntimeError(f"a step of {sync!r} cannot be captured in a graph: {problem}")


_noted: list[dict[Engine, None]] = []


@contextmanager
def noting_engines() -> Generator[dict[Engine, None]]:
    """Yield an ordered set of the engines of which steps begin in the block, in any thread."""
    engines: dict[Engine, None] = {}
    _noted.append(engines)
    try:
        yield engines
    finally:
        _noted.remove(engines)


_functions: dict[tuple[Any, ...], list[Lane]] = {}  # their lanes, by weak references to groups or a wire


def begin_next(engines: Iterable[Engine]) -> None:
    """Begin the next step of each of `engines`, so that the caller can fail it. They must not have an open step."""
    for engine in engines:
        with suppress(RuntimeError):  # if a step cannot begin, no rank waits for this one
            engine.begin()


def _lane_of_functions(world: tuple[Any, ...]) -> Lane:
    """Return a lane for functions over `world` that has no open step and is not broken. Nested calls get other lanes.

    Functions share lanes because programs create functions by the thousand, and a process group is never freed.
    """
    for each in list(_functions):  # a copy: other threads may add worlds meanwhile
        if any(ref is not None and ref() is None for ref in each):
            _functions.pop(each, None)
    lanes = _functions.setdefault(world, [])
    lane = next((lane for lane in lanes if lane.begun == lane.ended and lane.broken is None), None)
    if lane is None:
        lanes.append(lane := Lane())
    return lane


class Engines:
    """A cache of engines of one pipeline, by shapes, dtypes and devices of the leaves, and by process groups.

    Memory layouts are not part of the key, because ranks may differ in them. Means have the layout of the first leaves.

    Args:
        lane: The lane of all engines; None for the lanes that functions share.
    """

    def __init__(
        self,
        sync: Sync,
        *,
        donation: Donation,
        learns_order: bool,
        wire: Wire = C10D,
        backend: str | None = None,
        other_groups: Collection[str | None] = (),
        lane: Lane | None = None,
    ) -> None:
        self.last: Engine | None = None
        self._sync, self._wire = sync, wire
        self._groups = sorted({None, *groups_of(sync), *other_groups}, key=str)
        options: Any = {"donation": donation, "learns_order": learns_order, "wire": wire, "backend": backend}
        options["other_groups"] = other_groups
        self._make = partial(Engine, sync, **options)
        self._own_lane = lane
        self._lanes: dict[Any, Lane] = {}  # by the process groups themselves: later groups may reuse names
        self._engines: dict[Any, Engine] = {}
        self._calls: dict[Any, object] = {}

    @contextmanager
    def alone(self, leaves: Leaves, state: State) -> Generator[Engine]:
        """Yield the engine for leaves and a state of these shapes, to one call at a time.

        Raises:
            RuntimeError: Another call for such leaves is running. Its step continues.
        """
        key, call = self._key(leaves, state), object()
        if self._calls.setdefault(key, call) is not call:  # atomic, unlike a lookup followed by an insertion
            raise RuntimeError(
                f"a step of {self._sync!r} for these leaves is already running: its function was called again within "
                "its own call, or by another thread; make another function for that call with fnddp.value_and_grad "
                "or fnddp.jit, and for a thread, over its own process group"
            )
        try:
            yield self._of(key, leaves, state)
        finally:
            del self._calls[key]

    def of(self, leaves: Leaves, state: State) -> Engine:
        """Return the engine for leaves and a state of these shapes.

        Raises:
            ValueError: The state is of other leaves or another pipeline. The next step fails on all ranks.
        """
        return self._of(self._key(leaves, state), leaves, state)

    def _key(self, leaves: Leaves, state: State) -> Any:
        parts, structure = tree.flatten_any(state)
        likes = tuple((path, leaf.shape, leaf.dtype, leaf.device) for path, leaf in leaves.items())
        kinds = tuple((part.shape, part.dtype, part.device) if isinstance(part, Tensor) else int for part in parts)
        world = map(identity, self._groups) if self._wire is C10D else [weakref.ref(self._wire)]
        return likes, structure, kinds, tuple(world)

    def _lane(self, world: tuple[Any, ...]) -> Lane:
        if self._own_lane is not None:
            return self._own_lane
        if world not in self._lanes or self._lanes[world].broken is None:  # a broken lane is kept: it refuses steps
            self._lanes[world] = _lane_of_functions(world)
        return self._lanes[world]

    def _of(self, key: Any, leaves: Leaves, state: State) -> Engine:
        lane = self._lane(key[-1])
        engine = self._engines.pop((key, lane), None)
        if engine is None:
            # empty_like makes a layout in which no two elements share memory. Later gradients are copied into it.
            specs = {path: LeafSpec.of(torch.empty_like(leaf)) for path, leaf in leaves.items()}
            engine = self._make(specs, lane=lane)
            self._require_fitting(engine, key, leaves, state)
            engine.connect()
            if self._own_lane is None and not isinstance(self._wire, Elastic):  # a rank that rejoins has fewer engines
                about = [type(x).__name__ for x in all_in(self._sync)], [x[:3] for x in key[0]]  # without devices
                engine.place, engine.places = _NUMBERS + crc32(repr(about).encode()) % _NUMBERS, lane.places
        self._engines = dict([*self._engines.items(), ((key, lane), engine)][-MAX_PHASES:])
        self.last = engine
        return engine

    def _require_fitting(self, engine: Engine, key: Any, leaves: Leaves, state: State) -> None:
        """Fail the next step on all ranks and raise a ValueError if `state` does not fit `leaves`.

        Checked before the new `engine` connects, because ranks with a correct state may have no such engine.
        """
        initial = over(self._wire, self._sync.init)(leaves)
        initial_key = self._key(leaves, initial)
        if initial_key == key:
            return
        have, want = ({kind[2] for kind in of[2] if kind is not int} for of in (key, initial_key))
        try:
            if have - want or engine.prepare(state) is None:  # without a plan nothing has checked the state yet
                require_like(repr(self._sync), state, initial)
        except Exception as error:
            given = {part.path: part.value for part in parts(state) if isinstance(part.value, int)}
            like = [given.get(p.path, p.value) if isinstance(p.value, int) else p.value for p in parts(initial)]
            if (initial_key, engine.lane) in self._engines:
                for i, counter in self._engines[initial_key, engine.lane].counters.items():  # as on the other ranks
                    like[i] = counter
            fitting = tree.replace_leaves(initial, like)
            self._of(self._key(leaves, fitting), leaves, fitting).fail_next_from(fitting, error)
            raise
