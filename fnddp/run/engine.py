"""An engine runs a pipeline on the same leaves step after step: what all adapters share.

It owns the pipeline's state, keeps a plan for each phase, learns the order in which gradients arrive, and ends every
step on all ranks alike: either all of them have the result, or all of them raise.
"""

import itertools
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.buckets import BUCKET_CAPS
from fnddp.core.state import require_like, shared
from fnddp.core.sync import State, Sync, groups_of, require_weighable
from fnddp.core.tree import Leaves
from fnddp.ir.program import LeafSpec, LoweringError
from fnddp.ir.schedule import require_backend
from fnddp.plan.draft import Donation
from fnddp.plan.lower import Traces, lower_leaves
from fnddp.plan.plan import Plan
from fnddp.run import turns
from fnddp.run.eager import Eager
from fnddp.run.inbox import Inbox
from fnddp.run.log import tell
from fnddp.run.memory import Memory
from fnddp.run.planned import Planned
from fnddp.run.runner import Runner
from fnddp.run.vote import Vote
from fnddp.run.weighing import Weighing
from fnddp.show.meter import Meter, Taken
from fnddp.show.trace import debug_level, observer, observing, profiled
from fnddp.wire.c10d import C10D, with_dedicated_groups
from fnddp.wire.groups import World, identity
from fnddp.wire.protocol import CollectiveError, Elastic, Wire
from fnddp.wire.weights import FAILED, NO_WEIGHT, Weight, scaled

SLOW_SECONDS = 2
"""A lowering that takes longer is told of, since the step that waits for it looks like one that hangs."""

MAX_PHASES = 8  # plans kept: a pipeline has few phases, or it bakes in a counter that never comes back


_numbers = itertools.count()


class Synchronized(NamedTuple):
    """What a step gives: the means by path, and the leaves that arrived on no rank.

    Of a step that an engine skips there are no means; nor of leaves for which the pipeline has no update in this step.
    """

    mean: Leaves
    unused: frozenset[str]

    def of(self, leaves: Iterable[str]) -> dict[str, Tensor | None]:
        """The mean of each of `leaves`, in their order; None for those without an update."""
        return {path: self.mean.get(path) for path in leaves}


class _Prepared(NamedTuple):
    """What runs the steps of one phase."""

    runner: Runner
    vote: Vote | None

    @property
    def plan(self) -> Plan | None:
        return self.runner.plan


