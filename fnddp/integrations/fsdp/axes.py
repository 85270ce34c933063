"""All axes of a sharded model under one handle: gradients and weights of its shards, and its replicas."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fnddp.adapters.checkpoint import Checkpoint, Checkpoints, set_states
from fnddp.core.agreement import agree_over
from fnddp.core.group import group_name
from fnddp.core.options import checked_int
from fnddp.core.sync import State, Sync, all_in
from fnddp.integrations.fsdp.plan import AxesPlan, Axis, axes_of
from fnddp.integrations.fsdp.replicas import Replicas, checked_pipeline, compress_replicas
from fnddp.integrations.fsdp.rows import Rows
from fnddp.integrations.fsdp.shards import Pipeline, Shards, fitting, set_up_shards, unsynchronized
from fnddp.integrations.fsdp.unit import Messages, Traffic, traffic_of
from fnddp.outer.contract import Outer, outer_of
from fnddp.outer.plan import lower as lower_outer
from fnddp.plan.period import period
from fnddp.plan.plan import Plan
from fnddp.reducers.all_reduce import allreduce
from fnddp.schedules.choose import partition
from fnddp.torch_private import fsdp_groups


class Compressed:
    """The pipelines of all axes of a model: see `compress`.

    Attributes:
        shards: The handle of its shards; None if FSDP sends their messages without codecs.
        replicas: The handle of its replicas; None without replicas.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, shards: Shards | None, replicas: Replicas | None) -> None:
        self.shards, self.replicas, self._model, self._mesh = shards, replicas, model, mesh
        every: dict[str, Any] = {"shards": shards, "replicas": replicas}
        self._handles = {name: handle for name, handle in every.items() if handle is not None}

    @property
    def plan(self) -> AxesPlan:
        """The messages of the next step, with the parameters that require a gradient now: see `AxesPlan`."""
        axes = [] if self.shards is None else [*self.shards.plan.axes]
        if self.replicas is not None:
            axes.append(_of_replicas(self.replicas.sync, self.replicas.prepare(), self._mesh.size(0)))
        return AxesPlan(tuple(axes))

    @property
    def sync_state(self) -> dict[str, State]:
        """The state of `"shards"` and of `"replicas"`. Set it on all ranks."""
        return {name: handle.sync_state for name, handle in self._handles.items()}

    @sync_state.setter
    def sync_state(self, state: Mapping[str, State]) -> None:
        def read(name: str) -> State:
            if not isinstance(state, Mapping) or self._handles.keys() - state.keys():  # some compare nothing
                raise ValueError(f"compress: sync_state must have the keys {[*self._handles]}, got {[*(state or ())]}")
            return state[name]

        set_states((handle.prepare_state, partial(read, name)) for name, handle in self._handles.items())

    def refuse(self, error: BaseException | None) -> None:
        """See `HasCheckpoint.refuse`."""
        for handle in self._handles.values():
            handle.refuse(error)

    def reset_sync(self) -> None:
        """Set the states of all axes to the initial ones. All ranks call it, between steps."""
        for handle in self._handles.values():
            handle.reset_sync()

    def sync_checkpoint(self, saved_world_size: tuple[int, ...] | None = None) -> Checkpoints:
        """Return the state for torch.distributed.checkpoint: see `fnddp.integrations.checkpoint.save`.

        Args:
            saved_world_size: The numbers of ranks that saved it, as `Checkpoints.saved_by` returns them. The number of
                shards may change only for state of shards; state of replicas needs the same number of shards.
        """
        saved = dict(zip(self._handles, saved_world_size or (None,) * len(self._handles), strict=True))
        made: list[Checkpoint] = []
        if self.shards is not None:
            ranks: list[int] = self._mesh.mesh.flatten().tolist()
            place = ranks.index(dist.get_rank()), len(ranks)
            # Other ranks, of tensor or pipeline parallelism, have states of their own.
            prefix = "shards/" if len(ranks) == dist.get_world_size() else f"shards_from_rank{min(ranks)}/"
            made.append(Checkpoint(self.shards, None, saved["shards"], prefix, place))
        if self.replicas is not None:
            made.append(self.replicas.sync_checkpoint(saved["replicas"]))
        return Checkpoints(made)

    def sync_stats(self) -> dict[str, Any]:
        """Return the wire bytes along each axis, and the replicas' other statistics.

        The bytes of weights are those of one micro-batch, as in `plan`.
        """
        of_replicas: Mapping[str, Any] = {} if self.replicas is None else self.replicas.sync_stats()
        own = {} if self.shards is None else {"steps": self.shards.steps, "failed_steps": self.shards.failed_steps}
        sent = {f"{axis.name}_bytes": axis.wire_bytes for axis in self.plan.axes}
        return {**own, **sent, **of_replicas}

    def weight(self, count: float) -> AbstractContextManager[None]:
        """Weight this rank's gradients by `count` in the means over all ranks, for `weighted`: see `Shards.weight`."""
        handle: Any = self.replicas or self.shards
        return handle.weight(count)

    def no_sync(self) -> AbstractContextManager[None]:
        """Send no gradients in the block, and keep whole gradients: see `Shards.no_sync`."""
        return unsynchronized(self._model)


