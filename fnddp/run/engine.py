"""An engine runs a pipeline on the same leaves step after step: what all adapters share.

It keeps a plan for each phase, learns the order in which gradients arrive, and ends every step on all ranks alike:
either all of them have the result, or all of them raise.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnddp import collectives, tree
from fnddp.plan.ir import LeafSpec
from fnddp.plan.lower import lower_leaves
from fnddp.plan.passes.combine import BUCKET_CAPS
from fnddp.plan.passes.place import Donation
from fnddp.plan.passes.trace import LoweringError
from fnddp.plan.plan import Plan
from fnddp.run import turns
from fnddp.run.eager import Eager, groups_of
from fnddp.run.memory import Buffers, storage_uses
from fnddp.run.planned import CollectiveError, Executor
from fnddp.run.vote import Status, StepFailedError
from fnddp.show.trace import debug_level, make_executor
from fnddp.sync import State, Sync
from fnddp.tree import Leaves

MAX_PHASES = 8  # plans kept: a pipeline has few phases, or it bakes in a counter that never comes back


class Synchronized(NamedTuple):
    """What a step gives: the means by path, the next state, and the leaves that arrived on no rank.

    Of a step that an engine skips there is neither means nor a state.
    """

    mean: Leaves
    state: State
    unused: frozenset[str]


class _NothingArrived(Exception):
    pass


class _Refused(Exception):
    """All ranks have agreed on what makes all of them raise."""


class Engine:
    """Runs `sync` on `leaves`: `start`, a `feed` for each gradient, `finish`.

    Args:
        sync: The pipeline.
        leaves: What the gradients are like.
        donation: What a step may write over.
        bucket_caps: Bytes at which buckets of gradients are closed: the first ones, and the last for all others.
        learns_order: Whether the order in which gradients arrive in the first step, on the first rank, becomes the
            order of all later ones.
        skips_unused: Whether a step in which no gradient arrives on any rank is none: the state stays what it is.
        drops_unused: Whether the leaves that arrive on no rank in the first step are left out of later ones.
        check_unused: Called in each step, on all ranks alike, with the leaves that have arrived on no rank, before
            anything is written over. If it raises, the step has failed on all ranks, and the next one works.
        groups: Process groups whose ranks end a step together, where the pipeline does not say which it reaches.
    """

    def __init__(
        self,
        sync: Sync,
        leaves: Mapping[str, LeafSpec],
        *,
        donation: Donation,
        bucket_caps: Sequence[float] = BUCKET_CAPS,
        learns_order: bool,
        skips_unused: bool = False,
        drops_unused: bool = False,
        check_unused: Callable[[frozenset[str]], None] | None = None,
        groups: Sequence[str | None] | None = None,
    ) -> None:
        self.sync = sync
        self._skips_unused, self._drops_unused = skips_unused, drops_unused
        self._check_unused = check_unused
        self._groups = groups
        self.leaves = dict(leaves)
        self._overwrites_early = donation.gradients == "yes"
        self._lower: Any = partial(lower_leaves, bucket_caps=bucket_caps, donation=donation)
        self._buffers = Buffers()
        self._debug = debug_level()
        self._has_plans = True
        self._arrival: list[str] | None = None
        self._dropped: frozenset[str] = frozenset()
        self._arriving: list[str] | None = [] if learns_order else None
        self._runs: list[tuple[Executor, Status]] = []
        self._running: Executor | Eager | None = None
        self._status: Status | None = None
        self._structure: Any = None
        self._absent: frozenset[str] | None = None  # known once the last gradient has arrived
        self._unused: frozenset[str] = frozenset()
        self._failed = False
        self._broken: BaseException | None = None
        self._ahead: list[Any] = []  # engines whose open steps go first
        self._behind: list[weakref.ref[Engine]] = []  # and those that wait for this one's
        self.is_open = False

    @property
    def plan(self) -> Plan | None:
        """The plan of the current or last step; None before the first, and for a pipeline that cannot be lowered."""
        return self._running.plan if isinstance(self._running, Executor) else None

    def start(self, state: State) -> None:
        """Begins a step from `state`.

        Raises:
            RuntimeError: An earlier step has left the ranks out of step.
        """
        self.refuse_after_failure()
        parts, self._structure = tree.flatten_any(state)
        try:
            self._choose(state, parts)
        except Exception as error:
            self._broken = error if collectives.current_world()[1] > 1 else None  # others may have begun
            raise
        assert self._running is not None
        self._ahead = turns.begin(self, self._status.groups if self._status is not None else ())
        self._behind = []
        for engine in self._ahead:
            engine.is_followed_by(self)
        self._running.start(parts)
        self._absent, self._failed, self.is_open = None, False, True

    def feed(self, path: str, grad: Tensor, *, keep: bool = False) -> None:
        """Hands over a gradient. See `Executor.feed`.

        Args:
            path: Of the leaf.
            grad: Its gradient.
            keep: Do not write over it, even if the engine's plans do.
        """
        assert self._running is not None
        if self.plan is not None and path in self.plan.overwrites:
            # Autograd hands out gradients that share memory. (DDP's buckets do too, but without overlap.)
            shared = self._overwrites_early and storage_uses(grad) > 1
            grad = grad.clone() if keep or shared else grad
        self._running.feed(path, grad, holds=self._holds)
        if self._arriving is not None:
            self._arriving.append(path)

    @property
    def missing(self) -> frozenset[str]:
        """The leaves that have not arrived in this step."""
        return frozenset(self._running.missing) if self._running is not None else frozenset()

    @property
    def has_sent(self) -> bool:
        """Whether a collective of this step has been issued."""
        return isinstance(self._running, Executor) and self._running.has_launched_some

    def poll(self) -> None:
        """Carries an open step on as far as it goes without waiting."""
        if self.is_open and isinstance(self._running, Executor) and not self._holds:
            self._running.poll()

    @property
    def _holds(self) -> bool:
        """Whether another engine's step goes first on a process group of this one."""
        return bool(self._ahead) and any(engine.is_open for engine in self._ahead)

    def is_followed_by(self, engine: "Engine") -> None:
        """`engine` sends nothing before the step of this one is over; if that fails, its own is none."""
        self._behind.append(weakref.ref(engine))

    def _drop_behind(self) -> None:
        for entry in self._behind:
            engine = entry()
            if engine is not None and engine.is_open and engine._running is not None:
                engine._running.forget()
                engine.is_open = False
        self._behind = []

    def catch_up(self) -> None:
        """Carries an open step on until it needs a gradient that is not there, waiting for collectives."""
        if self.is_open and isinstance(self._running, Executor) and not self._holds:
            self._running.poll(block=True)

    def finish(self) -> Synchronized:
        """Ends the step, on all ranks alike.

        Raises:
            StepFailedError: Another rank has failed in this step.
        """
        running = self._running
        assert running is not None
        for engine in self._ahead:  # to where all ranks are with the same gradients
            engine.catch_up()
        self._absent = frozenset(running.missing)
        if running.has_launched_all:
            self._send_status()
        # Without a status nobody knows what other ranks have used: the zeros of this one count as a gradient.
        self._unused = self._absent if self._status is not None and not self._status.has_peers else frozenset()
        try:
            mean, parts = running.finish()
        except (_NothingArrived, _Refused) as stop:
            running.abort()
            self.is_open = False
            if stop.__cause__ is not None:
                self._drop_behind()
                raise stop.__cause__ from None
            return Synchronized({}, None, self._unused)
        except StepFailedError:
            running.abort()
            self.is_open = False  # the step is over here too
            self._drop_behind()
            raise
        self.is_open = False
        self._learn_order()
        return Synchronized(mean, tree.unflatten_any(self._structure, parts), self._unused)

    def fail(self, error: BaseException) -> None:
        """Ends an open step on this rank because of `error`, and tells the others, which raise `StepFailedError`.

        Where they cannot be told, because a collective failed or because they have been told that all is well, and on
        CUDA, where they do not wait to be told, this engine refuses further steps. So it does for a pipeline without a
        plan that does not say which ranks it reaches. Does nothing if no step is open.
        """
        if not self.is_open:
            return
        for engine in self._ahead:  # in the order in which other ranks end theirs
            engine.fail(error)
        if not self.is_open:  # it has sent nothing yet
            return
        self._drop_behind()
        self.is_open = False
        running, status = self._running, self._status
        assert running is not None
        said_all_is_well = self._absent is not None and running.has_launched_all
        if said_all_is_well and isinstance(running, Eager) and isinstance(error, FloatingPointError):
            self._broken = None  # of fp16(..., check=True), which raises on all ranks
        elif status is None or isinstance(error, CollectiveError) or said_all_is_well:
            self._broken = error
        else:
            self._absent, self._failed = frozenset(), True
            try:
                if running.has_launched_all:
                    self._send_status()
                running.abort()
                status.fail(error)
                self._broken = None if status.is_heeded else error
            except RuntimeError as broken:
                self._broken = broken

    def refuse_from_now_on(self, error: BaseException) -> None:
        """Refuses further steps because of `error`, which leaves this rank out of step with the others."""
        self._broken = error

    def refuse_after_failure(self) -> None:
        """Raises a RuntimeError if this rank may be out of step with the others.

        They may still wait in the collectives of the step that failed here. Going on would pair those with the next
        step's, and train on wrong numbers without a word.
        """
        if self._broken is not None:
            raise RuntimeError(
                f"an earlier step failed on this rank ({type(self._broken).__name__}: {self._broken}), so ranks may "
                "be out of step; restart from a checkpoint, with the process group set up again"
            ) from self._broken

    def _send_status(self) -> None:
        # Not before finish: until then this rank may still fail.
        if self._absent is not None and self._status is not None:
            self._status.send(self._absent, self._failed)

    def _agree(self) -> None:
        if self._absent is not None and self._status is not None:
            self._unused = self._status.agree(self._absent)
            if self._skips_unused and len(self._unused) == len(self.leaves):
                raise _NothingArrived
            if self._check_unused is not None:
                try:
                    self._check_unused(self._unused)
                except Exception as error:
                    raise _Refused from error

    def _choose(self, state: State, parts: list[Any]) -> None:
        for executor, status in self._runs:
            if executor.plan.holds([parts[i] for i in executor.plan.counters]):
                self._running, self._status = executor, status
                return
        if self._has_plans:
            try:
                self._run(self._lower(self.sync, self.leaves, state, arrival=self._arrival, dropped=self._dropped))
                return
            except LoweringError:
                self._has_plans = False  # in no later phase either: a trace takes longer than a step
        known = groups_of(self.sync) if self.leaves else []
        groups = self._groups if known is None else known
        device = next((leaf.device for leaf in self.leaves.values()), torch.device("cpu"))
        self._running = Eager(self.sync, self.leaves, self._structure, self._agree)
        self._status = None if groups is None else Status(self.leaves, groups, device)

    def _run(self, plan: Plan) -> None:
        device = next((c.device for c in plan.collectives), torch.device("cpu"))
        self._status = Status(plan.leaves, [c.group for c in plan.collectives], device)
        self._running = make_executor(self._debug, plan, self._buffers, self._send_status, self._agree)
        self._runs = [(self._running, self._status), *self._runs[: MAX_PHASES - 1]]

    def _learn_order(self) -> None:
        if self._arriving is None:
            return
        arrived = dict.fromkeys(self._arriving)
        expected = [*arrived, *(path for path in reversed(self.leaves) if path not in arrived)]
        self._arriving = None
        if self._drops_unused and self._unused:
            self._dropped, self._runs = self._unused, []
        if self.plan is not None and self._status is not None and self._status.has_peers:  # or nobody to agree with
            self.expect(self._status.of_first_rank(expected))

    def expect(self, arrival: list[str]) -> None:
        """Makes `arrival` the order in which gradients are expected from the next step on. The same on all ranks."""
        if self.plan is not None and arrival != list(self.plan.buckets):
            self._arrival, self._runs = arrival, []
            self._buffers.clear()


