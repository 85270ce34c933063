"""The names of process groups: pipelines store names instead of groups."""

from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fnddp.wire.groups import GroupName, traced_name

Group: TypeAlias = dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str] | str | None
"""A process group, its name, a one-dimensional mesh, one dimension of a mesh, or None for the default group."""


def group_name(group: Group) -> str | None:
    """Return the name of `group`, None for the default one: names compare, print, parse and pickle.

    The name of an existing group refers only to that group, not to a later one of the same name.
    """
    if group is None:
        return None
    if isinstance(group, str):
        if torch.compiler.is_compiling():
            return traced_name(group)
        return group if isinstance(group, GroupName) else GroupName.of(group)
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        mesh, dim = group
        return group_name(mesh.get_group(dim))
    if isinstance(group, DeviceMesh):
        return group_name(group.get_group())
    if isinstance(group, dist.ProcessGroup):
        return None if group is dist.group.WORLD else GroupName(group.group_name, group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            "group is NON_GROUP_MEMBER: this rank is not in that process group; build the pipeline only on member ranks"
        )
    raise TypeError(f"group must be a ProcessGroup, its name, a DeviceMesh or (mesh, dim), got {group!r}")
