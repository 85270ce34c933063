"""torchft's manager as a wire: a step's ranks are its quorum, and a lost rank ends no process."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from fnddp.torch_private import without_modes
from fnddp.wire.kinds import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_OP, REDUCE_SCATTER, Kind
from fnddp.wire.protocol import Elastic, Work

if TYPE_CHECKING:
    from torchft import Manager

_c10d: Any = dist.distributed_c10d


class QuorumError(RuntimeError):
    """There is no quorum: the lighthouse does not answer, or too few replicas have come in time."""


class ManagerWire(Elastic):
    """The wire between the replicas of a torchft manager, for any pipeline.

    `size` is the number of participants of the quorum: the divisor of means. A collective that fails, because a
    replica has died or is too slow, raises nothing: its error is reported to the manager, its result is zero, later
    ones of the step are not started, and `manager.should_commit()` is False. `value_and_grad` and `jit`, which end
    steps by a vote, raise `CollectiveError`, and run again in the next quorum. A caller of the pipeline itself must
    ask the manager.

    The wrong choice for a module: `DistributedDataParallel` of this package also rolls back and heals the pipeline's
    state. The wrong choice inside a replica: its ranks have torch.distributed.

    Args:
        manager: With `use_async_quorum=False`, and the usual world size mode. Each of a replica's ranks has its own.

    Raises:
        ValueError: The manager's quorum is asynchronous, or it has spares. In a collective: a group is named, or the
            manager's process group cannot carry it.

    Source: `torchft/manager.py`. Deviation: it sums before it divides, and so overflows a 16-bit wire.

    >>> import torch
    >>> import torch.distributed as dist
    >>> from torchft import Manager, ProcessGroupGloo
    >>> from torchft.coordination import LighthouseServer
    >>> from fnddp import allreduce, jit
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
        self._reported: Exception | None = None
        if self._manager._use_async_quorum:
            raise ValueError(
                "ManagerWire: the manager's quorum is asynchronous, so a replica that heals would take part in a step "
                "with the state that it had before; give Manager use_async_quorum=False"
            )
        if self._manager._replica_world_size_mode.name != "DYNAMIC":
            raise ValueError(
                "ManagerWire: the manager has spares, whose gradients would be in the mean; leave world_size_mode out"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ManagerWire) and other._manager is self._manager

    def __hash__(self) -> int:
        return hash((ManagerWire, id(self._manager)))

    @property
    def epoch(self) -> int:
        """Number of the quorum: torchft forms another one when members change, and after a failed step."""
        return self._manager._quorum_id

    def size(self, group: str | None) -> int:
        """Return the number of replicas in this step; before the first quorum, for plans made ahead, the minimum."""
        _require_unnamed(group)
        with without_modes():  # torchft's calls are operations to a profiler, and so to a trace
            return self._manager.num_participants() or self._manager._min_replica_size

    def rank(self, group: str | None) -> int:
        """See `Wire.rank`."""
        _require_unnamed(group)
        with without_modes():
            return self._manager.participating_rank() or 0

    def start(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: str | None) -> Work:
        """See `Wire.start`; its work does not raise."""
        _require_unnamed(group)
        self.require([kind])
        return _Collective(self, self._started(kind, send, receive, op), receive)

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, Work]:
        """See `Wire.vote`; its work raises if anything of this step has failed."""
        gathered = flags.new_empty((self.size(group), *flags.shape))
        return gathered, _Vote(self, self._started(ALL_GATHER, flags.reshape(-1), gathered, None), gathered)

    def report(self, error: Exception) -> None:
        """See `Elastic.report`."""
        if self._manager.errored() is None:
            self._manager.report_error(error)
            self._reported = error

    def hang_up(self) -> None:
        """Abort what others of this epoch wait for: in a ring not all of them are neighbours of the lost one."""
        self._manager._pg.abort()

    @property
    def lost(self) -> Exception | None:
        """See `Elastic.lost`: no other collective of this epoch is started."""
        return self._lost.get(self.epoch)

    def lose(self, error: Exception) -> None:
        """Note that a collective has failed with `error`."""
        if self.lost is None:
            self._lost = {self.epoch: error}
        self.report(error)

    def require(self, kinds: Iterable[Kind]) -> None:
        """Raise a ValueError unless the manager's process group carries `kinds`."""
        name: str = self._manager._pg.getBackendName()
        if REDUCE_SCATTER in kinds and name.startswith("torchft") and name.endswith("gloo"):
            raise ValueError(
                f"ManagerWire: torchft's process group {name!r} has no reduce_scatter; use a pipeline without one, "
                "such as two_shot, or a process group of another backend"
            )

    def _started(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None) -> Any:
        self._heed_manager()
        if self.lost is not None:
            return None
        try:
            return _START[kind](self._manager._pg, send, receive.view(-1), op)
        except Exception as error:  # an AssertionError where the group could not be set up: a rank died meanwhile
            self.lose(error)
            return None

    def _heed_manager(self) -> None:
        """Keep a replica that could not heal, or that reports an error, out of all means."""
        known = self._manager.errored()
        if known is not None and known.original_exception is not self._reported and self.lost is None:
            self.lose(known.original_exception)
            self.hang_up()


class _Collective:
    """A collective that does not raise: its result is zero if the step has failed."""

    def __init__(self, wire: ManagerWire, work: Any, receive: Tensor) -> None:
        self._wire, self._work, self._receive = wire, work, receive

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> bool:
        if self._has_failed():
            self._receive.zero_()
        return True

    def _has_failed(self) -> bool:
        try:
            if self._work is not None:  # in a step that has failed, too: the backend may still write
                self._work.wait()
        except RuntimeError as error:
            self._wire.lose(error)
        return self._wire.lost is not None


class _Vote(_Collective):
    """A collective that raises if anything of the step has failed."""

    def wait(self) -> bool:
        if self._has_failed():
            self._work = None
            self._wire.hang_up()
            raise RuntimeError(str(self._wire.lost)) from self._wire.lost
        return True


def _all_reduce(pg: Any, send: Tensor, receive: Tensor, op: str | None) -> Any:
    options = _c10d.AllreduceOptions()
    options.reduceOp = REDUCE_OP[op or "sum"]
    return pg.allreduce([send], options)


def _all_gather(pg: Any, send: Tensor, receive: Tensor, op: str | None) -> Any:
    # Not allgather_into_tensor_coalesced, with which gloo of torch 2.13 corrupts memory.
    return pg.allgather([list(receive.view(-1, send.numel()))], [send], _c10d.AllgatherOptions())


def _reduce_scatter(pg: Any, send: Tensor, receive: Tensor, op: str | None) -> Any:
    options = _c10d.ReduceScatterOptions()
    options.reduceOp = REDUCE_OP[op or "sum"]
    return pg.reduce_scatter_tensor_coalesced([receive], [send.view(-1)], options)


def _all_to_all(pg: Any, send: Tensor, receive: Tensor, op: str | None) -> Any:
    return pg.alltoall_base(receive, send.view(-1), [], [], _c10d.AllToAllOptions())


# What torchft's process groups have: torch.distributed's functions call more, which these have not.
_START: dict[Kind, Callable[[Any, Tensor, Tensor, str | None], Any]] = {
    ALL_REDUCE: _all_reduce,
    ALL_GATHER: _all_gather,
    REDUCE_SCATTER: _reduce_scatter,
    ALL_TO_ALL: _all_to_all,
}


def _require_unnamed(group: str | None) -> None:
    if group is not None:
        raise ValueError(
            f"ManagerWire: the pipeline reduces over process group {group!r}, but a manager knows one group, that of "
            "the replicas; leave group out"
        )
