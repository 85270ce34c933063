"""Base classes of objects that own a pipeline and its state, and their statistics for a log."""

import logging
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any, NoReturn

from fnddp import torch_private
from fnddp.adapters.backward import Backward
from fnddp.adapters.checkpoint import Checkpoint
from fnddp.codecs.topk import dct_topk, topk
from fnddp.core.agreement import agree_over, agreed_state
from fnddp.core.sync import State, Sync
from fnddp.core.tree import Leaves
from fnddp.device import device_of
from fnddp.ir.program import LeafSpec
from fnddp.plan.draft import Donation
from fnddp.plan.plan import Plan
from fnddp.run.engine import Engine, Lane
from fnddp.run.stats import SyncStats, stats
from fnddp.transforms.memory import shared_momentum
from fnddp.transforms.powersgd import powersgd
from fnddp.wire.c10d import C10D, over
from fnddp.wire.groups import live_rank
from fnddp.wire.protocol import Wire

_log = logging.getLogger("fnddp")


def biased_without_memory(sync: Sync) -> Sync | None:
    """Return a transform in `sync` that loses parts of gradients for good, because no error feedback encloses it."""
    if sync.remembers and not isinstance(sync, shared_momentum):  # which remembers a mean, not what was lost
        return None
    if isinstance(sync, powersgd | topk | dct_topk):
        return sync
    return next(filter(None, map(biased_without_memory, sync.children())), None)


@cache
def warn_without_memory(sync: Sync) -> None:
    """Log once, on the first rank, that a pipeline loses parts of gradients for good."""
    if live_rank(None) == 0 and (biased := biased_without_memory(sync)):
        name = type(biased).__name__
        _log.warning(
            f"{sync}: {name} discards part of each gradient, so training may end at a much higher loss; "
            f"error_feedback({name}(...)) adds the discarded part to the next gradient"
        )


def log_adopted(taken: Sync, saved: Sync) -> None:
    """Log on the first rank that another pipeline replaces the one that "auto" chose."""
    taken, saved = taken.over(None), saved.over(None)
    if live_rank(None) == 0 and saved != taken:
        _log.warning(f'sync="auto" continues with {saved}, which was set or loaded, instead of {taken}')


class HasPipeline:
    """Base class of objects with a pipeline that synchronizes the gradients of a model, and the pipeline's state."""

    _engine: Any  # an `Engine`
    _backward: Backward
    _group: str | None  # name of the model's process group; None for the default one
    _wire: Wire
    _others: Collection[str | None] = ()  # groups that compare no state, but raise an error of one of their ranks
    _is_measured = False  # "auto" chose the pipeline, so a checkpoint's may replace it
    _compares = False  # ranks have yet to compare the pipeline that "auto" or a checkpoint chose

    @property
    def sync(self) -> Sync:
        """The pipeline that runs. Reducers that name no process group name the model's here, unless it is the default.

        It cannot be set. Register another pipeline in a new model, or use `fnddp.DistributedDataParallel`.
        """
        return self._engine.sync

    @property
    def sync_state(self) -> State:
        """The pipeline's state after the last step: a pytree keyed by the names of the model's parameters.

        You may keep it, because later steps do not write over it. To continue from a saved state, set it on all ranks.
        They compare its replicated parts, if there are any.

        Raises:
            CollectiveError: Another rank has not set its state within the timeout of the process group.
            RankMismatchError: On all ranks: some set a state with other replicated parts.
            RuntimeError: A backward is running.
            ValueError: The state is of another pipeline or other parameters.
        """
        if self._backward.has_raised:
            self._settle()  # the caller may save it, and go on
        return self._engine.state

    @sync_state.setter
    def sync_state(self, state: State) -> None:
        self.prepare_state(lambda: state)()

    def prepare_state(self, read: Callable[[], State]) -> Callable[[], None]:
        """Call `read` for a state, compare it between ranks, and return a function that sets it: see `sync_state`.

        All ranks call this. Nothing changes before they call the result. If `read` raises on one rank, all ranks raise.
        """
        self._settle()
        with device_of(self._engine.device).selected():
            state = agreed_state(self.sync, self._engine.state, read, [self._group], self._wire, others=self._others)
        return lambda: setattr(self._engine, "state", state)

    @property
    def plan(self) -> Plan | None:
        """The plan of the last backward; None before the first, and for a pipeline that cannot be lowered."""
        return self._engine.plan

    def sync_checkpoint(self, saved_world_size: int | None = None) -> Checkpoint:
        """Return the pipeline's state for torch.distributed.checkpoint.

        Args:
            saved_world_size: The number of ranks that saved the state to load; None for the present number.
        """
        if self._backward.has_raised:  # steps that run in other threads continue
            self._settle()
        adopt = self._adopt if self._is_measured else None
        return Checkpoint(self, self._group, saved_world_size, adopt=adopt, has_order=True)

    def reset_sync(self) -> None:
        """Set the pipeline's state to the initial one. All ranks call it, between steps."""
        leaves = {name: leaf.empty() for name, leaf in self._engine.leaves.items()}
        self.sync_state = over(self._wire, self.sync.init)(leaves)

    @property
    def learnt_order(self) -> list[str]:
        """The order in which gradients arrive, used to lay out buckets; empty before it is learnt."""
        return self._engine.learnt

    @learnt_order.setter
    def learnt_order(self, order: list[str]) -> None:
        self._engine.continue_with(order)

    def refuse(self, error: BaseException | None) -> None:
        """See `HasCheckpoint.refuse`."""
        self._engine.refused = error

    def _settle(self) -> None:
        """Fail a step if its backward did not finish, because the other ranks still wait in that step.

        Raises:
            RuntimeError: Its backward is running in another thread.
        """
        if torch_private.is_within_backward():
            return
        if self._backward.is_in_progress:
            raise RuntimeError("a backward of this model is running in another thread; wait until it ends")
        self._backward.require_idle()

    def _adopt(self, sync: Sync) -> None:
        """Continue with `sync`, from its initial state. All ranks call it, between steps."""
        raise NotImplementedError

    @torch_private.untraced
    def _require_one_choice(self, other_groups: Iterable[str | None] = ()) -> None:
        """Raise a RankMismatchError on all ranks if checkpoints replaced the choice of "auto" by different pipelines.

        Forward calls this, not `_adopt`, so that ranks that loaded no checkpoint, and other groups, raise as well.
        """
        with device_of(self._engine.device).selected():
            about = 'the pipeline that "auto" chose or a checkpoint replaced'
            agree_over(lambda: {about: repr(self.sync.over(None))}, [self._group], other_groups)
        self._compares = False

    def sync_stats(self) -> SyncStats:
        """Return this rank's bytes and times of the last step, and the number of steps, as a dict to log.

        The first call starts to measure times, and returns None for them: make it before training. Each call waits for
        an accelerator. Setting another pipeline resets the counts of steps.
        """
        return stats(self._engine, self.sync_state)  # like any reader of the state, after a backward that has raised


