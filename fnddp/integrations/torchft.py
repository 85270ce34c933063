"""torchft: any pipeline between replicas that may die and come back. Needs `pip install 'fnddp[torchft]'`.

The ranks of a step are the quorum of a torchft manager. Losing a rank does not end the other processes.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fnddp.adapters.module import wrapper
from fnddp.core import state as states
from fnddp.core.agreement import RankMismatchError, description, first_difference
from fnddp.core.parse import pipeline_of
from fnddp.core.state import describe
from fnddp.core.sync import REPLICATED, State, Sync, all_in, groups_of
from fnddp.core.tree import Leaves
from fnddp.outer.attached import Attached
from fnddp.outer.attached import attach as attach_outer
from fnddp.outer.contract import Outer, outer_of
from fnddp.outer.shards import local as locally
from fnddp.reducers.all_reduce import allreduce
from fnddp.run.choose import AUTO
from fnddp.torch_private import without_modes
from fnddp.transforms.memory import ef21
from fnddp.wire.control import gather_over
from fnddp.wire.groups import World, within
from fnddp.wire.kinds import ALL_GATHER, ALL_REDUCE, REDUCE_OP, REDUCE_SCATTER, Kind, Work
from fnddp.wire.protocol import Elastic

if TYPE_CHECKING:
    from torchft import Manager

_c10d: Any = dist.distributed_c10d
_KEY = "fnddp.sync_state"


class QuorumError(RuntimeError):
    """There is no quorum: the lighthouse does not answer, or too few replicas joined in time."""


class ManagerWire(Elastic):
    """Wire between the replicas of a torchft manager, for any pipeline.

    Means are over the participants of the quorum. If a collective fails, because a replica died or is too slow, it does
    not raise: its error is reported to the manager, its result is zero, later collectives of the step are not started,
    and `manager.should_commit()` is False. `value_and_grad` and `jit` end steps by a vote; they raise
    `CollectiveError`, and run again in the next quorum. A caller of the pipeline itself must ask `should_commit()`.
    Errors that these calls raise, of this replica or of another one, are also reported to the manager.

    The wrong choice for a module: `DistributedDataParallel` of this package also rolls back and heals the pipeline's
    state. The wrong choice inside a replica: its ranks use torch.distributed.

    Args:
        manager: One for each rank of a replica, with `use_async_quorum=False` and the usual world size mode.

    Raises:
        ValueError: The manager's quorum is asynchronous, or it has spares. In a collective: a group is named, or the
            manager's process group does not support the collective.

    Source: `torchft/manager.py`. Deviation: torchft sums before it divides, and so overflows a 16-bit wire.

    >>> import torch
    >>> from torchft import Manager, ProcessGroupGloo
    >>> from torchft.coordination import LighthouseServer
    >>> from fnddp import jit
    >>> lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    >>> store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    >>> manager = Manager(
    ...     pg=ProcessGroupGloo(), load_state_dict=None, state_dict=None, min_replica_size=1, use_async_quorum=False,
    ...     rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1",
    ...     lighthouse_addr=f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}",
    ... )
    >>> step = jit(allreduce, wire=ManagerWire(manager))
    >>> manager.start_quorum(allow_heal=False)
    >>> mean, state = step({"w": torch.ones(2)}, ())
    >>> mean, manager.should_commit()
    ({'w': tensor([1., 1.])}, True)
    >>> manager.shutdown(); lighthouse.shutdown()
    """

    def __init__(self, manager: "Manager") -> None:
        self._manager: Any = manager
        self._lost: dict[int, Exception] = {}  # by epoch
        self._reported: BaseException | None = None
        self._refused: Exception | None = None
        if self._manager._use_async_quorum:
            raise ValueError(
                "ManagerWire: the manager's quorum is asynchronous, so a replica that heals would take part in a "
                "step with its old state; pass use_async_quorum=False to Manager"
            )
        if self._manager._replica_world_size_mode.name != "DYNAMIC":
            raise ValueError(
                "ManagerWire: the manager has spares, whose gradients the mean would include; remove world_size_mode"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ManagerWire) and other._manager is self._manager

    def __hash__(self) -> int:
        return hash((ManagerWire, id(self._manager)))

    @property
    def epoch(self) -> int:
        """Number of the quorum: torchft forms a new quorum when members change, and after a failed step."""
        return self._manager._quorum_id

    def size(self, group: str | None) -> int:
        """Return the number of replicas in this step; before the first quorum, for early plans, the minimum."""
        _require_unnamed(group)
        with without_modes():  # torchft's calls are operations to a profiler, and so to a trace
            return self._manager.num_participants() or self._manager._min_replica_size

    def rank(self, group: str | None) -> int:
        _require_unnamed(group)
        with without_modes():
            return self._manager.participating_rank() or 0

    def start(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: str | None) -> Work:
        _require_unnamed(group)
        self.require([kind])
        return _Collective(self, self._started(kind, send, receive, op), receive, raises=False)

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, Work]:
        gathered = flags.new_empty((self.size(group), *flags.shape))
        work = self._started(ALL_GATHER, flags.reshape(-1), gathered, None)
        return gathered, _Collective(self, work, gathered, raises=True)

    def report(self, error: BaseException) -> None:
        if self._manager.errored() is None:
            self._manager.report_error(error)
            self._reported = error

    def hang_up(self) -> None:
        """Abort the collectives that other ranks wait for: in a ring, not all are neighbours of the lost rank."""
        self._manager._pg.abort()

    def join(self, start: Callable[[], None]) -> None:
        """Call `start`, which starts a quorum. After an error of this replica leave for good, and raise it each time.

        This replica then lacks the others' state, but would count as up to date.
        """
        if self._refused is not None:
            raise self._refused
        try:
            start()
        except Exception as error:
            asked = self._manager._quorum_future
            if asked is not None and asked.exception() is error:
                raise QuorumError(f"replica {self._manager._replica_id!r} is in no quorum: {error}") from error
            self._refused = error
            self.hang_up()
            self._manager.shutdown(wait=False)  # the lighthouse waits for replicas that still send heartbeats
            raise

    @property
    def lost(self) -> Exception | None:
        return self._lost.get(self.epoch)

    def lose(self, error: Exception) -> None:
        """Record that a collective has failed with `error`."""
        if self.lost is None:
            self._lost = {self.epoch: error}
        self.report(error)

    def require(self, kinds: Iterable[Kind]) -> None:
        """Raise a ValueError unless the manager's process group supports `kinds` of collectives."""
        name: str = self._manager._pg.getBackendName()
        if REDUCE_SCATTER in kinds and name.startswith("torchft") and name.endswith("gloo"):
            raise ValueError(
                f"ManagerWire: torchft's process group {name!r} has no reduce_scatter; use a pipeline that needs "
                "none, such as two_shot, or a process group of another backend"
            )

    def _started(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None) -> Any:
        known = self._manager.errored()
        if known is not None and known.original_exception is not self._reported and self.lost is None:
            # A replica that could not heal, or that reports an error, is kept out of all means.
            self.lose(known.original_exception)
            self.hang_up()
        if self.lost is not None:
            return None
        try:
            return _start(self._manager._pg, kind, send, receive.view(-1), op)
        except Exception as error:  # an AssertionError where the group could not be set up: a rank died meanwhile
            self.lose(error)
            return None


