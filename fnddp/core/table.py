"""Two hops on one table: send leaves to the ranks that own and add them, then send the owners' results to all ranks.

A table lists the elements of leaves in each rank's row of a message, and their positions. Every carrier that gives
ranks parts of leaves is a table with two operations: chunks of all leaves (`two_shot`), whole leaves and their rows
(`own`), shards (FSDP2), matrices.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fnddp.core import collectives
from fnddp.core.codec import Encoded, Key, Layers, Payload, encode, unit_of, wide
from fnddp.core.opaque import shortened
from fnddp.core.tree import Leaves
from fnddp.device import device_of
from fnddp.wire.groups import current


def columns(rows: Sequence[Sequence[str]], text: Collection[int] = (0,)) -> str:
    """Return `rows` as lines with aligned columns; `text` has the positions of columns that are not numbers.

    >>> print(columns([("collective", "slot", "payload"), ("c0", "0", "4 MB"), ("total", "", "12 MB")]))
    collective  slot  payload
    c0             0     4 MB
    total               12 MB
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if i in text else str.rjust for i in range(len(widths))]
    lines = [[side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)] for row in rows]
    return "\n".join(["  ".join(line).rstrip() for line in lines])


@dataclass(frozen=True)
class Entry:
    """Elements of a leaf in a table: `count` from `first` on, stored from `place` on in the row of rank `row`."""

    leaf: str
    first: int
    count: int
    row: int
    place: int


@dataclass(frozen=True)
class Cut:
    """The division of a leaf of `count` elements: into rows of `width` (the last ones padded), or whole to `owner`."""

    count: int
    width: int
    owner: int | None = None


@dataclass(frozen=True)
class Table:
    """The elements of leaves in the row of each of `n` ranks, in the order of the leaves.

    It depends only on the shapes of leaves and the number of ranks, so it is the same on all ranks. Places and counts
    are in elements before a codec; elements of complex leaves count twice. It prints a line for each part.

    >>> print(Table(2, {"w": Cut(5, 3), "b": Cut(2, 1)}))
    leaf  first  count  row  place
    w         0      3    0      0
    b         0      1    0      3
    w         3      2    1      0
    b         1      1    1      3
    """

    n: int
    cuts: Mapping[str, Cut]

    def parts(self) -> Iterator[Entry]:
        """Yield the non-empty parts, row by row; whole leaves come first, padded to the longest of these in any row."""
        whole = [sum(cut.count for cut in self.cuts.values() if cut.owner == row) for row in range(self.n)]
        for row in range(self.n):
            places = {False: 0, True: max(whole)}
            for leaf, cut in sorted(self.cuts.items(), key=lambda each: each[1].owner is None):
                is_cut, count = cut.owner is None, self.count(leaf, row)
                if count:
                    yield Entry(leaf, row * cut.width if is_cut else 0, count, row, places[is_cut])
                places[is_cut] += cut.width if is_cut else count

    def count(self, leaf: str, row: int) -> int:
        """Return the number of a leaf's elements in a row."""
        cut = self.cuts[leaf]
        if cut.owner is not None:
            return cut.count if cut.owner == row else 0
        return min(max(cut.count - row * cut.width, 0), cut.width)

    def counts(self, wires: Leaves) -> dict[str, Tensor | None]:
        """Return the number of elements of each leaf in each row, `[n, 1]`; None for a leaf without padding."""
        counts: dict[str, Tensor | None] = dict.fromkeys(wires)
        for leaf, wire in wires.items():
            cut = self.cuts[leaf]
            if cut.owner is None and cut.count < self.n * cut.width:
                left = cut.count - cut.width * torch.arange(self.n, device=wire.device)
                counts[leaf] = left.clamp(0, cut.width).unsqueeze(1)
        return counts

    def rows(self, wires: Leaves) -> Leaves:
        """Return the elements of leaves as rows: `[n, width]`, or `[1, width]` for a leaf with one owner."""
        made: Leaves = {}
        for leaf, wire in wires.items():
            cut = self.cuts[leaf]
            missing = 0 if cut.owner is not None else self.n * cut.width - cut.count
            made[leaf] = (pad(wire.reshape(-1), (0, missing)) if missing else wire).reshape(-1, cut.width)
        return made

    def __str__(self) -> str:
        rows = [tuple(map(str, vars(each).values())) for each in self.parts()]
        return columns([tuple(field.name for field in fields(Entry)), *rows])


