"""Codecs for the flat buffers that FSDP2 sends for a group of parameters, with a row for each owner of a shard."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fnddp.core import collectives, layout
from fnddp.core.codec import Carrier, Key, Layers
from fnddp.core.group import Group, group_name
from fnddp.core.sync import Exchange, State
from fnddp.core.table import Cut, Hop, Table
from fnddp.core.tree import Leaves


@dataclass(frozen=True, eq=False)
class Rows:
    """The layout of a buffer, `[n, width]`: a row holds an owner's parts of all parameters, one after the other.

    A parameter is split along its sharded dimension into n parts, padded with zeros to the size of the first.
    """

    shapes: Mapping[str, torch.Size]  # of the parameters, by name
    dims: Mapping[str, int]  # the sharded dimension of each
    n: int  # the number of owners
    apart: bool = False  # True to encode each parameter by itself

    def pack(self, leaves: Leaves) -> Tensor:
        """Return the buffer `[n, width]` of whole `leaves`."""
        parts = {name: layout.in_rows(leaves[name].movedim(dim, 0), self.n) for name, dim in self.dims.items()}
        return torch.cat([part.movedim(1, 1 + self.dims[name]).flatten(1) for name, part in parts.items()], 1)

    def unpack(self, buffer: Tensor) -> Leaves:
        """Return the inverse of `pack`."""
        leaves: Leaves = {}
        for (name, part), columns in zip(self._parts.items(), buffer.split(self._widths, 1), strict=True):
            dim = self.dims[name]
            whole = columns.reshape(self.n, *part).movedim(1 + dim, 1).flatten(0, 1)
            leaves[name] = whole[: self.shapes[name][dim]].movedim(0, dim)
        return leaves

    @cached_property
    def _parts(self) -> dict[str, list[int]]:
        parts = {name: list(shape) for name, shape in self.shapes.items()}
        for name, dim in self.dims.items():
            parts[name][dim] = -(-parts[name][dim] // self.n)
        return parts

    @property
    def width(self) -> int:
        return sum(self._widths)

    @property
    def _widths(self) -> list[int]:
        return [cut.width for cut in self.table.cuts.values()]

    @cached_property
    def table(self) -> Table:
        """The rows of owners, by parameter."""
        parts = self._parts.items()
        return Table(self.n, {name: Cut(self.shapes[name].numel(), math.prod(part)) for name, part in parts})

    def encode(self, layers: Layers, buffer: Tensor, key: Key, row: int | None = None) -> Hop:
        """Encode whole rows; or their parts, by parameter, if `apart` or if a codec would average padding.

        `buffer` has all rows, or only row number `row`.
        """
        is_padded = any(cut.count < self.n * cut.width for cut in self.table.cuts.values())
        if not (self.apart or (is_padded and any(layer.codec.averages for layer in layers))):
            together = Table(self.n, {key.name: Cut(self.n * self.width, self.width)})
            return Hop.of(together, layers, {key.name: buffer}, key.rank)
        table = Table(self.n, {f"{key.name}/{name}": cut for name, cut in self.table.cuts.items()})
        of_rows = {name: [[table.count(name, r)] for r in range(self.n) if row in (None, r)] for name in table.cuts}
        counts = {name: torch.tensor(each, device=buffer.device) for name, each in of_rows.items()}
        parts = dict(zip(table.cuts, buffer.split(self._widths, 1), strict=True))
        return Hop.of(table, layers, parts, key.rank, counts)


@dataclass(frozen=True, repr=False)
class rows_to_owners(Carrier):
    """The first half of `two_shot`, instead of FSDP's reduce-scatter: owners add up their rows of all ranks' buffers.

    Leaves are the buffer, `""`, or, for `error_feedback`, gradients by name. The mean of `exchange` has one entry,
    `""`: the sum of this rank's row, `[width]`, in float32 or wider. `sent` is only computed for gradients by name.
    """

    group: Group = None
    name: str = ""
    rows: Any = None

    def carry(self, layers: Layers, leaves: Leaves, state: State) -> Exchange:
        rows, group = self.rows, group_name(self.group)
        assert isinstance(rows, Rows)
        buffer = leaves[""] if "" in leaves else rows.pack(leaves)
        rank = collectives.rank(group)
        hop = rows.encode(layers, buffer, Key(self.name, rank))
        own = torch.cat([*hop.scatter(rank, group).values()])
        return Exchange({"": own}, {} if "" in leaves else rows.unpack(torch.cat([*hop.decoded().values()], 1)), state)

    def carry_flat(self, layers: Layers, leaves: Leaves, state: State) -> tuple[Leaves, Leaves, State]:
        return self.carry(layers, leaves, state)


def rows_to_all(layers: Layers, row: Tensor, rows: Rows, name: str, group: str | None) -> Tensor:
    """Gather this rank's `row: [width]` as `allgather` does; return the decoded rows of all ranks: `[n, width]`."""
    rank = collectives.rank(group)
    hop = rows.encode(layers, row.unsqueeze(0), Key(name, rank), rank)
    return torch.cat([*hop.gather(rank, group).values()], 1)
