"""torchft's two wrapped modules, over any pipeline."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

from fnddp.adapters.module import wrapper
from fnddp.core import state as states
from fnddp.core.agreement import RankMismatchError, description, first_difference
from fnddp.core.state import describe
from fnddp.core.sync import REPLICATED, State, Sync, all_in, groups_of
from fnddp.core.tree import Leaves
from fnddp.integrations.torchft.wire import ManagerWire, QuorumError
from fnddp.memory import ef21
from fnddp.reducers.all_reduce import allreduce
from fnddp.run.engine import Engine
from fnddp.wire.control import gather_over
from fnddp.wire.groups import World, within

if TYPE_CHECKING:
    from torchft import Manager

_KEY = "fnddp.sync_state"
_BYTE = 2.0**-20  # in MiB


class DistributedDataParallel(wrapper.DistributedDataParallel):
    """torchft's class with any pipeline, which survives a replica that dies within a step.

    Use it as torchft's: `manager.start_quorum()` before a step and `manager.should_commit()` after its backward, as
    `torchft.Optimizer(manager, optimizer)` does in `zero_grad` and `step`. It follows both calls of the manager.

    If a replica dies, is slower than the timeouts, or raises in its backward, the step ends for the others: nothing
    raises there, `should_commit()` is False, and gradients, parameters, optimizer and the pipeline's state are as
    before. The next step runs on those that are left. A replica that joins gets the pipeline's replicated state from
    another one, along with the manager's `state_dict` (which must hold the model's parameters and the optimizer); its
    local part, such as residuals, begins at zero.

    The wrong choice where nothing dies: each step asks for a quorum, and keeps the old state until it is committed.

    Args:
        manager: With `use_async_quorum=False`. Its `state_dict` and `load_state_dict` are for model and optimizer.
        module: What to wrap. Replicas may begin with different parameters: the manager makes them equal.
        sync: The pipeline. It names no process group.
        **kwargs: As of `fnddp.DistributedDataParallel`, except groups and initial broadcasts: each replica keeps its
            own buffers, as in torchft.

    Attributes:
        manager: The manager.

    Raises:
        ValueError: The manager does not fit (see `ManagerWire`), or the pipeline: it names a process group, its
            state is one for a fixed number of ranks, or it needs a collective that the manager's process group lacks.
        TypeError: `kwargs` has an argument that a manager decides; a parameter is a DTensor.
        RankMismatchError: In `start_quorum`, on a replica that joins with another pipeline or other parameters.
        QuorumError: In `start_quorum`: there is no quorum.

    Source: `torchft/ddp.py`. Deviations: collectives overlap with backward; no gradient is written where a step fails.

    >>> import torch
    >>> import torch.distributed as dist
    >>> from torchft import Manager, Optimizer, ProcessGroupGloo
    >>> from torchft.coordination import LighthouseServer
    >>> from fnddp import error_feedback, fp16
    >>> lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    >>> store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    >>> net = torch.nn.Linear(2, 1)
    >>> manager = Manager(
    ...     pg=ProcessGroupGloo(), load_state_dict=net.load_state_dict, state_dict=net.state_dict,
    ...     min_replica_size=1, use_async_quorum=False, rank=0, world_size=1, hostname="127.0.0.1",
    ...     store_addr="127.0.0.1", store_port=store.port,
    ...     lighthouse_addr=f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}",
    ... )
    >>> model = DistributedDataParallel(manager, net, sync=error_feedback(fp16(allreduce)))
    >>> optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.1))
    >>> optimizer.zero_grad()
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> manager.current_step(), net.weight.grad
    (1, tensor([[1., 1.]]))
    >>> manager.shutdown(); lighthouse.shutdown()
    """

    def __init__(self, manager: "Manager", module: nn.Module, *, sync: Sync = allreduce, **kwargs: Any) -> None:
        decided = kwargs.keys() & {"process_group", "device_mesh", "init_sync", "forward_sync_buffers", "wire"}
        if decided:
            raise TypeError(f"torchft's manager decides {', '.join(sorted(decided))}; leave it out")
        sharded = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
        if sharded:
            raise TypeError(
                f"parameter {sharded[0]!r} is a DTensor, whose gradient FSDP reduces; give the local shards of all "
                "gradients to fnddp.jit(sync, wire=ManagerWire(manager))"
            )
        kwargs.pop("broadcast_buffers", None)
        super().__init__(
            module, init_sync=False, forward_sync_buffers=False, sync=sync, wire=ManagerWire(manager), **kwargs
        )
        self.manager: Any = manager
        plan = self._engine.prepare()  # now, since the others would wait for it in this replica's first step
        if plan is not None:
            self._replicas.require([collective.kind for collective in plan.collectives])
        self._kept: State = None  # the pipeline's state at the start of a step that is not committed
        self._is_uncommitted = False
        self._begun = 0  # steps of the engine before that step
        self._epoch: int | None = None  # of the quorum whose members have agreed
        key = f"{_KEY}.{sum(known.startswith(_KEY) for known in self.manager._user_state_dicts)}"
        manager.register_state_dict_fn(key, self._heal, self._shared)
        # A manager has no hooks.
        self.manager.start_quorum = partial(self._start_quorum, manager.start_quorum)
        self.manager.should_commit = partial(self._should_commit, manager.should_commit)

    def _agreed(self, sync: Sync, *, verify: bool) -> tuple[Sync, State]:
        _require_elastic(sync, self._trained.gradients())
        return super()._agreed(sync, verify=verify)

    @property
    def _engine(self) -> Engine:
        return self._steps.engine

    @property
    def _replicas(self) -> ManagerWire:
        assert isinstance(self._wire, ManagerWire)
        return self._wire

    def _start_quorum(self, start: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if all(key.startswith(_KEY) for key in self.manager._user_state_dicts):
            raise ValueError(
                "the manager has no state_dict, so a replica that joins would get no parameters; give Manager "
                "state_dict and load_state_dict for the model and the optimizer"
            )
        if self._is_uncommitted:
            self._leave_out()
        try:
            start(*args, **kwargs)
        except Exception as error:
            asked = self.manager._quorum_future
            if asked is None or asked.exception() is not error:  # raised by loading the state
                raise
            raise QuorumError(f"replica {self.manager._replica_id!r} is in no quorum: {error}") from error
        if self._replicas.epoch != self._epoch:
            self._agree()
        self._kept, self._begun, self._is_uncommitted = self.sync_state, self._engine.begun, True

    def _leave_out(self) -> None:
        """End a step without `should_commit`, in the quorum in which the others wait for it."""
        error = RuntimeError("this replica has not finished its backward, or left it out")
        if self._engine.begun == self._begun:
            self._engine.fail_next(error)
        self._steps.fail(error)
        self._replicas.report(error)
        self.manager.should_commit()  # False, which makes another quorum, and notifies this replica's other ranks

    def _should_commit(self, ask: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        if self._engine.is_open:
            error = RuntimeError("this replica's backward did not finish")
            self._steps.fail(error)
            self._replicas.report(error)
        is_committed = False
        try:
            is_committed = ask(*args, **kwargs)
        finally:
            if self._is_uncommitted:
                self._steps.settle_on(is_committed)
                if not is_committed:
                    self.sync_state = self._kept
            self._is_uncommitted, self._kept = False, None
        return is_committed

    def _agree(self) -> None:
        """Compare pipelines, leaves and state among the members of a new quorum."""
        mine = description(self.sync, self._trained.gradients(), self.sync_state)
        try:
            everyone = gather_over(self._replicas, mine, None, self.device)
        except RuntimeError as error:  # this step fails, and the next one has another quorum
            self._replicas.report(error)
            return
        if any(other != mine for other in everyone):
            raise RankMismatchError(f"of the replicas of quorum {self._replicas.epoch}, {first_difference(everyone)}")
        self._epoch = self._replicas.epoch

    def _shared(self) -> dict[str, Any]:
        """Return what a replica that joins gets from this one."""
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


class PureDistributedDataParallel(DistributedDataParallel):
    """torchft's class of that name: `DistributedDataParallel` with a message for each parameter.

    For debugging: many small messages are slow. Arguments and errors are those of `DistributedDataParallel`.

    Source: `torchft/ddp.py`, whose class never waits for a collective, so that replicas differ.
    """

    def __init__(self, manager: "Manager", module: nn.Module, *, sync: Sync = allreduce) -> None:
        super().__init__(manager, module, sync=sync, bucket_cap_mb=_BYTE)


def _require_elastic(sync: Sync, grads: Leaves) -> None:
    """Raise a ValueError unless `sync` runs over a number of replicas that changes."""
    for group in groups_of(sync):
        if group is not None:
            raise ValueError(
                f"{sync!r} reduces over process group {group!r}, but a manager knows one group, that of the "
                "replicas; leave group out"
            )
    if any(isinstance(each, ef21) for each in all_in(sync)):
        raise ValueError(
            f"{sync!r}: ef21 holds the mean of all replicas' estimates, which is another one when a replica leaves; "
            "use error_feedback"
        )
    two, three = [_described(sync, grads, n) for n in (2, 3)]
    if two != three:
        path = next(path for path in [*two, *three] if two.get(path) != three.get(path))
        raise ValueError(
            f"{sync!r}: {path!r} of its state is {two.get(path)} for two replicas and {three.get(path)} for three, so "
            "it cannot continue when one leaves; use one whose state has one shape (two_shot without server_memory)"
        )


def _described(sync: Sync, grads: Leaves, replicas: int) -> dict[str, str]:
    with within(World(size=replicas)):
        return {part.path: describe(part.value) for part in states.parts(sync.init(grads))}