def plan_axes(
    groups: Mapping[str, Mapping[str, Tensor]],
    *,
    world_size: Mapping[str, int] | None = None,
    gradients: str | Sync | None = None,
    weights: str | Sync | None = None,
    replicas: str | Sync | None = None,
    outer: str | Outer | None = None,
) -> AxesPlan:
    """Return the plan of the messages that `compress` would send on a cluster, without running it and without ranks.

    The wrong function if gradients are reduced or weights are gathered in another dtype: use the `plan` of `compress`.

    Args:
        groups: The parameters of each `fully_shard` call, by module name and by parameter name; only shapes and dtypes
            count. `""` is the model itself: its weights stay whole between forward and backward.
        world_size: The numbers of `"shards"` (parameters are sharded along their first dimension), of `"replicas"` of
            the shards, and of `"workers"`, each with its own replicas; 1 for missing keys.
        gradients: The pipeline of gradients between shards: see `compress_shards`; None for FSDP's own reduce-scatter.
        weights: The pipeline of weights between shards; None for FSDP's own all-gather.
        replicas: The pipeline between replicas; its largest step after all warm-ups is planned. None for `allreduce`.
        outer: The outer step between workers; the exchanges of a whole period are planned.

    Raises:
        TypeError: A pipeline does not fit its axis: see `compress`; it is a `partition`; or a number is not an int.
        ValueError: `world_size` has other keys, or a number below 1, or only one of workers and `outer` is given; two
            groups have a parameter of the same name; a group has no parameters, or a scalar.

    >>> import torch
    >>> from fnddp import Link
    >>> model = {"": {"weight": torch.empty(512, 512, device="meta"), "bias": torch.empty(512, device="meta")}}
    >>> print(plan_axes(
    ...     model, world_size={"shards": 8, "replicas": 4}, gradients="quantize(two_shot, bits=4)"
    ... ).show(Link.parse("1gbit")))
    axis       pipeline                    ranks  messages   payload  on the link      time
    gradients  quantize(two_shot, bits=4)      8         2  139.8 kB     122.3 kB  978.7 us
    weights    FSDP's own                      8         1  131.3 kB     919.3 kB  7.354 ms
    replicas   allreduce                       4         1  131.3 kB       197 kB  1.576 ms
    """
    given = {"shards": 1, "replicas": 1, "workers": 1, **(world_size or {})}
    sizes = {axis: checked_int(f"plan_axes: world_size of {axis!r}", size) for axis, size in given.items()}
    if len(sizes) > 3 or min(sizes.values()) < 1:
        raise ValueError(f'plan_axes: world_size must be {{"shards": N, "replicas": N, "workers": N}}, got {given}')
    step = None if outer is None else outer_of("plan_axes: outer", outer)
    if (step is None) == ("workers" in (world_size or {})):
        raise ValueError(f"plan_axes: outer and 'workers' in world_size need each other, got {outer} and {world_size}")
    n = sizes["shards"]
    of_gradients, of_weights = fitting("gradients", gradients), fitting("weights", weights)
    if several := [sync for sync in (of_gradients, of_weights) if sync and partition in map(type, all_in(sync))]:
        raise TypeError(f"plan_axes: {several[0]!r} has a pipeline for each pattern; plan the groups of each alone")
    traffic: list[Traffic] = []
    owner: dict[str, str] = {}
    local: dict[str, Tensor] = {}
    for name, parameters in groups.items():
        if not parameters or not all(p.ndim for p in parameters.values()):
            raise ValueError(f"plan_axes: group {name!r} must have parameters, and no scalar: FSDP cuts a dimension")
        for path in parameters:
            if (first := owner.setdefault(path, name)) != name:
                raise ValueError(
                    f"plan_axes: groups {first!r} and {name!r} both have a parameter {path!r}; name each as "
                    "model.named_parameters() does, as in layer.named_parameters('layers.0') for the group 'layers.0'"
                )
        like = next(iter(parameters.values()))
        rows = Rows({path: p.shape for path, p in parameters.items()}, dict.fromkeys(parameters, 0), n)
        again = n if name else None
        traffic.append(traffic_of(rows, rows, of_gradients, of_weights, (like.dtype, like.dtype), again))
        # The shards of the first rank: it has most elements.
        local |= {path: p.new_empty(-(-p.shape[0] // n), *p.shape[1:]) for path, p in parameters.items()}
    sends_weight = of_gradients is not None and of_gradients.takes_weight
    axes = [*axes_of(traffic, of_gradients, of_weights, n, sends_weight)]
    if sizes["replicas"] > 1 or replicas is not None:
        pipeline = checked_pipeline("plan_axes", replicas or allreduce, n, sends_weight if n > 1 else None)
        plans = [each.plan for each in period(pipeline, local, world_size=sizes["replicas"])]
        axes.append(_of_replicas(pipeline, max(plans, key=lambda plan: plan.wire_bytes), sizes["replicas"]))
    if step is not None:
        step = step.sized({path: p.numel() for parameters in groups.values() for path, p in parameters.items()})
        exchanges = lower_outer(step, step.leaves_of(local, None), world_size=sizes["workers"])
        messages = tuple(m for each in exchanges.exchanges for m in _messages(each.plan, sizes["workers"]))
        axes.append(Axis("workers", repr(step.over(None)), sizes["workers"], messages, exchanges.period))
    return AxesPlan(tuple(axes))


def _of_replicas(sync: Sync, plan: Plan | None, ranks: int) -> Axis:
    return Axis("replicas", repr(sync.over(None)), ranks, () if plan is None else _messages(plan, ranks))


def _messages(plan: Plan, ranks: int) -> Messages:
    return tuple((each.kind.name, each.wire_bytes, ranks) for each in plan.collectives)


def compress(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    gradients: Pipeline = None,
    weights: Pipeline = None,
    replicas: str | Sync | None = None,
) -> Compressed:
    """Send the messages of a sharded model along all axes of a mesh through pipelines. All of its ranks must call this.

    It calls `compress_shards`, then `compress_replicas`, and returns one handle for both. The wrong choice for a model
    on one axis: use the function of that axis. If experts are sharded over other ranks than the rest, use
    `compress_shards`, because it supports several meshes.

    Args:
        model: A model after `fully_shard` over the last dimension of `mesh`, also of the model as a whole.
        mesh: The mesh of its shards; or of replicas and shards, in two dimensions with names, as for HSDP.
        gradients: The pipeline of gradients between shards, or a dict of pipelines by pattern: see `compress_shards`.
            `"two_shot"` sends them unencoded, and `"weighted(two_shot)"` is for means over tokens; the pipeline between
            replicas must then be `weighted`, too.
        weights: The pipeline of weights between shards: see `compress_shards`.
        replicas: The pipeline of gradients between replicas: see `compress_replicas`. None if FSDP averages there,
            because `fully_shard` got both dimensions.

    Raises:
        TypeError: No pipeline is given; the mesh has no dimension for a pipeline, or its ranks are not those of the
            model's shards or of a part of them; or nothing averages between replicas.
        TypeError, RankMismatchError: See the two functions.

    >>> from torch.distributed import init_device_mesh
    >>> from torch.distributed.fsdp import fully_shard
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    >>> model = fully_shard(nn.Linear(8, 8), mesh=mesh["shard"])
    >>> handle = compress(model, mesh, gradients="quantize(two_shot)", replicas="bf16(allreduce)")
    >>> print(handle.plan)
    axis       pipeline            ranks  messages  payload  on the link
    gradients  quantize(two_shot)      1         0      0 B          0 B
    weights    FSDP's own              1         0      0 B          0 B
    replicas   bf16(allreduce)         1         1    144 B          0 B
    >>> dist.destroy_process_group()
    """
    names = mesh.mesh_dim_names
    across = [group_name(mesh.get_group(0))] if mesh.ndim == 2 else []  # ranks may disagree about having a pipeline
    modules = fsdp_groups(model)
    of_model = [group.shards for _, groups in modules.values() for group in groups if group.shards is not None]

    def check() -> dict[str, str]:
        if gradients is None and weights is None and replicas is None:
            raise TypeError("compress: give a pipeline for gradients, weights or replicas")
        if replicas is not None and (mesh.ndim != 2 or names is None):
            raise TypeError(
                f"compress: replicas={replicas!r} needs a mesh with two named dimensions, replicas and shards, got "
                f"{mesh}; make it with init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))"
            )
        last = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
        for name, (_, groups) in modules.items():
            for group in groups:
                ranks = [] if group.shards is None else dist.get_process_group_ranks(group.shards)
                if ranks != last:
                    raise TypeError(
                        f"compress: {repr(name) if name else 'the model'} is sharded over the ranks {ranks}, but the "
                        f"last dimension of the mesh has the ranks {last}; pass the mesh of fully_shard, with the "
                        "replicas' dimension first. If experts have their own mesh, call compress_shards instead of "
                        "compress: compress_shards(model, gradients={'*.experts.*': ..., '*': ...})"
                    )
                if mesh.ndim == 2 and mesh.size(0) > 1 and replicas is None and group.replicas is None:
                    raise TypeError(
                        f"compress: nothing averages gradients of {name!r} between the replicas of {mesh}; give a "
                        "pipeline, such as replicas='allreduce', or, if workers train apart, only the mesh of shards"
                    )
        given = {"gradients": gradients, "weights": weights, "replicas": replicas}  # the functions below compare those
        return {"the axes with a pipeline": ", ".join(axis for axis, each in given.items() if each is not None)}

    agree_over(check, [*dict.fromkeys(map(group_name, of_model)), *across])
    of_shards = of_replicas = None
    if not (gradients is None and weights is None):
        of_shards = set_up_shards(model, gradients, weights, across)
    if replicas is not None:
        assert names is not None
        of_replicas = compress_replicas(model, replicas, mesh[names[0]])
    return Compressed(model, mesh, of_shards, of_replicas)