class Hop:
    """Encoded rows of a table, with leaves in batches: a batch has leaves of one owner, or leaves that are cut.

    A batch is named by the path of its first leaf. The payloads of whole leaves share messages: a message of a bucket
    and a dtype has one row for each owner, padded to the longest. A batch of cut leaves has messages of its own.
    """

    def __init__(self, table: Table, batches: "Mapping[str, Batch]", encoded: Mapping[str, Encoded]) -> None:
        self.table, self.batches, self.encoded = table, batches, encoded
        bucket_of = current().bucket_of
        self._cut: dict[tuple[str, str], Tensor] = {}  # payloads that are messages
        self._whole: dict[tuple[str, str], list[list[tuple[str, str]]]] = {}  # batch and part, in each row of a message
        for name, each in encoded.items():
            owner, bucket = table.cuts[name].owner, None if bucket_of is None else bucket_of(name)
            for part, tensor in each.payload.items():
                if owner is None:
                    self._cut[name, part] = tensor
                else:
                    key = f"owners {bucket}", f"{part} {tensor.dtype}"
                    self._whole.setdefault(key, [[] for _ in range(table.n)])[owner].append((name, part))

    @classmethod
    def of(
        cls,
        table: Table,
        layers: Layers,
        rows: Leaves,
        rank: Any,
        counts: Mapping[str, Tensor | None] | None = None,
        again: str = "",
        encoded: Callable[[Layers, Tensor, Key, Tensor | None], Encoded] = encode,
    ) -> "Hop":
        """Encode `rows` of leaves in batches; the name of a batch and `again` are the key of its random numbers.

        `counts` has the numbers of elements in the rows of a leaf that are not padding, `[rows, 1]`; None for all.
        """
        of_owner: dict[int | None, Leaves] = {owner: {} for owner in (*range(table.n), None)}
        for path, row in rows.items():
            of_owner[table.cuts[path].owner][path] = row
        batches = {name: batch for each in of_owner.values() for name, batch in batches_of(layers, each).items()}
        counts = counts or {}
        made: dict[str, Encoded] = {}
        for name, batch in batches.items():
            made[name] = encoded(layers, batch.x, Key(name + again, rank), counts.get(name) if batch.is_one else None)
        return cls(table, batches, made)

    def scatter(self, rank: int, group: str | None) -> Leaves:
        """Send rows to their owners; return the sums of the rows that this rank received from all ranks, by batch."""
        return self.added(collectives.all_to_all_leaves(self.to_each(), group), rank)

    def gather(self, rank: int, group: str | None, wires: Leaves | None = None) -> Leaves:
        """Send the row of this rank to all; return all decoded rows, by batch.

        `wires` has this rank's value of every leaf. Messages depend on all of them, even on leaves that this rank does
        not send: otherwise a plan would order messages by the leaves that its rank owns.
        """
        mine: dict[tuple[str, str], Tensor] = dict(self._cut)
        for key, rows in self._whole.items():
            row = self._row(key, rank)
            paths = [path for each in rows for name, _ in each for path in self.batches[name].paths]
            mine[key] = torch.cat([row, *((wires or {})[path][:0].to(row.dtype) for path in dict.fromkeys(paths))])
        moved = collectives.all_gather_leaves(mine, group)
        return {name: each.decode(self.payload(moved, name, of_owner=True)) for name, each in self.encoded.items()}

    def added(self, moved: Mapping[Any, Tensor], rank: int) -> Leaves:
        """Return the sums of the decoded payloads of all ranks, by batch, in rank order, in float32 or wider.

        A batch of another owner becomes empty slices of all its messages, because a plan drops messages never read.
        """
        sums: Leaves = {}
        n = self.table.n
        for name, each in self.encoded.items():
            if self.table.cuts[name].owner not in (None, rank):
                read = [key for key, rows in self._whole.items() if any(name in dict(row) for row in rows)]
                sums[name] = torch.cat([moved[key].reshape(-1)[:0].to(torch.float32) for key in read])
                continue
            sums[name] = added_up(each.decode, self.payload(moved, name), n, self.batches[name].x[0])
        return sums

    def decoded(self) -> Leaves:
        """Return this rank's encoded rows as other ranks decode them, by batch."""
        return {name: each.decode(each.payload) for name, each in self.encoded.items()}

    def split(self, by_batch: Leaves) -> Leaves:
        """Split tensors by batch into tensors by leaf."""
        return {path: row for name, x in by_batch.items() for path, row in self.batches[name].split(x).items()}

    def to_each(self) -> dict[tuple[str, str], Tensor]:
        """Return the messages to owners, each with one row for each owner: `[n, ...]`."""
        whole = {key: torch.stack([self._row(key, r) for r in range(self.table.n)]) for key in self._whole}
        return self._cut | whole

    def of_each(
        self, rank: int, payloads: Mapping[str, Payload], device: torch.device
    ) -> dict[tuple[str, str], Tensor]:
        """Return messages with a row for each rank, `[n, width]`, from `payloads: [n, ...]` of the leaves of `rank`."""
        made: dict[tuple[str, str], Tensor] = {}
        for key, rows in self._whole.items():
            flat = [payloads[name][part].reshape(self.table.n, -1) for name, part in rows[rank]]
            like, missing = self._padding(key, rank)
            made[key] = torch.cat([*flat, like.new_zeros(self.table.n, missing, device=device)], 1)
        return made

    def payload(self, moved: Mapping[Any, Tensor], name: str, *, of_owner: bool = False) -> Payload:
        """Return the payloads of a batch that this rank received from all ranks, or with `of_owner` from its owner."""
        owner, like = self.table.cuts[name].owner, self.encoded[name].payload
        if owner is None:
            return {part: moved[name, part].reshape(-1, *each.shape[1:]) for part, each in like.items()}
        payload: Payload = {}
        for key, rows in self._whole.items():
            at = 0
            for other, part in rows[owner]:
                size = self.encoded[other].payload[part].numel()
                if other == name:
                    row = moved[key][owner : owner + 1] if of_owner else moved[key]
                    payload[part] = row[:, at : at + size].reshape(-1, *like[part].shape[1:])
                at += size
        return payload

    def _padding(self, key: tuple[str, str], rank: int) -> tuple[Tensor, int]:
        """Return a tensor with the dtype of a message, and the number of padding elements in the row of `rank`."""
        parts = [[self.encoded[name].payload[part] for name, part in row] for row in self._whole[key]]
        sizes = [sum(each.numel() for each in row) for row in parts]
        return next(each for row in parts for each in row), max(sizes) - sizes[rank]

    def _row(self, key: tuple[str, str], rank: int) -> Tensor:
        flat = [self.encoded[name].payload[part].reshape(-1) for name, part in self._whole[key][rank]]
        like, missing = self._padding(key, rank)
        flat += [like.new_zeros(missing)] if missing else []
        return torch.cat(flat) if len(flat) > 1 else flat[0]