class Engine:
    """Runs `sync` on `leaves`: `start`, a `feed` for each gradient, `finish`.

    Args:
        sync: The pipeline.
        leaves: What the gradients are like.
        state: The pipeline's state before the first step; None if `start` is given one.
        donation: What a step may write over.
        bucket_caps: Bytes at which buckets of gradients are closed: the first ones, and the last for all others.
        learns_order: Whether the order in which gradients arrive in the first step, on the first rank, becomes the
            order of all later ones. Not where ranks may join that have not seen it.
        skips_unused: Whether a step in which no gradient arrives on any rank is none: the state stays what it is.
        drops_unused: Whether the leaves that arrive on no rank in the first step are left out of later ones.
        check_unused: Called in each step, on all ranks alike, with the leaves that have arrived on no rank, before
            anything is written over. If it raises, the step has failed on all ranks, and the next one works.
        groups: Process groups whose ranks end a step together, where the pipeline does not say which it reaches.
        beside: Process groups whose ranks end a step together though the pipeline does not reach them.
        wire: Who moves bytes.
        backend: Who runs segments: see `lower`. A pipeline without a plan is then an error.
        traces: Of this pipeline and such leaves, where several engines share them.

    Attributes:
        number: Higher than those of the engines that were made before it.
        positions: Of the leaves, by path.
        is_open: Whether a step has begun and not ended.
        begun: How many steps have begun.
        steps: How many have ended well.
        failed_steps: How many have not.
    """

    def __init__(
        self,
        sync: Sync,
        leaves: Mapping[str, LeafSpec],
        *,
        state: State = None,
        donation: Donation,
        bucket_caps: Sequence[float] = BUCKET_CAPS,
        learns_order: bool,
        skips_unused: bool = False,
        drops_unused: bool = False,
        check_unused: Callable[[frozenset[str]], None] | None = None,
        groups: Collection[str | None] = (),
        beside: Collection[str | None] = (),
        wire: Wire = C10D,
        backend: str | None = None,
        traces: Traces | None = None,
    ) -> None:
        self.sync = sync
        self.number = next(_numbers)
        self.leaves = dict(leaves)
        self.positions = {path: position for position, path in enumerate(self.leaves)}
        self._own = {path for path in leaves if not sync.reduces(path)}
        self.is_open = False
        self.begun = 0
        self.steps = self.failed_steps = 0
        self._state = state
        self._wire = wire
        self._groups = tuple(dict.fromkeys([*groups_of(sync), *(() if sync.groups else groups), *beside]))
        self._knows_groups = sync.groups is not None or bool(groups)
        self._skips_unused, self._drops_unused = skips_unused, drops_unused
        self._check_unused = check_unused
        self._overwrites_early = donation.gradients == "yes"
        world = World(None if wire is C10D else wire)
        self._lower: Any = partial(
            lower_leaves, world=world, bucket_caps=bucket_caps, donation=donation, backend=backend
        )
        self._traces = Traces() if traces is None else traces
        require_backend(backend)
        self._needs_plans = backend is not None
        self._world = world
        self._device = next((leaf.device for leaf in self.leaves.values()), torch.device("cpu"))
        self._memory = Memory()
        self._debug = debug_level()
        self._meter: Meter | None = None
        self._has_plans = True
        self._arrival: list[str] | None = None
        self._dropped: frozenset[str] = frozenset()
        self._arriving: list[str] | None = [] if learns_order and not isinstance(wire, Elastic) else None
        self._prepared: list[_Prepared] = []
        self._current: _Prepared | None = None
        self._structure: Any = None
        self._weight: Weight | None = None
        self._exchanges_weights = False  # at the start of each step, from the first one with weights on
        self._asks = False  # this rank has a weight, in a step that began without such an exchange
        self._weighing: Weighing | None = None
        self._plain_scale = 1.0
        self._scale: float | None = None  # None until the ranks' weights are known
        self._held: list[tuple[str, Tensor, bool]] = []  # gradients that wait for it
        self._has_voted = False
        self._broken: BaseException | None = None
        self._epoch = 0  # of an elastic wire, when this rank was last in step
        self._measured_from = 0
        self._ahead: list[tuple[Engine, int]] = []  # engines and the numbers of those of their steps that go first
        self._behind: list[weakref.ref[Engine]] = []  # and those that wait for this one's

    @property
    def state(self) -> State:
        """The pipeline's state after the last step. It can be kept: later steps do not write over it.

        Set it, on all ranks, to go on from another one.

        Raises:
            RuntimeError: A step is open.
            ValueError: It is of another pipeline or other leaves.
        """
        if self.is_open:  # a step has begun to write over what it was alone to hold
            return tree.map_tensors(Tensor.clone, self._state)
        return shared(self._state)

    @state.setter
    def state(self, state: State) -> None:
        if self.is_open:
            raise RuntimeError("the state cannot be set while a step is open, which would write over it")
        self._state = require_like(repr(self.sync), state, self._state)

    def hand_over(self) -> State:
        """The state, which is the caller's from now on: the next `start` is given one."""
        state, self._state = self._state, None
        return state

    @property
    def plan(self) -> Plan | None:
        """The plan of the current or last step; None before the first, and for a pipeline that cannot be lowered."""
        return None if self._current is None else self._current.plan

    def taken(self) -> Taken | None:
        """What the last step took. Steps are measured from the first call on; None before, and without a plan."""
        if self._meter is None:
            self._meter = Meter()
            for runner, _ in self._prepared:
                if isinstance(runner, Planned):
                    runner.watch(observing(self._debug, self._meter))
            self._measured_from = self.steps
        if self.plan is None or self.steps == self._measured_from:
            return None
        return self._meter.taken(len(self.plan.collectives))

    @property
    def missing(self) -> frozenset[str]:
        """The leaves that have not arrived in this step."""
        held = {path for path, _, _ in self._held}
        return frozenset() if self._current is None else frozenset(self._current.runner.missing) - held

    @property
    def has_sent(self) -> bool:
        """Whether a collective of this step has been issued."""
        return self._current is not None and self._current.runner.has_sent

    def start(self, state: State = None, *, weight: Any = None, scale: float = 1.0) -> None:
        """Begins a step.

        Args:
            state: Where it begins; None for where the last one ended.
            weight: How much this rank's gradients count, a number of samples or tokens: 0 is allowed, not on all ranks.
                None for a step in which all ranks count alike. All ranks give one or none does; anything else, and what
                is no weight, is a ValueError on all ranks, of `feed` or `finish`.
            scale: What gradients are multiplied by on their way in a step without weights.

        Raises:
            RuntimeError: An earlier step has left the ranks out of step.
            ValueError: There is a weight, and the pipeline takes no mean, or a leaf holds no fractions. The step has
                failed on all ranks.
        """
        self.refuse_after_failure()
        if state is not None:
            self._state = state
        with profiled("start"):
            self._begin(scale, None if weight is None else Weight.of(weight))
        if weight is not None:
            try:
                require_weighable(self.sync, {path: leaf.dtype for path, leaf in self.leaves.items()})
            except ValueError as error:
                self.fail(error)
                raise

    def feed(self, path: str, grad: Tensor, *, keep: bool = False) -> None:
        """Hands over a gradient, and carries the step on when a segment is complete, or now and then.

        It never blocks on the CPU, but for weights under way.

        Args:
            path: Of the leaf.
            grad: Its gradient.
            keep: Do not write over it, even if the engine's plans do.

        Raises:
            ValueError: There is no such leaf, it has arrived already, or it is not like the leaf; on all ranks: their
                weights are invalid.
        """
        scale = self._known_scale()
        if scale is None:
            self._held.append((path, grad, keep))
            if self._asks:
                self._take(path, grad, keep, 0.0)
        else:
            self._take(path, grad, keep, scale)

    def _take(self, path: str, grad: Tensor, keep: bool, scale: float) -> None:
        assert self._current is not None
        if self._arriving is not None:
            self._arriving.append(path)
        grad, is_new = (grad, False) if scale == 1 or self._keeps(path) else (scaled(grad, scale), True)
        if self._current.runner.feed(path, grad, keep=keep and not is_new):
            self.poll()

    def _keeps(self, path: str) -> bool:
        return path in self._own and not self._asks  # a step that will run again must not write over it

    def feed_all(self, grads: Leaves, *, keep: bool = False) -> None:
        """`feed` for several leaves, which costs less. What is wrong with one is raised here, or when the step ends."""
        inbox = None if keep else self.inbox
        for path, grad in grads.items():
            if inbox is None or path not in self.positions:
                self.feed(path, grad, keep=keep)
            else:
                inbox.put(self.positions[path], grad)
        self.poll()

    @property
    def inbox(self) -> Inbox | None:
        """Where gradients of this step may be put by the position of their leaf, instead of being fed.

        `poll` must then be called when a segment is complete. None where each gradient asks for more than that.
        """
        if self._scale != 1 or self._arriving is not None or self._current is None:
            return None
        inbox = self._current.runner.inbox
        return inbox if inbox is not None and inbox.is_open else None

    def poll(self) -> None:
        """Carries an open step on as far as it goes without waiting."""
        if self.is_open and self._current is not None and not self.is_held:
            self._current.runner.advance()

    @property
    def is_polled(self) -> bool:
        """Whether the current or last step goes on by itself when a collective is complete, if somebody looks."""
        inbox = None if self._current is None else self._current.runner.inbox
        return inbox is not None and inbox.is_polled

    def poll_now_and_then(self) -> None:
        """`poll`, if some time has passed and something can run."""
        if self.is_open and self._current is not None and self._current.runner.is_due():
            self.poll()

    def catch_up(self) -> None:
        """Carries an open step on until it needs a gradient that is not there, waiting for collectives."""
        if self.is_open and self._current is not None and not self.is_held:
            self._known_scale()  # gradients that wait for weights go first
            self._current.runner.advance(block=True)

    def is_followed_by(self, engine: "Engine") -> None:
        """`engine` sends nothing before the step of this one is over; if that fails, its own is none."""
        self._behind.append(weakref.ref(engine))

    def finish(self) -> Synchronized:
        """Ends the step, on all ranks alike.

        Raises:
            StepFailedError: Another rank has failed in this step.
            ValueError: On all ranks: see `start` for weights.
        """
        with profiled("end"):
            return self._end()

    def run(self, leaves: Leaves, *, keep: bool = False) -> Synchronized:
        """A whole step of gradients that are all there, begun by `start`. If it fails, it has failed on all ranks."""
        try:
            self.feed_all({path: leaves[path] for path in reversed(leaves)}, keep=keep)
            return self.finish()
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Ends an open step on this rank because of `error`, and tells the others, which raise `StepFailedError`.

        Where they cannot be told, because a collective failed or because they have been told that all is well, and on
        CUDA, where they do not wait to be told, this engine refuses further steps. So it does for a pipeline without a
        plan that does not say which ranks it reaches. Does nothing if no step is open.
        """
        if not self.is_open:
            return
        for engine in self._in_front():  # in the order in which other ranks end theirs
            engine.fail(error)
        if not self.is_open:  # it has sent nothing yet
            return
        self._drop_behind()
        self.is_open = False
        self.failed_steps += 1
        assert self._current is not None
        runner, vote = self._current
        self._held = []
        if self._has_voted and runner.plan is None and isinstance(error, FloatingPointError):
            self._broken = None  # of fp16(..., check=True), which raises on all ranks
        elif vote is None or isinstance(error, CollectiveError) or self._has_voted:
            self._broken = error
        else:
            self._broken = error  # until the others know
            try:
                if self._have_valid_weights():
                    runner.abort()
                    vote.cast(frozenset(), failed=True)
                    runner.wait()
                    vote.explain(error)
                    self._broken = None if vote.is_heeded else error
                else:
                    self._broken = None
                runner.forget()
            except RuntimeError as broken:
                self._broken = broken

    def fail_next(self, error: BaseException) -> None:
        """Ends the open step because of `error`, or else begins the next one only to fail it, on all ranks."""
        if not self.is_open:
            self.refuse_after_failure()
            self._begin(1.0, FAILED)
        self.fail(error)

    def refuse_from_now_on(self, error: BaseException) -> None:
        """Refuses further steps because of `error`, which leaves this rank out of step with the others."""
        self._broken = error

    def refuse_after_failure(self) -> None:
        """Raises a RuntimeError if this rank may be out of step with the others.

        They may still wait in the collectives of the step that failed here. Going on would pair those with the next
        step's, and train on wrong numbers without a word.
        """
        if self._broken is not None and not self._is_in_step_again():
            raise RuntimeError(
                f"an earlier step failed on this rank ({type(self._broken).__name__}: {self._broken}), so ranks may "
                "be out of step; restart from a checkpoint, with the process group set up again"
            ) from self._broken

    def _is_in_step_again(self) -> bool:
        if not isinstance(self._wire, Elastic) or self._wire.epoch == self._epoch:
            return False
        if self._current is not None:
            self._current.runner.forget()
        self._broken = None
        return True

    def connect(self) -> None:
        """Connect the groups that steps use, if that is still to be done. All ranks call it where they set up.

        In the first step it could be too late: models that share a backward begin theirs in another order elsewhere.

        Raises:
            CollectiveError: See `with_dedicated_groups`.
        """
        if self._device.type != "cuda":
            with_dedicated_groups(self._wire, self._groups)

    def prepare(self) -> Plan | None:
        """Makes the plan for the state that is there, which the first step would wait for."""
        parts, self._structure = tree.flatten_any(self._state)
        return self._choose(parts).plan

    def expect(self, arrival: list[str]) -> None:
        """Makes `arrival` the order in which gradients are expected from the next step on. The same on all ranks."""
        if self.plan is not None and arrival != list(self.plan.buckets):
            self._arrival, self._prepared = arrival, []
            self._memory.clear()

    def take_over_from(self, before: "Engine") -> bool:
        """Take the place of `before`, with all that its steps have learnt, and return whether it has the same leaves.

        A rank that replaces its engine alone then sends what the others send.
        """
        if list(self.leaves) != list(before.leaves):
            return False
        self.number, self._epoch = before.number, before._epoch
        self._arrival, self._dropped = before._arrival, before._dropped
        self._arriving = self._arriving if before._arriving is not None else None
        self._exchanges_weights = before._exchanges_weights
        return True

    def _begin(self, scale: float, weight: Weight | None) -> None:
        if isinstance(self._wire, Elastic) and self._wire.epoch != self._epoch:
            self._epoch = self._wire.epoch
            self._exchanges_weights = False  # newcomers know of none
        try:
            vote = self._start_runner()
        except BaseException as error:
            self._broken = error if self._has_others() else None  # they may have begun
            raise
        ahead = turns.begin(self, self._wire, () if vote is None else vote.groups)
        self._ahead = [(engine, engine.begun) for engine in ahead]
        self._behind = []
        for engine in ahead:
            engine.is_followed_by(self)
        self._has_voted, self.is_open = False, True
        self.begun += 1
        self._weight, self._weighing, self._held = weight, None, []
        has_weight, has_peers = weight is not None and weight != FAILED, vote is not None and vote.has_peers
        self._asks = has_weight and has_peers and not self._exchanges_weights
        self._plain_scale = scale
        self._scale = None if has_weight or (self._exchanges_weights and has_peers) else scale
        if not self.is_held:
            self._weigh()

    def _start_runner(self) -> Vote | None:
        parts, self._structure = tree.flatten_any(self._state)
        runner, vote = self._choose(parts)
        groups = self._groups if runner.plan is None else runner.plan.phase.groups
        runner.start(parts, {group: self._wire.size(group) for group in groups})
        return vote

    # Weights. A rank cannot know whether the others give one. So the first step with weights begins as one without:
    # ranks that have a weight send zeros, and say so in the vote. If all do, the step is run again. From then on each
    # step begins with an exchange of weights, in which a rank without one says that. So the collectives of ranks match
    # whoever gives a weight, and ranks that never do send nothing for it.

    def _weigh(self) -> None:
        """Start the exchange of weights, if the step has one that has not been started."""
        if self._scale is None and not self._asks and self._weighing is None:
            vote = None if self._current is None else self._current.vote
            wire = self._wire if vote is None else vote.wire
            self._weighing = Weighing(self._weight or NO_WEIGHT, wire, self._groups, self._device)

    def _known_scale(self, *, at_end: bool = False) -> float | None:
        """What gradients are scaled by: wait for weights under way, but not for other engines or the vote.

        Raises:
            ValueError: The weights are invalid, and all ranks raise before any has sent a gradient.
        """
        if self._scale is not None:
            return self._scale
        if self._asks or (self.is_held and not at_end):
            return None
        self._weigh()
        assert self._weighing is not None
        try:
            scale = self._weighing.scale()
        except CollectiveError as error:
            self.fail(error)
            raise
        except ValueError as error:
            self._fail_alike()
            if isinstance(self._wire, Elastic):
                self._wire.report(error)
            raise
        self._scale = self._plain_scale if scale is None else scale
        held, self._held = self._held, []
        for path, grad, keep in held:
            self._take(path, grad, keep, self._scale)
        return self._scale

    def _have_valid_weights(self) -> bool:
        """Whether other ranks go on with a step that fails on this one: they do not if its weights are invalid."""
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
        """Ends a step that began without an exchange of weights, and begins it again with one.

        Raises:
            StepFailedError: Another rank has failed in this step.
            ValueError: On all ranks: not all have a weight.
        """
        assert self._current is not None
        runner, vote = self._current
        assert vote is not None
        absent = self.missing
        runner.drain()
        vote.cast(absent, weight=self._weight)
        self._has_voted = True
        runner.wait()
        try:
            vote.outcome()
        except CollectiveError:
            raise
        except Exception:
            self._fail_alike()
            raise
        runner.forget()
        self._start_runner()
        self._has_voted = self._asks = False
        self._exchanges_weights = True

    def _end(self) -> Synchronized:
        assert self._current is not None
        runner, vote = self._current
        for engine in self._in_front():  # to where all ranks are with the same gradients
            engine.catch_up()
        if self._asks:
            self._ask()
        self._known_scale(at_end=True)
        absent = frozenset(runner.missing)
        runner.drain()
        unused = frozenset[str]()  # without a vote nobody knows: the zeros of this rank count as gradients
        if vote is not None:
            vote.cast(absent)
            self._has_voted = True
        runner.wait()
        if vote is not None:
            try:
                unused = vote.outcome()
                is_none = self._skips_unused and len(unused) == len(self.leaves)
                if self._check_unused is not None and not is_none:
                    self._check_unused(unused)
            except CollectiveError:  # ranks are out of step
                raise
            except Exception:
                self._fail_alike()
                raise
            if is_none:
                self._give_up()
                return Synchronized({}, unused)
        mean, parts = runner.commit()  # only now is anything written over
        self._state = tree.unflatten_any(self._structure, parts)
        self._learn_order(unused)
        self.is_open = False
        self.steps += 1
        return Synchronized(mean, unused)

    @property
    def is_held(self) -> bool:
        """Whether the step of another engine goes first on a process group of this one."""
        return bool(self._ahead) and bool(self._in_front())

    def _in_front(self) -> "list[Engine]":
        return [engine for engine, step in self._ahead if engine.is_open and engine.begun == step]

    def _has_others(self) -> bool:
        return any(self._wire.size(group) > 1 for group in self._groups or {None})

    def _fail_alike(self) -> None:
        """Ends the step here, as all ranks do without another message."""
        self.failed_steps += 1
        self._give_up()
        self._drop_behind()

    def _give_up(self) -> None:
        assert self._current is not None
        self._current.runner.forget()
        self._held = []
        self.is_open = False

    def _drop_behind(self) -> None:
        for entry in self._behind:
            engine = entry()
            if engine is not None and engine.is_open:
                engine._give_up()
        self._behind = []

    def _choose(self, parts: list[Any]) -> _Prepared:
        for prepared in self._prepared:
            if prepared.plan is None or self._is_for(prepared.plan, parts):
                self._current = prepared
                return prepared
        if self._has_plans:
            try:
                begun = perf_counter()
                plan = self._lower(
                    self.sync,
                    self.leaves,
                    self._state,
                    arrival=self._arrival,
                    dropped=self._dropped,
                    traces=self._traces,
                )
                if self._arrival is not None:  # the order is known
                    self._traces.clear()
                self._current = self._prepare(plan)
                _say_if_slow(self.sync, len(self.leaves), perf_counter() - begun)
                self._prepared = [self._current, *self._prepared[: MAX_PHASES - 1]]
                return self._current
            except LoweringError:
                if self._needs_plans:
                    raise
                self._has_plans = False  # in no later phase either: a trace takes longer than a step
        vote = Vote(self.leaves, self._wire, self._groups, self._device) if self._knows_groups else None
        self._current = _Prepared(Eager(self.sync, self.leaves, self._structure, self._world), vote)
        self._prepared = [self._current]
        return self._current

    def _is_for(self, plan: Plan, parts: list[Any]) -> bool:
        """Whether `plan` is one for these numbers, and for groups of these sizes where payloads have rows."""
        numbers = [parts[i] for i in plan.phase.counters] + [self._wire.size(group) for group in plan.phase.groups]
        return plan.phase.holds(numbers) and all(
            self._wire.size(c.group) == c.world_size for c in plan.collectives if not c.kind.is_in_place
        )

    def _prepare(self, plan: Plan) -> _Prepared:
        groups = tuple(dict.fromkeys([*plan.groups, *self._groups]))
        wire = self._wire if self._device.type == "cuda" else with_dedicated_groups(self._wire, groups)
        vote = Vote(plan.leaves, wire, groups, self._device)
        # Autograd hands out gradients that share memory. (DDP's buckets do too, but without overlap.)
        runner = Planned(
            plan,
            wire,
            self._memory,
            clones_shared=self._overwrites_early,
            observer=observer(self._debug, plan, self._meter),
        )
        return _Prepared(runner, vote)

    def _learn_order(self, unused: frozenset[str]) -> None:
        if self._arriving is None:
            return
        arrived = dict.fromkeys(self._arriving)
        expected = [*arrived, *(path for path in reversed(self.leaves) if path not in arrived)]
        self._arriving = None
        if self._drops_unused and unused:
            self._dropped, self._prepared = unused, []
        vote = None if self._current is None else self._current.vote
        if self.plan is not None and vote is not None and vote.has_peers:  # or nobody to agree with
            self.expect(vote.of_first_rank(expected))


class Engines:
    """Engines by what they are for: leaves and a state of given shapes, in a world of given groups.

    Not of given layouts: what ranks agree on does not include those. Means are laid out as the first leaves were.

    Args:
        sync: The pipeline.
        donation: What a step may write over.
        learns_order: See `Engine`.
        wire: Who moves bytes.
        backend: Who runs segments.
    """

    def __init__(
        self, sync: Sync, *, donation: Donation, learns_order: bool, wire: Wire = C10D, backend: str | None = None
    ) -> None:
        self.last: Engine | None = None
        self._sync = sync
        self._groups = sorted({None, *groups_of(sync)}, key=str)
        self._wire = wire
        self._make: Any = partial(
            Engine, sync, donation=donation, learns_order=learns_order, wire=wire, backend=backend
        )
        self._engines: dict[Any, Engine] = {}
        self._calls: dict[Any, object] = {}

    @contextmanager
    def alone(self, leaves: Leaves, state: State) -> Generator[Engine]:
        """Give the engine for such leaves and such a state to one call at a time.

        Raises:
            RuntimeError: A call for such leaves is under way, whose step goes on.
        """
        key, call = self._key(leaves, state), object()
        if self._calls.setdefault(key, call) is not call:  # atomic, as a look and an entry are not
            raise RuntimeError(
                f"a step of {self._sync!r} for such leaves is under way: its function was called again within its own "
                "call, or by another thread; make another one for that with fnddp.value_and_grad or fnddp.jit, for a "
                "thread over a process group of its own"
            )
        try:
            yield self._of(key, leaves)
        finally:
            del self._calls[key]

    def of(self, leaves: Leaves, state: State) -> Engine:
        """The engine for such leaves and such a state."""
        return self._of(self._key(leaves, state), leaves)

    def _key(self, leaves: Leaves, state: State) -> Any:
        parts, structure = tree.flatten_any(state)
        likes = tuple((path, leaf.shape, leaf.dtype, leaf.device) for path, leaf in leaves.items())
        kinds = tuple((part.shape, part.dtype) if isinstance(part, Tensor) else int for part in parts)
        world = [identity(group) for group in self._groups] if self._wire is C10D else []
        return likes, structure, kinds, tuple(world)

    def _of(self, key: Any, leaves: Leaves) -> Engine:
        engine = self._engines.pop(key, None)
        if engine is None:
            engine = self._make(_dense_specs(leaves))
            engine.connect()
        self._engines = dict([*self._engines.items(), (key, engine)][-MAX_PHASES:])
        self.last = engine
        return engine


def _say_if_slow(sync: Sync, leaves: int, seconds: float) -> None:
    if seconds > SLOW_SECONDS:
        tell(
            "lowered %r for %d leaves in %.1f s, which happens once for each phase and order of gradients",
            sync,
            leaves,
            seconds,
        )


def _dense_specs(leaves: Leaves) -> dict[str, LeafSpec]:
    # As torch lays out what is like them: what follows may be copied there, so no two elements share memory.
    return {path: LeafSpec.of(torch.empty_like(leaf)) for path, leaf in leaves.items()}
