"""Ranks as the mapped dimension of one vmap. A collective is a sum, a gather or a transpose over that dimension."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnddp.wire.kinds import Kind, named

Division = tuple[tuple[int, ...], ...]
"""Process groups that share a name. They have equal sizes; each is a tuple of its ranks in order."""


@dataclass(frozen=True, eq=False)
class SimulatedRanks:
    """The `n` ranks of a simulation: the running rank (within vmap, all ranks at once), and groups by name."""

    n: int
    rank: Tensor
    groups: Mapping[str, Division] = field(default_factory=dict[str, Division])

    def size(self, group: str | None) -> int:
        """Return the number of ranks in each group called `group`."""
        return len(self.division(group)[0])

    def rank_in(self, group: str | None) -> Tensor:
        """Return the index of this rank in its group called `group`."""
        if group is None:
            return self.rank
        places = torch.empty(self.n, dtype=torch.int64, device=self.rank.device)
        for members in self.division(group):
            places[list(members)] = torch.arange(len(members), device=places.device)
        return places[self.rank]

    def division(self, group: str | None) -> Division:
        """Return all process groups that share the name `group`; raise a ValueError if there are none."""
        if group is None:
            return (tuple(range(self.n)),)
        if group not in self.groups:
            raise ValueError(
                f"simulate: the pipeline reduces over the process group {group!r}, whose ranks are not known; pass "
                f"them, as in simulate(sync, world_size={self.n}, groups={{{group!r}: ((0, 1), ...)}}), or build the "
                "pipeline without a group"
            )
        return self.groups[group]

    def moved(self, kind: Kind, payload: Tensor, op: str | None, group: str | None) -> Tensor:
        """Return the result of a collective where every rank sends its `payload`."""
        division = self.division(group)
        order = [rank for members in division for rank in members]
        everyone = _together(payload, kind.name, op, self.n, order, len(division))
        return everyone[self.rank] if kind.sends_rows or len(division) > 1 else everyone[0]


def _of_all(payload: Tensor, kind: str, op: str | None, n: int, order: Sequence[int], groups: int) -> Tensor:
    return _received(payload.expand(n, *payload.shape), kind, op, order, groups)


def _received(sends: Tensor, kind: str, op: str | None, order: Sequence[int], groups: int) -> Tensor:
    """Return `[n, *result]` for `[n, *payload]`; one row if all ranks receive the same."""
    of_kind = named(kind)
    if groups == 1:
        received = of_kind.together(sends, op)
        return received.clone() if of_kind.sends_rows else received[:1].clone()
    places = torch.tensor([*order], device=sends.device)
    received = torch.cat([of_kind.together(sends[members], op) for members in places.chunk(groups)])
    return received[places.argsort()]


def _like_received(payload: Tensor, kind: str, op: str | None, n: int, order: Sequence[int], groups: int) -> Tensor:
    of_kind = named(kind)
    rows = n if of_kind.sends_rows or groups > 1 else 1
    return payload.new_empty((rows, *of_kind.result_shape(tuple(payload.shape), n // groups)))


def _together_batch(
    info: Any,
    in_dims: tuple[int | None, ...],
    payload: Tensor,
    kind: str,
    op: str | None,
    n: int,
    order: Sequence[int],
    groups: int,
) -> tuple[Tensor, None]:
    assert in_dims[0] is not None
    assert info.batch_size == n
    return _received(payload.movedim(in_dims[0], 0), kind, op, order, groups), None


# A custom operation. Its vmap rule passes the mapped dimension to it as an ordinary one.
torch.library.define(
    "fnddp::together", "(Tensor payload, str kind, str? op, int n, int[] order, int groups) -> Tensor", tags=()
)
torch.library.impl("fnddp::together", "CompositeExplicitAutograd", _of_all)
torch.library.register_fake("fnddp::together", _like_received)
torch.library.register_vmap("fnddp::together", _together_batch)
_together: Any = torch.ops.fnddp.together.default