class Engines:
    """Engines by what they are for: leaves and a state of given shapes, in a world of a given size.

    Not of given layouts: what ranks agree on does not include those. Means are laid out as the first leaves were.

    Args:
        sync: The pipeline.
        donation: What a step may write over.
        learns_order: See `Engine`.
    """

    def __init__(self, sync: Sync, *, donation: Donation, learns_order: bool) -> None:
        self.last: Engine | None = None
        self._make: Any = partial(Engine, sync, donation=donation, learns_order=learns_order)
        self._engines: dict[Any, Engine] = {}

    def of(self, leaves: Leaves, state: State) -> Engine:
        """The engine for such leaves and such a state."""
        parts, structure = tree.flatten_any(state)
        likes = tuple((path, leaf.shape, leaf.dtype, leaf.device) for path, leaf in leaves.items())
        kinds = tuple((part.shape, part.dtype) if isinstance(part, Tensor) else int for part in parts)
        key = (likes, structure, kinds, collectives.current_world())
        engine = self._engines.pop(key, None) or self._make(_dense_specs(leaves))
        self._engines = dict([*self._engines.items(), (key, engine)][-MAX_PHASES:])
        self.last = engine
        return engine


def _dense_specs(leaves: Leaves) -> dict[str, LeafSpec]:
    # As torch lays out what is like them: what follows may be copied there, so no two elements share memory.
    return {path: LeafSpec.of(torch.empty_like(leaf)) for path, leaf in leaves.items()}
