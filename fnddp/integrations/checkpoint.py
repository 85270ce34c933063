"""torch.distributed.checkpoint: save model, optimizers and the pipeline's state in one call on all ranks."""

import weakref
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fnddp.adapters.checkpoint import BEGIN_ANEW, Checkpoint, HasCheckpoint
from fnddp.adapters.handle import HasPipeline
from fnddp.adapters.owners import OwnerDataParallel
from fnddp.core.group import group_name
from fnddp.core.sync import Sync
from fnddp.reducers.all_reduce import unreduced
from fnddp.run.hops import owned_in, owner_of, several
from fnddp.schedules.choose import partition
from fnddp.torch_private import live_group, without_step_hooks
from fnddp.wire import control
from fnddp.wire.c10d import dedicated_to

_MODEL, _OPTIMIZER, _SYNC, _MORE, _STEPPED = "model", "optimizer", "sync", "more.", "stepped"


def save(
    folder: str | Path,
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    *,
    sync: HasCheckpoint | None = None,
    more: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write one checkpoint of all ranks: replicated state once, local state of each rank, and all shards.

    It writes the first rank's buffers, such as BatchNorm's statistics: the next forward sends these to all ranks.

    Args:
        folder: A folder that all ranks see.
        model: A `fnddp.DistributedDataParallel` (also the result of `fnddp.own`), torch's, or a model sharded by FSDP.
        optimizers: Optimizers of its parameters; for a model of `own` all of its optimizers, or none.
        sync: The result of `register`, or of `compress`, `compress_shards` or `compress_replicas` of
            `fnddp.integrations.fsdp`; None if `model` itself has the pipeline.
        more: More values to save, by name: numbers, tensors, objects with a `state_dict`, such as a scheduler. A name
            is saved once for all ranks; if values differ between ranks, so must names, such as `f"random{rank}"`.
        group: The ranks that save, all of which must call this; None for all ranks.

    Raises:
        TypeError: There is no pipeline in `sync` or `model`; or matrices of an optimizer have owners (`own_matrices`).
        ValueError: The optimizers are not those of a model of `own`; or ranks with different parameters save together:
            workers of an outer step, or ranks with a pipeline that does not reduce gradients (`none`).

    >>> import tempfile, torch, fnddp
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> sync = fnddp.error_feedback(fnddp.bf16(fnddp.allreduce))
    >>> model = fnddp.DistributedDataParallel(nn.Linear(2, 2), sync=sync)
    >>> folder = tempfile.mkdtemp()
    >>> save(folder, model, more={"step": 7})
    >>> load(folder, model, more={"step": 0})
    {'step': 7}
    >>> dist.destroy_process_group()
    """
    state = _to_save(model, optimizers, sync, more, group)
    dcp.save(state, checkpoint_id=folder, process_group=group)


_under_way: "weakref.WeakKeyDictionary[dist.ProcessGroup, Future[Any]]" = weakref.WeakKeyDictionary()
"""The last `async_save` of each process group."""


def async_save(
    folder: str | Path,
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    *,
    sync: HasCheckpoint | None = None,
    more: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    in_process: bool = False,
) -> Future[Any]:
    """Save as `save` does, but return after copying all values to the CPU, and write while training continues.

    Its messages use a process group of their own, made in the first call, so they do not mix with the collectives of
    training. They would mix with messages of another `async_save`, so a call waits until the last one is written.

    Args:
        folder, model, optimizers, sync, more, group: See `save`.
        in_process: Write in another process, not in a thread. The first call takes seconds, and the script must be
            guarded by `if __name__ == "__main__"`.

    Returns:
        A future: `result()` waits until the checkpoint is written, and raises errors.
    """
    state = _to_save(model, optimizers, sync, more, group)
    kind = AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD
    ranks = live_group(None) if group is None and dist.is_initialized() else group
    if ranks is not None and ranks in _under_way:
        wait([_under_way[ranks]])  # its own `result` raises its error
    if ranks is not None and not in_process:
        group = live_group(dedicated_to(ranks, "fnddp.save", default_pg_timeout))
    response = dcp.async_save(state, checkpoint_id=folder, process_group=group, async_checkpointer_type=kind)
    written = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
    if ranks is not None:
        _under_way[ranks] = written
    return written


def load(
    folder: str | Path,
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    *,
    sync: HasCheckpoint | None = None,
    more: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    reset_sync: bool = False,
) -> dict[str, Any]:
    """Read a checkpoint of `save` or `async_save`, on the same or another number of ranks. All ranks must call it.

    With the same number of ranks, training continues bit for bit. Another number of ranks divides local state into
    shares (`fnddp.adapters.checkpoint.shares`), so that no residual is lost.

    Args:
        folder, model, optimizers, sync, group: See `save`; the call overwrites the values of model, optimizers and
            pipeline state. Pass several optimizers in the order in which they were saved.
        more: The names in `more` of `save`. Objects with a `load_state_dict` are loaded in place.
        reset_sync: Begin with the pipeline's initial state instead of a saved one: for a checkpoint of another
            pipeline, or without one.

    Returns:
        `more`, with the saved values.

    Raises:
        ValueError: The state is of another pipeline or other parameters, or of another number of shards.
        TypeError: There is no pipeline in `sync` or `model`.
        CheckpointException: On all ranks: a file is missing or damaged, or lacks a requested value. If some ranks have
            read a part of it, no step begins until a load succeeds.
    """
    model, stepping, keeper = _given(model, optimizers, sync)
    checkpoint = _checkpoint(keeper, group)
    about, planner = {} if reset_sync else {_SYNC: checkpoint.about()}, DefaultLoadPlanner()
    try:
        dcp.load(about, checkpoint_id=folder, process_group=group, planner=planner)
    except CheckpointException as error:
        if any("Missing key" not in str(failure) for failure, _ in error.failures.values()):
            error.add_note(f"load: {folder} is missing, or a file in it is missing or damaged")
            raise
        raise ValueError(
            f"load: {folder} has no pipeline state for this rank: it was written without one, or for another number "
            f"of shards ({error}); {BEGIN_ANEW}"
        ) from error
    if not reset_sync:
        checkpoint.require_fitting(about[_SYNC])
        checkpoint.adopt_pipeline(about[_SYNC])
    before = {each: dict(each.state) for each in stepping if _has_some_state(model, each)}
    _clear([*before])  # torch fills the state of all parameters or not at all
    fresh, stepped = _without_state(stepping), {_STEPPED: [True for _ in stepping]}
    reading = _Reading()
    try:
        read = None if reset_sync else keeper.sync_checkpoint(checkpoint.saved_by(about[_SYNC]))
        state = _state(model, stepping, read, more)
        _leave_out_unsaved(state, [] if planner.metadata is None else planner.metadata.state_dict_metadata)
        dcp.load(state, checkpoint_id=folder, process_group=group, planner=reading)
        if_known = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(stepped, checkpoint_id=folder, process_group=group, planner=if_known)
        moments = state.get(_OPTIMIZER, {})
        if not isinstance(model, OwnerDataParallel):
            with without_step_hooks(stepping):
                options = StateDictOptions(strict=False)  # DCP found all requests; some parameters have no state
                weights = state[_MODEL]
                set_state_dict(model, stepping, model_state_dict=weights, optim_state_dict=moments, options=options)
        elif moments:
            model.load_local_state(moments)
        if reset_sync:
            keeper.reset_sync()
    except BaseException as error:
        _clear(fresh)
        for each, states in before.items():
            each.state.update(states)
        if reading.has_begun:
            half = RuntimeError(f"load failed while reading {folder}: the model and optimizers may be partly loaded")
            half.__cause__ = error
            keeper.refuse(half)
        raise
    keeper.refuse(None)
    _clear([each for each, has_stepped in zip(stepping, stepped[_STEPPED], strict=False) if not has_stepped])
    return {name: state[_MORE + name] for name in more or ()}


class _Reading(DefaultLoadPlanner):
    """A planner that records when ranks begin to overwrite their values; they all find mismatches before that."""

    has_begun = False

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.has_begun = True
        return super().finish_plan(new_plan)


def _state(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    checkpoint: Checkpoint | None,
    more: Mapping[str, Any] | None,
    stepped: Collection[Optimizer] = (),
) -> dict[str, Any]:
    if isinstance(model, OwnerDataParallel):  # a rank may own only leaves that no step has used
        if optimizers and {*map(id, optimizers)} != {*map(id, model.optimizers)}:
            got, every = (", ".join(type(each).__name__ for each in some) for some in (optimizers, model.optimizers))
            raise ValueError(f"a model of own saves all its optimizers ({every}) or none, got {got}; pass all")
        weights, moments = get_model_state_dict(model), model.local_state(stepped) if optimizers else None
    else:
        with _filling(optimizers):
            weights, moments = get_state_dict(model, optimizers)
    state = {_MODEL: weights, _OPTIMIZER: moments, _SYNC: checkpoint}
    # Each at the top level: only there does DCP call an object's `state_dict` and `load_state_dict`.
    each = {_MORE + name: value for name, value in (more or {}).items()}
    return {**{name: part for name, part in state.items() if part}, **each}


def _to_save(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    sync: HasCheckpoint | None,
    more: Mapping[str, Any] | None,
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Return the dict to write, with the first rank's buffers, and with the optimizers that took a step on any rank.

    Between two forwards, buffers differ between ranks (BatchNorm), and DCP would mix buffers of several ranks.
    """
    model, optimizers, keeper = _given(model, optimizers, sync)
    _require_equal_parameters(model, keeper, group)
    checkpoint = _checkpoint(keeper, group)
    if isinstance(model, OwnerDataParallel):
        model.require_consistent()
    fresh = _without_state(optimizers)
    has_stepped = [each not in fresh for each in optimizers]
    if dist.is_initialized():
        everyone: list[list[bool]] = control.all_gather_object(has_stepped, group_name(group))
        has_stepped = [any(has) for has in zip(*everyone, strict=True)]
    try:
        stepped = [each for each, has in zip(optimizers, has_stepped, strict=True) if has]
        state = _state(model, optimizers, checkpoint, more, stepped)
    finally:
        _clear(fresh)
    state[_STEPPED] = has_stepped
    if not dist.is_initialized():
        return state
    memories = {buffer.untyped_storage().data_ptr() for buffer in model.buffers() if not isinstance(buffer, DTensor)}
    buffers = [
        name
        for name, value in state[_MODEL].items()
        if isinstance(value, Tensor)
        and not isinstance(value, DTensor)
        and value.untyped_storage().data_ptr() in memories
    ]
    of_ranks: list[list[str]] = control.all_gather_object(buffers, group_name(group))
    written = {name for before in of_ranks[: dist.get_rank(group)] for name in before}
    return state | {_MODEL: {name: value for name, value in state[_MODEL].items() if name not in written}}


def _given(
    model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], sync: HasCheckpoint | None
) -> tuple[nn.Module, list[Optimizer], HasCheckpoint]:
    """Return the model, without the wrapper of `torch.compile`, the optimizers, and the object with the pipeline."""
    stepping = several(optimizers)
    for each in stepping:
        name = type(each).__name__
        if owned_in(each.param_groups) is not None:
            raise ValueError(
                f"{name} has loaded one rank's part of a state of fnddp.own, without own, so the parts of other ranks "
                "are missing; make a new optimizer, and load the result of optimizer_state_dict() or of save"
            )
        if owner_of(each) == "own_matrices":
            raise TypeError(
                f"{name} keeps its state at the owners of matrices (own_matrices), but torch's checkpoint expects the "
                "state of shards: leave it out of `optimizers`, call optimizer_state_dict() of the object that "
                "own_matrices returned, save the result, and restore it with load_optimizer_state_dict"
            )
    model = getattr(model, "_orig_mod", model)
    keeper: Any = model if sync is None else sync
    if not hasattr(keeper, "sync_checkpoint"):
        raise TypeError(
            f"a {type(keeper).__name__} has no pipeline; pass the result of fnddp.register, or of compress, "
            "compress_shards or compress_replicas, as `sync`"
        )
    return model, stepping, keeper


