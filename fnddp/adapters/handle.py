"""The base class of objects that own a pipeline and its state."""

from fnddp.adapters.checkpoint import Checkpoint
from fnddp.core.agreement import agree_on_state
from fnddp.core.sync import State, Sync
from fnddp.plan.plan import Plan
from fnddp.run.engine import Engine
from fnddp.run.stats import SyncStats, stats
from fnddp.wire.c10d import C10D
from fnddp.wire.protocol import Wire


class PipelineHandle:
    """A pipeline that synchronizes the gradients of a model, with its state.

    Attributes:
        group: Name of the model's process group; None for the default one.
    """

    def __init__(self, engine: Engine, group: str | None, wire: Wire = C10D) -> None:
        self._engine, self.group, self._wire = engine, group, wire

    @property
    def sync(self) -> Sync:
        """The pipeline that runs: it names the model's process group where it named none, unless that is the default.

        It cannot be set: call what returned this object again on a new model, or use `fnddp.DistributedDataParallel`.
        """
        return self._engine.sync

    @property
    def state(self) -> State:
        """The pipeline's state after the last step: a pytree keyed by the names of the model's parameters.

        Set it on all ranks: see `fnddp.DistributedDataParallel.sync_state`.
        """
        return self._engine.state

    @state.setter
    def state(self, state: State) -> None:
        agree_on_state(self.sync, self._engine.state, state, self.group, self._wire)
        self._engine.state = state

    @property
    def sync_state(self) -> State:
        """`state`, by the name that it has in `fnddp.DistributedDataParallel`."""
        return self.state

    @sync_state.setter
    def sync_state(self, state: State) -> None:
        self.state = state

    @property
    def plan(self) -> Plan | None:
        """The plan of the last backward; None before the first, and for a pipeline that cannot be lowered."""
        return self._engine.plan

    def sync_checkpoint(self, saved_world_size: int | None = None) -> Checkpoint:
        """Return the state for torch.distributed.checkpoint: see `fnddp.DistributedDataParallel.sync_checkpoint`."""
        return Checkpoint(self, self.group, saved_world_size)

    def sync_stats(self) -> SyncStats:
        """Return the statistics of the last step: see `fnddp.DistributedDataParallel.sync_stats`."""
        return stats(self._engine)