class _Collective:
    """A collective that raises, or returns zeros, if any collective of its step has failed."""

    def __init__(self, wire: ManagerWire, work: Any, receive: Tensor, *, raises: bool) -> None:
        self._wire, self._work, self._receive, self._raises = wire, work, receive, raises

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> bool:
        try:
            if self._work is not None:  # in a step that has failed, too: the backend may still write
                self._work.wait()
        except RuntimeError as error:
            self._wire.lose(error)
        if self._wire.lost is not None:
            if self._raises:
                self._work = None
                self._wire.hang_up()
                raise RuntimeError(str(self._wire.lost)) from self._wire.lost
            self._receive.zero_()
        return True


def _start(pg: Any, kind: Kind, send: Tensor, receive: Tensor, op: str | None) -> Any:
    # Methods that torchft's process groups have; torch.distributed's functions call others.
    if kind is ALL_GATHER:
        # Not allgather_into_tensor_coalesced: it can crash gloo, see fnddp/wire/c10d.py.
        return pg.allgather([list(receive.view(-1, send.numel()))], [send], _c10d.AllgatherOptions())
    if kind not in (ALL_REDUCE, REDUCE_SCATTER):
        return pg.alltoall_base(receive, send.view(-1), [], [], _c10d.AllToAllOptions())
    options = _c10d.AllreduceOptions() if kind is ALL_REDUCE else _c10d.ReduceScatterOptions()
    options.reduceOp = REDUCE_OP[op or "sum"]
    if kind is ALL_REDUCE:
        return pg.allreduce([send], options)
    return pg.reduce_scatter_tensor_coalesced([receive], [send.view(-1)], options)