def added_up(decode: Callable[[Payload], Tensor], payload: Payload, n: int, like: Tensor) -> Tensor:
    """Return the sum of the `n` decoded rows of a payload in rank order, in float32 or wider; a row is `like`."""
    at_a_time = max(BLOCK // like.numel(), -(-n // MOST_BLOCKS))
    total: Any = None
    for first in range(0, n, at_a_time):
        few = {part: x[first : first + at_a_time] for part, x in payload.items()} if at_a_time < n else payload
        total = collectives.sum_in_rank_order(decode(few).to(wide(like.dtype)), total)
    return total


BLOCK = 1 << 22
"""Elements decoded at a time, 16 MiB: so there is no copy of a large leaf for each rank. See `MOST_BLOCKS`."""
MOST_BLOCKS = 16
"""The largest number of blocks of a leaf, because each adds operations, also to a plan."""


class Batch:
    """Rows of leaves that are encoded together, in pieces of one size: `[rows, pieces, unit]`.

    A leaf has one or more pieces, the last one padded with zeros. A batch of one leaf that is encoded alone, `is_one`,
    has no unit, and is `[rows, n]`.
    """

    def __init__(self, rows: Leaves, unit: int | None) -> None:
        self._widths = {path: each.shape[1] for path, each in rows.items()}
        self.paths, self.is_one, self._unit = list(rows), unit is None, unit or 1
        self._pieces = [-(-width // self._unit) for width in self._widths.values()]
        self.x = self.join(rows)

    def join(self, rows: Leaves) -> Tensor:
        """Concatenate `[rows, n]` of each leaf to `[rows, pieces, unit]`; zeros fill the last piece of each leaf."""
        if self.is_one:
            return rows[self.paths[0]]
        parts: list[Tensor] = []
        zero = rows[self.paths[0]].new_zeros(1)
        for path, pieces in zip(self.paths, self._pieces, strict=True):
            missing = pieces * self._unit - rows[path].shape[1]
            parts += [rows[path], zero.expand(rows[path].shape[0], missing)] if missing else [rows[path]]
        return (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).unflatten(1, (-1, self._unit))

    def split(self, x: Tensor) -> Leaves:
        """Return `[rows, n]` of each leaf from `x: [rows, pieces, unit]`: the inverse of `join`."""
        if self.is_one:
            return {self.paths[0]: x}
        parts = zip(self._widths.items(), x.split(self._pieces, 1), strict=True)
        return {path: shortened(part.flatten(1), width) for (path, width), part in parts}

    def cleared(self, x: Tensor, lengths: Mapping[str, int], *, is_kept: bool) -> Tensor:
        """Return `x` with zeros after the first `lengths` elements of each leaf's row.

        Return `x` itself if elements are encoded independently and their error is not kept: padding is harmless then.
        """
        pieces = zip(self.paths, self._pieces, strict=True)
        if (self._unit == 1 and not is_kept) or all(n * self._unit == lengths[path] for path, n in pieces):
            return x
        return self.join({path: row[:, : lengths[path]] for path, row in self.split(x).items()})


def batches_of(layers: Layers, rows: Leaves) -> dict[str, Batch]:
    """Return `rows` of leaves in batches that are encoded together, by the path of their first leaf.

    In a plan, a batch has the leaves of a bucket, up to the size where joining costs more than it saves. Otherwise each
    leaf is alone. The encoded bits are the same.
    """
    bucket_of = current().bucket_of
    found: list[tuple[Leaves, int | None]] = []
    last: dict[Any, tuple[Leaves, int]] = {}  # the last batch of each kind, and its bytes
    for path, row in rows.items():
        unit = None if bucket_of is None else unit_of(layers, row.shape[1])
        bucket = None if bucket_of is None or unit is None else bucket_of(path)
        nbytes = row.numel() * row.element_size()
        if unit is None or bucket is None or nbytes > device_of(row.device).light_bytes:
            found.append(({path: row}, None))
            continue
        alike = bucket, unit, row.dtype, row.device
        members, size = last.get(alike, ({}, 0))
        if not members or size + nbytes > device_of(row.device).light_bytes:
            members, size = {}, 0
            found.append((members, unit))
        members[path] = row
        last[alike] = members, size + nbytes
    return {next(iter(members)): Batch(members, unit) for members, unit in found}