@contextmanager
def _filling(optimizers: Sequence[Optimizer]) -> Generator[None]:
    """Let torch initialize empty optimizer state with a step, unless a parameter already has a gradient."""
    groups = [group for each in _without_state(optimizers) for group in each.param_groups]
    parameters = [p for group in groups for p in group["params"]]
    grads, rates = [p.grad for p in parameters], [group["lr"] for group in groups if "lr" in group]
    try:
        for p in parameters:
            p.grad = None
        with without_step_hooks(optimizers):
            yield
    finally:
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
        for group, rate in zip((group for group in groups if "lr" in group), rates, strict=True):
            group["lr"] = rate  # torch leaves it at 0 if that step raises


def _has_some_state(model: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether some of an optimizer's parameters have state here while others, so far unused, have none."""
    mine = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if isinstance(model, OwnerDataParallel):
        mine = [each.parameters[name] for each in model.owned if each.optimizer is optimizer for name in each.own]
    return bool(optimizer.state) and not all(optimizer.state.get(p) for p in mine)


def _leave_out_unsaved(state: Mapping[str, Any], saved: Collection[str]) -> None:
    """Do not request the state of parameters without saved state, if others have some, or what other hops lack."""
    moments = state.get(_OPTIMIZER)
    if moments is None:
        return
    begin, names, with_state = f"{_OPTIMIZER}.", {x for of in moments["param_groups"] for x in of["params"]}, set[str]()
    there = {key.removeprefix(begin) for key in saved if key.startswith(begin)}
    for kind, *key in (each.split(".") for each in there):
        if kind == "state":
            found = names.intersection(accumulate(key, "{}.{}".format))  # its state may be nested
            if not found:  # of another model: DCP names the missing keys
                return
            with_state |= found
    for name in names - with_state if with_state else ():
        moments["state"].pop(name, None)
    if not any(key.startswith("weights.") for key in there):
        moments.pop("weights", None)
    for i, codecs in enumerate(moments.get("codecs", ())):
        moments["codecs"][i] = {key: x for key, x in codecs.items() if f"codecs.{i}.{key}" in there}


def _without_state(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers without state: torch creates it by a step with lr=0 when it saves or loads."""
    return [each for each in optimizers if not each.state]


def _clear(optimizers: Sequence[Optimizer]) -> None:
    """Remove that state: its step would count, and Adam's first step in training would be its second."""
    for each in optimizers:
        each.state.clear()


def _checkpoint(keeper: HasCheckpoint, group: dist.ProcessGroup | None) -> Checkpoint:
    checkpoint = keeper.sync_checkpoint()
    if dist.is_initialized():
        checkpoint.require_alone(dist.get_process_group_ranks(live_group(None) if group is None else group))
    return checkpoint


def _require_equal_parameters(model: nn.Module, keeper: HasCheckpoint, group: dist.ProcessGroup | None) -> None:
    """Raise a ValueError if ranks that save together differ in parameters, because `keeper` leaves gradients alone."""
    if not isinstance(keeper, HasPipeline) or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    pipeline = keeper.sync
    named = getattr(model, "module", model).named_parameters()
    apart = [name for name, p in named if not isinstance(p, DTensor) and _is_unreduced(pipeline, name)]
    if apart:
        raise ValueError(
            f"{pipeline} does not average gradients in every step, so {', '.join(apart[:3])} may differ between "
            "ranks, and a checkpoint would mix the parameters of several ranks: give each rank its own folder and "
            "group=dist.new_subgroups(1)[0], or, if outer.attach exchanges the parameters, pass its result as `sync`"
        )


def _is_unreduced(sync: Sync, path: str) -> bool:
    if isinstance(sync, partition):
        rule = sync.rule_of(path)
        return rule is not None and _is_unreduced(rule, path)
    return isinstance(sync, unreduced) or any(_is_unreduced(each, path) for each in sync.children())
