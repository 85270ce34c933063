"""torchft's manager as a wire, and torchft's two wrapped modules over it: replicas that may die and come back."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchft.manager import Manager, WorldSizeMode

import fnddp
from fnddp import state as states
from fnddp.adapters.module import wrapper
from fnddp.agreement import RankMismatchError, description, first_difference
from fnddp.reducers.all_reduce import allreduce
from fnddp.sync import REPLICATED, State, Sync, groups_of
from fnddp.wire.control import gather_over
from fnddp.wire.groups import World, within
from fnddp.wire.kinds import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, KINDS, REDUCE_SCATTER, Kind
from fnddp.wire.protocol import Elastic, Work

_c10d: Any = dist.distributed_c10d
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class QuorumError(RuntimeError):
    """There is no quorum: the lighthouse does not answer, or too few replicas came in time."""


class ManagerWire(Elastic):
    def __init__(self, manager: Manager) -> None:
        self.manager = manager

    @property
    def epoch(self) -> int:
        return self.manager._quorum_id

    def size(self, group: str | None) -> int:
        return self.manager.num_participants() or self.manager._min_replica_size

    def rank(self, group: str | None) -> int:
        return self.manager.participating_rank() or 0

    def start(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: str | None, tag: int = 0) -> Work:
        return _Collective(self, self._started(kind, send, receive, op), receive)

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, Work]:
        gathered = flags.new_empty((self.size(group), *flags.shape))
        flat = flags.reshape(-1)
        return gathered, _Vote(self, self._started(ALL_GATHER, flat, gathered.view(-1), None), gathered)

    def report(self, error: Exception) -> None:
        if self.manager.errored() is None:
            self.manager.report_error(error)

    def _started(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None) -> Any:
        if self.manager.errored() is not None:
            return None
        try:
            return _START[kind](self.manager._pg, send, receive, op)
        except RuntimeError as error:
            self.report(error)
            return None


def _all_reduce(pg, send, receive, op):
    options = _c10d.AllreduceOptions()
    options.reduceOp = _OPS[op]
    return pg.allreduce([send], options)


def _all_gather(pg, send, receive, op):
    return pg.allgather_into_tensor_coalesced([receive.view(-1)], [send], _c10d.AllgatherOptions())


def _all_to_all(pg, send, receive, op):
    return pg.alltoall_base(receive.view(-1), send.view(-1), [], [], _c10d.AllToAllOptions())


_START = {ALL_REDUCE: _all_reduce, ALL_GATHER: _all_gather, ALL_TO_ALL: _all_to_all}


class _Collective:
    """A collective that does not raise: the manager is told, and what it was to fill is zero."""

    def __init__(self, wire: ManagerWire, work: Any, receive: Tensor) -> None:
        self._wire, self._work, self._receive = wire, work, receive

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> bool:
        self._complete()
        if self._wire.manager.errored() is not None:
            self._receive.zero_()
        return True

    def _complete(self) -> None:
        try:
            if self._work is not None:  # also of a step that is lost: the backend may still write
                self._work.wait()
        except RuntimeError as error:
            self._wire.report(error)


class _Vote(_Collective):
    def wait(self) -> bool:
        self._complete()
        lost = self._wire.manager.errored()
        if lost is not None:
            raise RuntimeError(str(lost.original_exception))
        return True


class DistributedDataParallel(wrapper.DistributedDataParallel):
    def __init__(self, manager: Manager, module: nn.Module, *, sync: Sync = allreduce, **kwargs: Any) -> None:
        wire = ManagerWire(manager)
        super().__init__(module, init_sync=False, forward_sync_buffers=False, sync=sync, wire=wire, **kwargs)
        self.manager = manager
        self._steps.engine.prepare()
        self._epoch = None
        self._kept: State = self.sync_state
        self._is_under_way = False
        manager.register_state_dict_fn("fnddp", self._heal, self._shared)
        _around(manager, "start_quorum", weakref.WeakMethod(self._start_quorum))
        _around(manager, "should_commit", weakref.WeakMethod(self._should_commit))

    def _start_quorum(self, start, *args, **kwargs):
        engine = self._steps.engine
        if self._is_under_way:
            error = RuntimeError("left out on this replica")
            if engine.is_open or engine._begun == self._begun:
                engine.skip(error)
            self.sync_state = self._kept
        start(*args, **kwargs)
        epoch = self._wire.epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self._agree()
        self._kept, self._begun, self._is_under_way = self.sync_state, engine._begun, True

    def _agree(self):
        mine = description(self.sync, self._trained.gradients(), self.sync_state)
        try:
            everyone = gather_over(self._wire, mine, None, self.device)
        except RuntimeError as error:
            self._wire.report(error)
            return
        if any(each != mine for each in everyone):
            raise RankMismatchError(first_difference(everyone))

    def _should_commit(self, ask, *args, **kwargs):
        if self._steps.is_open:
            error = RuntimeError("its backward did not finish")
            self._steps.fail(error)
            self.manager.report_error(error)
        committed = ask(*args, **kwargs)
        if not committed:
            self.sync_state = self._kept
        self._is_under_way = False
        self._kept = None
        return committed

    def _shared(self) -> dict[str, Any]:
        return {
            "sync": repr(self.sync),
            "state": {part.key: part.value for part in states.parts(self.sync_state) if part.kind == REPLICATED},
        }

    def _heal(self, saved: dict[str, Any]) -> None:
        if saved["sync"] != repr(self.sync):
            raise RankMismatchError(f"{saved['sync']} {self.sync!r}")
        fresh = self.sync.init(self._trained.gradients())
        self.sync_state = states.load_state_dict(fresh, {**states.state_dict(fresh), **saved["state"]})


def _around(target: Any, name: str, method: "weakref.WeakMethod[Any]") -> None:
    inner = getattr(target, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        around = method()
        return inner(*args, **kwargs) if around is None else around(inner, *args, **kwargs)

    setattr(target, name, call)