def _require_unnamed(group: str | None) -> None:
    if group is not None:
        raise ValueError(
            f"ManagerWire: the pipeline reduces over process group {group!r}, but a manager only has the group of the "
            "replicas; remove group"
        )


class DistributedDataParallel(wrapper.DistributedDataParallel):
    """torchft's class with any pipeline; training continues when a replica dies within a step.

    Use it as torchft's: call `manager.start_quorum()` before a step and `manager.should_commit()` after its backward,
    as `torchft.Optimizer(manager, optimizer)` does in `zero_grad` and `step`. It hooks into both calls of the manager.

    If a replica dies, is slower than the timeouts, or raises in its backward, the step ends on the others without an
    error: `should_commit()` is False, and gradients, parameters, optimizer and the pipeline's state are unchanged. The
    next step runs on the remaining replicas. A replica that joins gets the pipeline's replicated state from another
    one, along with the manager's `state_dict` (it must contain the model's parameters and the optimizer). Local state,
    such as residuals, starts from zero.

    The wrong choice if replicas never die: each step asks for a quorum, and keeps the old state until it is committed.

    Args:
        manager: With `use_async_quorum=False`. Its `state_dict` and `load_state_dict` are for model and optimizer.
        module: The module to wrap. Replicas may begin with different parameters: the manager makes them equal.
        sync: The pipeline, or its text. It must not name a process group.
        **kwargs: Arguments of `fnddp.DistributedDataParallel`, except groups and initial broadcasts: each replica keeps
            its own buffers, as in torchft.

    Raises:
        ValueError: The manager does not fit (see `ManagerWire`), or the pipeline: it is "auto", it names a process
            group, its state is for a fixed number of ranks, or the manager's process group lacks a collective.
        TypeError: `kwargs` has an argument that a manager decides; a parameter is a DTensor.
        RankMismatchError: In `start_quorum`, on a replica that joins with another pipeline or other parameters. It
            leaves, as after any error while it loads the other replicas' state: its manager is shut down, each further
            `start_quorum` raises the error again, and the others discard one step and continue without it.
        QuorumError: In `start_quorum`: there is no quorum.

    Source: `torchft/ddp.py`. Deviations: collectives overlap with backward; no gradient is written where a step fails.

    >>> import torch
    >>> from torchft import Manager, Optimizer, ProcessGroupGloo
    >>> from torchft.coordination import LighthouseServer
    >>> from fnddp import bf16, error_feedback
    >>> lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    >>> store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    >>> net = torch.nn.Linear(2, 1)
    >>> manager = Manager(
    ...     pg=ProcessGroupGloo(), load_state_dict=net.load_state_dict, state_dict=net.state_dict,
    ...     min_replica_size=1, use_async_quorum=False, rank=0, world_size=1, hostname="127.0.0.1",
    ...     store_addr="127.0.0.1", store_port=store.port,
    ...     lighthouse_addr=f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}",
    ... )
    >>> model = DistributedDataParallel(manager, net, sync=error_feedback(bf16(allreduce)))
    >>> optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.1))
    >>> optimizer.zero_grad()
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> manager.current_step(), net.weight.grad
    (1, tensor([[1., 1.]]))
    >>> manager.shutdown(); lighthouse.shutdown()
    """

    def __init__(self, manager: "Manager", module: nn.Module, *, sync: Sync | str = allreduce, **kwargs: Any) -> None:
        decided = kwargs.keys() & {"process_group", "device_mesh", "init_sync", "forward_sync_buffers", "wire"}
        if decided:
            raise TypeError(f"torchft's manager decides {', '.join(sorted(decided))}; remove that argument")
        sharded = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
        if sharded:
            raise TypeError(
                f"parameter {sharded[0]!r} is a DTensor, and FSDP reduces its gradient; pass the local shards of all "
                "gradients to fnddp.jit(sync, wire=ManagerWire(manager))"
            )
        kwargs.pop("broadcast_buffers", None)
        wire = ManagerWire(manager)
        super().__init__(module, init_sync=False, forward_sync_buffers=False, sync=sync, wire=wire, **kwargs)
        self.manager: Any = manager
        self._replicas, self._steps.awaits_commit = wire, True
        plan = self._engine.prepare()  # now: otherwise the others would wait for it in this replica's first step
        if plan is not None:
            self._replicas.require([collective.kind for collective in plan.collectives])
        # At the start of a step that is not committed yet: the pipeline's state, and the engine's number of steps.
        self._before: tuple[State, int] | None = None
        self._epoch: int | None = None  # of the last quorum in which members agreed
        key = f"{_KEY}.{sum(known.startswith(_KEY) for known in self.manager._user_state_dicts)}"
        manager.register_state_dict_fn(key, self._heal, self._shared)
        # Loaded first, so that it compares parameters before the caller's function fails on different ones.
        loads = self.manager._load_state_dict_fns
        loads |= {other: loads.pop(other) for other in [*loads] if not other.startswith(_KEY)}
        # A manager has no hooks.
        self.manager.start_quorum = partial(self._start_quorum, manager.start_quorum)
        self.manager.should_commit = partial(self._should_commit, manager.should_commit)

    def _agreed(self, sync: Sync | str, *, verify: bool, copied: Mapping[str, Tensor] = {}) -> tuple[Sync, State]:
        if sync != AUTO:
            _require_elastic(pipeline_of("DistributedDataParallel: sync", sync), self._trained.gradients())
        return super()._agreed(sync, verify=verify, copied=copied)

    def _start_quorum(self, start: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if all(key.startswith(_KEY) for key in self.manager._user_state_dicts):
            raise ValueError(
                "the manager has no state_dict, so a replica that joins would get no parameters; pass state_dict and "
                "load_state_dict, for the model and the optimizer, to Manager"
            )
        if self._before is not None:
            self._leave_out(self._before[1])

        def start_and_agree() -> None:
            start(*args, **kwargs)
            if self._replicas.epoch != self._epoch:
                self._agree()

        self._replicas.join(start_and_agree)
        self._before = self.sync_state, self._engine.lane.begun

    def _leave_out(self, begun: int) -> None:
        """End a step that the script left without `should_commit`, in the quorum where the others wait for it."""
        error = RuntimeError("this replica has not finished its backward, or never called it")
        if sum(key.startswith(_KEY) for key in self.manager._user_state_dicts) > 1:
            self._replicas.lose(error)  # the others may wait in a step of any of its models
            self._replicas.hang_up()
        elif self._engine.lane.begun == begun:
            self._steps.backward.fail_next(error)
        self._steps.backward.fail(error)
        self.manager.should_commit()  # False: this forms a new quorum, and notifies this replica's other ranks

    def _should_commit(self, ask: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        if self._engine.is_open:
            self._steps.backward.fail(RuntimeError("this replica's backward did not finish"))
        is_committed = False
        try:
            is_committed = ask(*args, **kwargs)
        finally:
            if self._before is not None:
                self._steps.settle_on(is_committed)
                if not is_committed:
                    self.sync_state, _ = self._before
            self._before = None
        return is_committed

    def _agree(self) -> None:
        """Compare pipelines, leaves and state among the members of a new quorum; raise on members that differ.

        The reference is the first member that agreed in an earlier quorum, or else the first member.
        """
        mine = description(self.sync, self._trained.gradients(), self.sync_state)
        try:
            everyone = gather_over(self._replicas, (self._epoch is None, mine), None, self.device)
        except RuntimeError as error:  # this step fails, and the next one has another quorum
            self._replicas.report(error)
            return
        if all(other == mine for _, other in everyone):
            self._epoch = self._replicas.epoch
            return
        differs = first_difference([other for _, other in everyone])
        error = RankMismatchError(f"among the replicas of quorum {self._replicas.epoch}, {differs}")
        _, taken = min(everyone, key=lambda each: each[0])  # the first of several
        if mine != taken:
            raise error
        self._replicas.lose(error)  # the next quorum excludes replicas that differ

    def _shared(self) -> dict[str, Any]:
        """Return the part of the state that this replica sends to a replica that joins."""
        return {
            "description": description(self.sync, self._trained.gradients(), None),
            "state": {part.key: part.value for part in states.parts(self.sync_state) if part.kind == REPLICATED},
        }

    def _heal(self, theirs: dict[str, Any]) -> None:
        grads = self._trained.gradients()
        mine = description(self.sync, grads, None)
        if mine != theirs["description"]:
            differs = first_difference([theirs["description"], mine])
            raise RankMismatchError(f"this replica (rank 1) cannot heal from another one (rank 0): {differs}")
        fresh = self.sync.init(grads)
        self.sync_state = states.load_state_dict(fresh, {**states.state_dict(fresh), **theirs["state"]})


def attach(
    manager: "Manager", model: nn.Module, optimizer: torch.optim.Optimizer | None, outer: Outer | str
) -> Attached:
    """Run `outer` between torchft's replicas. Each trains alone between exchanges, and may be late or lost.

    An exchange is between the replicas of a quorum. The lighthouse waits `join_timeout_ms` for late replicas, and then
    continues without them, if more than half of the live replicas have joined. A late replica joins the next exchange:
    its parameters move as far as the anchor has moved in the meantime. So its difference to the anchor counts there; if
    the pipeline is `weighted`, with all tokens that `Attached.count` counted since its last exchange. A new replica
    begins at the anchor of the others, without tokens, and keeps the state of its optimizer. If a replica is lost in an
    exchange, the exchange is discarded, and the others repeat it in their next step. After an exchange, the anchors of
    all replicas that committed it are bitwise equal.

    The wrong choice with a delay if several fragments are open at a time, because a manager has one quorum.

    Args:
        manager: As for `ManagerWire`. It needs no `state_dict`. With `init_sync=False` replicas must begin with equal
            parameters; otherwise replicas with other parameters than the first one begin at its anchor.
        model: A plain module, or one that FSDP2 has sharded over the ranks of this replica.
        optimizer: See `fnddp.outer.attach`.
        outer: The outer step, or its text.

    Raises:
        ValueError, TypeError: See `ManagerWire` and `fnddp.outer.attach`; or the manager has an outer step already.
        RankMismatchError: In an exchange, on a replica that joins with another outer step or other parameters. It
            leaves for good, as after any error while it loads the other replicas' state.
        QuorumError: In an exchange: there is no quorum.

    Source: Douillard et al., "Decoupled DiLoCo", arXiv 2604.21428: it merges the replicas that arrive within a grace
    period, weighted by their tokens. Deviation: a late replica waits for the others' next exchange.
    """
    step = outer_of("torchft.attach: outer", outer)
    replicas, has_committed = ManagerWire(manager), False
    key, known = f"{_KEY}.outer", manager._user_state_dicts  # pyright: ignore[reportPrivateUsage]
    if key in known:
        raise ValueError("this manager already has an outer step, which takes its quorums: use another manager")

    def commit() -> bool:
        nonlocal has_committed
        is_committed = manager.should_commit()
        has_committed |= is_committed
        return is_committed

    def prepare() -> None:
        replicas.join(manager.start_quorum)

    attached = attach_outer(model, optimizer, step, wire=replicas, init_sync=False, prepare=prepare, commit=commit)
    local = {name: locally(p) for name, p in model.named_parameters() if p.requires_grad}
    about = description(step, local, None)

    def give() -> dict[str, Any]:
        anchored = step.anchors(attached.state).keys()  # with the name of their tree, where there are several
        return {
            "description": about,
            "state": attached.replicated_state_dict(),
            "parameters": {name: p for name, p in local.items() if not {name, f"params.{name}"} & anchored},
        }

    def take(theirs: dict[str, Any]) -> None:
        if theirs["description"] != about:
            differs = first_difference([theirs["description"], about])
            raise RankMismatchError(f"this replica (rank 1) cannot join another one (rank 0): {differs}")
        is_anchored = not theirs["parameters"]
        if has_committed or (is_anchored and _begins_equally(step, attached.state, theirs["state"])):
            attached.rejoin(theirs["state"])
            return
        attached.join(theirs["state"])
        for name, parameter in theirs["parameters"].items():
            local[name].copy_(parameter)

    manager.register_state_dict_fn(key, take, give)
    return attached


def _begins_equally(step: Outer, state: State, theirs: dict[str, Any]) -> bool:
    """Return whether this replica trained from another one's anchor, found in that one's replicated state `theirs`."""
    mine = step.anchors(state)
    others = step.anchors(states.load_state_dict(state, {**states.state_dict(state), **theirs}))
    return all(torch.equal(leaf, others[path]) for path, leaf in mine.items())


def _require_elastic(sync: Sync, grads: Leaves) -> None:
    for group in groups_of(sync):
        _require_unnamed(group)
    if any(isinstance(each, ef21) for each in all_in(sync)):
        raise ValueError(
            f"{sync!r}: ef21 stores the mean of all replicas' estimates, and that would be wrong once a replica "
            "leaves; use error_feedback"
        )
    two, three = [_described(sync, grads, n) for n in (2, 3)]
    if two != three:
        path = next(path for path in [*two, *three] if two.get(path) != three.get(path))
        raise ValueError(
            f"{sync!r}: {path!r} of its state is {two.get(path)} for two replicas and {three.get(path)} for three, so "
            "it cannot continue when one leaves; use one with a fixed shape (two_shot without server_memory)"
        )


def _described(sync: Sync, grads: Leaves, replicas: int) -> dict[str, str]:
    with within(World(size=replicas)):
        return {part.path: describe(part.value) for part in states.parts(sync.init(grads))}
