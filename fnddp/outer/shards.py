"""Workers with models sharded by FSDP2: each rank exchanges its own shards with the same shards of other workers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fnddp.core.agreement import agree_over
from fnddp.core.group import Group, group_name
from fnddp.torch_private import fsdp_groups, local_of, root_mesh
from fnddp.wire.c10d import C10d
from fnddp.wire.control import total
from fnddp.wire.groups import live_group
from fnddp.wire.protocol import Wire

_MODEL = "the model of outer.attach"


@dataclass(frozen=True)
class WorkerShards:
    """The division of a worker's parameters between its ranks. With the defaults, each rank has whole parameters."""

    groups: tuple[str | None, ...] = ()  # process groups within the worker: their ranks hold its other shards
    voters: tuple[str | None, ...] = ()  # vote on exchanges; none over another wire than C10d: `commit` decides
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])  # of whole parameters, in elements, by name
    place: str = ""  # this rank's shard, in words
    modules: tuple[Any, ...] = ()  # that FSDP may have left unsharded
    ranks: int = 1  # of the worker
    is_first: bool = True  # on one of them

    def total(self, number: int) -> int:
        """Return the sum of `number` over the ranks of the worker."""
        for group in self.groups:
            number = total(number, group)
        return number

    def reshard(self) -> None:
        """Shard all parameters again: a forward without a backward leaves them whole."""
        for module in self.modules:
            module.reshard()


def shards_of(
    model: nn.Module, group: Group, wire: Wire, commit: Callable[[], bool] | None, *, init_sync: bool = True
) -> WorkerShards:
    """Return how the parameters of `model` that require gradients are sharded, or `WorkerShards()`.

    All ranks of `group`, which hold the same shard in each worker, must call it; if `group` is a dimension of a mesh,
    all ranks of the mesh. They all raise an error of one of them, or if only some have whole parameters. See `attach`.
    """
    modules = tuple(module for module, _ in fsdp_groups(model).values())
    made = WorkerShards(modules=modules)
    made.reshard()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sharded = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
    if not sharded:
        if init_sync and isinstance(wire, C10d) and dist.is_initialized():
            agree_over(lambda: {_MODEL: "whole on each rank"}, _everyone(group, None))
        return WorkerShards()
    largest = max((p.device_mesh for p in sharded.values()), key=DeviceMesh.size)

    def check() -> dict[str, str]:
        for name, p in parameters.items():
            if not isinstance(p, DTensor):
                raise TypeError(
                    f"outer.attach: parameter {name!r} is not sharded but others are, so it would differ between the "
                    "ranks of a worker; call fully_shard on the whole model first, with mesh=mesh['shard']"
                )
            if not ranks_of(p.device_mesh) <= ranks_of(largest):
                raise TypeError(f"outer.attach: parameter {name!r} is on {p.device_mesh}, and others are on {largest}")
        if isinstance(wire, C10d):
            _require_workers(group, largest)
        elif commit is None:
            raise ValueError(
                "outer.attach: over a wire other than torch.distributed's, the ranks of a sharded worker can agree "
                "only through `commit`; pass it, as in commit=manager.should_commit"
            )
        return {_MODEL: "sharded by fully_shard"}

    agree_over(check, _everyone(group if isinstance(wire, C10d) else largest, largest))
    groups = tuple(dict.fromkeys(groups_of_mesh(largest)))
    voters = groups if isinstance(wire, C10d) else ()
    place = f"{largest.get_coordinate()} of {list(largest.shape)}"
    sizes = {name: p.numel() for name, p in sharded.items()}
    return WorkerShards(groups, voters, sizes, place, modules, largest.size(), not any(largest.get_coordinate() or ()))


def _everyone(group: Group, shards: DeviceMesh | None) -> list[Group]:
    """Return the groups that, one after the other, spread an error of one rank to all ranks that call `attach`.

    For a mesh of workers and shards these are the groups of all dimensions, because a rank may pass a wrong `group`.
    """
    within = shards or (group[0] if isinstance(group, tuple) else group)
    if not isinstance(within, DeviceMesh):
        return [group]
    dims: list[Group] = [*groups_of_mesh(root_mesh(within))]
    return [*dims, group] if shards is not None and len(dims) == shards.ndim and group is not shards else dims


def _require_workers(group: Group, shards: DeviceMesh) -> None:
    """Raise a TypeError unless `group` connects workers: only one of its ranks may be in this worker's `shards`."""
    fix = (
        "make mesh = init_device_mesh(..., (workers, shards), mesh_dim_names=('worker', 'shard')), call fully_shard "
        "with mesh=mesh['shard'] and outer.attach with group=mesh['worker']"
    )
    if isinstance(group, DeviceMesh) and group.ndim != 1:
        raise TypeError(f"outer.attach: group={group} has {group.ndim} dimensions, expected one; {fix}")
    workers = set(dist.get_process_group_ranks(live_group(group_name(group))))
    if len(workers & ranks_of(shards)) > 1:
        raise TypeError(
            f"outer.attach: ranks {sorted(workers)} of group hold different shards of one worker, whose ranks are "
            f"{sorted(ranks_of(shards))}, but an exchange is between the same shards of several workers; {fix}"
        )


def ranks_of(mesh: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def groups_of_mesh(mesh: DeviceMesh) -> list[str | None]:
    """Return the name of this rank's group in each dimension."""
    return [group_name((mesh, dim)) for dim in range(mesh.ndim)]


def local(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a view of this rank's shard of it."""
    return local_of(tensor).detach()


def locals_of(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return an optimizer's state of a parameter, with this rank's shards in place of DTensors."""
    return {key: local(each) if isinstance(each, Tensor) else each for key, each in state.items()}