class PipelineHandle(HasPipeline):
    """Base of handles that add a pipeline to a model of a class that is not fnddp's.

    Args:
        leaves: Tensors of the gradients' shapes and dtypes, by name.
        options: Further arguments of the engine.

    Attributes:
        group: Name of the model's process group; None for the default one.
    """

    def __init__(self, leaves: Leaves, sync: Sync, group: str | None, wire: Wire = C10D, **options: Any) -> None:
        warn_without_memory(sync)

        def engine_of(sync: Sync, lane: Lane | None = None) -> Engine:
            specs = {name: LeafSpec.of(leaf) for name, leaf in leaves.items()}
            donation = Donation(gradients="at_end", state=True)
            given: Any = {"donation": donation, "groups": [group], "wire": wire, "lane": lane, **options}
            return Engine(sync, specs, state=over(wire, sync.init)(leaves), **given)

        self._engine_of, self._engine = engine_of, engine_of(sync)
        self.group, self._group, self._wire = group, group, wire

    def __repr__(self) -> str:
        steps = self._engine.steps
        return f"<{type(self).__name__} of {self.sync}, after {steps} step{'s' * (steps != 1)}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} belongs to one model and cannot be copied or pickled; save "
            "fnddp.state_dict(handle.sync_state), and attach the pipeline to the copy of the model"
        )

    def sync_checkpoint(self, saved_world_size: int | None = None) -> Checkpoint:
        self._settle()  # autograd does not tell whether the backward has raised
        return super().sync_checkpoint(saved_world_size)

    def _connect(self, *, is_measured: bool) -> None:
        """Prepare the first step after all ranks have agreed on the pipeline; `is_measured` if "auto" chose it."""
        self._is_measured = self._compares = is_measured
        self._engine.connect()

    def _adopt(self, sync: Sync) -> None:
        log_adopted(self.sync, sync)
        self._engine = self._engine_of(sync.over(self._group, unnamed_only=True), self._engine.lane)
        self._backward.engine = self._engine
        self._engine.connect()
        self._compares = True


def log_sync_stats(writer: Any, model: HasPipeline, *, step: int | None = None, prefix: str = "fnddp/") -> SyncStats:
    """Write the statistics of `model` to TensorBoard, or to any object with its `add_scalar`, and return them.

    Call it on one rank, because reading them waits for the device. For other loggers: `logger.log(model.sync_stats())`.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`.
        model: The model, or the handle of `register`.
        step: The step number to write; None for the number of committed steps.
        prefix: Prefix of each name.

    >>> import torch, fnddp
    >>> class Printer:
    ...     def add_scalar(self, tag, scalar_value, global_step=None): print(tag, scalar_value, global_step)
    >>> model = fnddp.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> written = log_sync_stats(Printer(), model)
    fnddp/steps 1 1
    fnddp/failed_steps 0 1
    fnddp/wire_bytes 0 1
    fnddp/link_bytes 0 1
    fnddp/collectives 0 1
    """
    stats = model.sync_stats()
    at = stats["steps"] if step is None else step
    for name, value in stats.items():
        if value is not None:
            writer.add_scalar(f"{prefix}{name}", value, at)
    return stats
