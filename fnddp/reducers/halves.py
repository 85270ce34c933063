"""The two halves of a mean: each leaf to the rank that owns it, and what owners have made of theirs to all."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fnddp.core import collectives, layout
from fnddp.core.codec import (
    Batch,
    Carrier,
    Encoded,
    Key,
    Layers,
    Payload,
    added_up,
    batches_of,
    encode,
    exchanged,
)
from fnddp.core.expression import CHECKS
from fnddp.core.group import Group, group_name
from fnddp.core.opaque import rounded, shortened
from fnddp.core.sync import Exchange, State, Sync, transform
from fnddp.core.tree import Leaves, is_inexact, ordered
from fnddp.wire.groups import current


@dataclass(frozen=True)
class Owners:
    """The owner of each leaf, or of its rows: a table that is the same on all ranks.

    Attributes:
        n: The number of ranks.
        shapes: The shape of each leaf, by path.
        whole: The rank that owns a whole leaf, by path.
        load: The cost of all that a rank owns, `[n]`.
    """

    n: int
    shapes: tuple[tuple[str, torch.Size], ...]
    whole: tuple[tuple[str, int], ...]
    load: tuple[float, ...] = field(compare=False, default=())

    @classmethod
    def of(
        cls, leaves: Mapping[str, Tensor], n: int, costs: Mapping[str, float] | None = None, cut: Iterable[str] = ()
    ) -> "Owners":
        """Return owners for `leaves` that have about the same cost each: the costliest leaf first, to the least load.

        Leaves of equal cost go around the ranks in the reverse order of their paths, the same on all ranks, so that
        each rank owns a share of what arrives together in a backward.

        Args:
            costs: The cost of each leaf; None for the number of its elements.
            cut: Leaves of which each rank owns rows, `ceil(rows / n)` of them: the first rank the first ones.

        >>> leaves = {"a": torch.ones(4, 4), "b": torch.ones(3), "c": torch.ones(2, 5), "d": torch.ones(8, 2)}
        >>> owners = Owners.of(leaves, 2, cut={"d"})
        >>> dict(owners.whole), owners.load, owners.rows("d", 1)
        ({'a': 0, 'c': 1, 'b': 1}, (24.0, 21.0), (4, 8))
        """
        return cls.in_order(ordered(leaves), n, costs, cut)

    @classmethod
    def in_order(
        cls, leaves: Mapping[str, Tensor], n: int, costs: Mapping[str, float] | None = None, cut: Iterable[str] = ()
    ) -> "Owners":
        """Return owners as `of` does, in the order of `leaves`, such as a model's, which all ranks have agreed on."""
        apart = frozenset(cut)
        cost = {path: float(leaf.numel() if costs is None else costs[path]) for path, leaf in leaves.items()}
        load = [sum(cost[path] for path in apart) / n] * n
        whole: dict[str, int] = {}
        arriving = [path for path in reversed([*leaves]) if path not in apart]
        for path in sorted(arriving, key=lambda path: -cost[path]):
            whole[path] = rank = load.index(min(load))
            load[rank] += cost[path]
        shapes = tuple((path, leaf.shape) for path, leaf in leaves.items())
        return cls(n, shapes, tuple(whole.items()), tuple(load))

    def rows(self, path: str, rank: int) -> tuple[int, int]:
        """Return the first row of the leaf that `rank` owns, and the one behind the last; a scalar is one row."""
        owner, shape = self._owner[path], self._shape[path]
        height = shape[0] if shape else 1
        if owner is not None:
            return (0, height) if owner == rank else (0, 0)
        each = -(-height // self.n)
        return min(rank * each, height), min((rank + 1) * each, height)

    def shape(self, path: str) -> torch.Size:
        return self._shape[path]

    def sent_shape(self, path: str) -> torch.Size:
        """Return the shape of what `to_all` takes of a leaf, on all ranks: the leaf, or the rows of the first rank."""
        begin, end = self.rows(path, 0)
        whole = self._shape[path]
        return whole if self._owner[path] is not None else torch.Size([end - begin, *whole[1:]])

    def owner(self, path: str) -> int | None:
        """Return the rank that owns the leaf; None for one that is cut by rows."""
        return self._owner[path]

    def own(self, path: str, leaf: Tensor, rank: int) -> Tensor:
        """Return the rows of `leaf` that `rank` owns, on the same memory: `[rows, ...]`, a whole scalar, or `[0]`."""
        begin, end = self.rows(path, rank)
        return (leaf if end else leaf.reshape(1)[:0]) if leaf.ndim == 0 else leaf[begin:end]

    def __post_init__(self) -> None:
        owner: dict[str, int | None] = {path: None for path, _ in self.shapes}
        object.__setattr__(self, "_shape", dict(self.shapes))
        object.__setattr__(self, "_owner", owner | dict(self.whole))

    _shape: dict[str, torch.Size] = field(init=False, repr=False, compare=False)
    _owner: dict[str, int | None] = field(init=False, repr=False, compare=False)


def at_owners(encoded: Mapping[str, Encoded], like: Mapping[str, Tensor], group: str | None) -> Leaves:
    """Send row r of each payload to rank r; return the sum of what all ranks sent to this one, `[n]`, in rank order.

    Args:
        like: A row of each that is encoded, or what has its shape and dtype; the sum is in float32 or wider.
    """
    received = exchanged(encoded, lambda parts: collectives.all_to_all_leaves(parts, group))
    n = collectives.world_size(group)
    return {name: added_up(each, received[name], n, like[name]) for name, each in encoded.items()}


def of_owners(encoded: Mapping[str, Encoded], group: str | None) -> Leaves:
    """Send the one row of each payload to all ranks, and return the rows of all as all decode them, `[ranks, n]`."""
    everyone = exchanged(encoded, lambda parts: collectives.all_gather_leaves(parts, group))
    return {name: each.decode(everyone[name]) for name, each in encoded.items()}


def _checked_owners(what: str, value: Any) -> Owners:
    if not isinstance(value, Owners):
        raise TypeError(f"{what} must be a table of Owners.of(leaves, ranks), or None, got {value!r}")
    return value


CHECKS["Owners"] = _checked_owners


class _Half(Carrier):
    """What both halves share: batches of the leaves of each owner, and rows of payloads with a place for each owner."""

    group: Group = None
    owners: Owners | None = None

    def __repr__(self) -> str:  # the table is none of the text: it is for the leaves of one model
        return f"{type(self).__name__}({'' if self.group is None else f'group={self.group!r}'})"

    def carry_flat(self, layers: Layers, leaves: Leaves, state: State) -> tuple[Leaves, Leaves, State]:
        raise AssertionError("halves carry leaves in their shapes")

    def _here(self, leaves: Leaves) -> tuple[str | None, int, int, Owners]:
        """Return the group, its size, this rank in it, and the owners."""
        group = group_name(self.group)
        n, rank = collectives.world_size(group), collectives.rank(group)
        name = type(self).__name__
        if current().simulated is not None:
            raise TypeError(f"{name}: ranks own other leaves, which a simulation in one process cannot show; use ranks")
        owners = Owners.of(leaves, n) if self.owners is None else self.owners
        if owners.n != n:
            raise ValueError(f"{name}: the owners are for {owners.n} ranks, and there are {n}; make them anew")
        return group, n, rank, owners


@transform
class to_owners(_Half):
    """Send each leaf to the rank that owns it, which adds up in float32 in rank order: the first half of a mean.

    The mean of a leaf on a rank is what that rank owns of it: the leaf itself, its rows, or none, `[0, ...]`. Put
    together, they are the mean that `allgather` returns with the same codecs, to the bit; of leaves that are cut by
    rows, what the first hop of `two_shot` gives. A rank sends what all others own, once, whatever the number of ranks.
    Rows for owners are padded to the longest: little, if each owns about as many bytes of what travels together.

    The wrong choice as a synchronization by itself: other ranks do not have the mean. `own` runs an optimizer on it,
    and `to_all` sends what that makes of it.

    Args:
        group: See `all_reduce`.
        owners: Of the leaves, from `Owners.of`; None for whole leaves balanced by their elements.

    >>> to_owners()({"w": torch.ones(2)}, ())
    ({'w': tensor([1., 1.])}, ())
    """

    agrees: ClassVar[Any] = False  # ranks have other leaves

    group: Group = None
    owners: Owners | None = None

    def carry(self, layers: Layers, leaves: Leaves, state: State) -> Exchange:
        group, n, rank, owners = self._here(leaves)
        exact = {path: leaf for path, leaf in leaves.items() if not is_inexact(leaf) or not leaf.numel()}
        mean: Leaves = {
            path: owners.own(path, each, rank) for path, each in collectives.all_reduce(exact, "mean", group).items()
        }
        sent = dict(exact)
        wires = {path: layout.to_wire(leaf) for path, leaf in leaves.items() if path not in exact}
        whole = {path: wire.reshape(1, -1) for path, wire in wires.items() if owners.owner(path) is not None}
        cut = {path: _rows(wire, n) for path, wire in wires.items() if path not in whole}
        of_owner = [{path: row for path, row in whole.items() if owners.owner(path) == r} for r in range(n)]
        batches = [batches_of(layers, rows) for rows in of_owner]
        encoded = [{name: encode(layers, b.x, Key(name, rank)) for name, b in each.items()} for each in batches]
        of_rows = batches_of(layers, cut)
        lengths = {name: _lengths(wires[name], n) if layers and b.is_one else None for name, b in of_rows.items()}
        in_rows = {name: encode(layers, b.x, Key(name, rank), lengths[name]) for name, b in of_rows.items()}

        rows = OwnerRows(batches, encoded)
        moved = collectives.all_to_all_leaves(rows.to_each(), group)
        of_chunks = at_owners(in_rows, {name: batch.x[0] for name, batch in of_rows.items()}, group)
        ranks = collectives.ranks(group)
        flat: Leaves = {}
        for name, batch in batches[rank].items():
            payload = rows.received(moved, rank, name)
            total = added_up(encoded[rank][name], payload, n, batch.x[0]) / ranks
            flat |= {path: row[0] for path, row in batch.split(total.unsqueeze(0)).items()}
        for name, batch in of_rows.items():
            total = of_chunks[name] / ranks
            flat |= {path: row[0] for path, row in batch.split(total.unsqueeze(0)).items()}
        for r in range(n):
            for name, batch in batches[r].items():
                flat |= dict.fromkeys(batch.paths, rows.nothing(moved, name)) if r != rank else {}
        for path, wire in wires.items():
            begin, end = owners.rows(path, rank)
            like = leaves[path]
            own = rounded(flat[path], wire.dtype)
            if owners.owner(path) == rank:
                mean[path] = layout.from_wire(own.view(wire.shape), like)
                continue
            own = own.reshape(-1, *wire.shape[1:])[: end - begin]
            mean[path] = layout.as_complex(own) if like.is_complex() and own.ndim > 1 else own.to(like.dtype)
        if layers:
            decoded: Leaves = {}
            for r in range(n):
                for name, batch in batches[r].items():
                    decoded |= batch.split(encoded[r][name].decode(encoded[r][name].payload))
            for name, batch in of_rows.items():
                decoded |= batch.split(in_rows[name].decode(in_rows[name].payload))
            for path, wire in wires.items():
                own = rounded(shortened(decoded[path].reshape(-1), wire.numel()), wire.dtype).view(wire.shape)
                sent[path] = layout.from_wire(own, leaves[path])
        else:
            sent |= {path: leaves[path] for path in wires}
        return Exchange({path: mean[path] for path in leaves}, {path: sent[path] for path in leaves}, state)


@transform
class to_all(_Half):
    """Send what each rank owns to all, as codecs encode it: the second half of a mean.

    The input on a rank is what it owns of each leaf, as `to_owners` returns it; the mean is the whole leaf as all ranks
    decode it, equal on all to the bit. What is given of a leaf that another rank owns is not read. A plan needs leaves
    of the same shapes on all ranks: `Owners.sent_shape`. Rows of owners are padded to the longest.

    The wrong choice for gradients: nothing is added up.

    Args:
        group: See `all_reduce`.
        owners: Of the leaves, from `Owners.of`; None where all ranks give whole leaves, balanced by their elements.

    >>> to_all()({"w": torch.ones(2)}, ())
    ({'w': tensor([1., 1.])}, ())
    """

    group: Group = None
    owners: Owners | None = None

    def carry(self, layers: Layers, leaves: Leaves, state: State) -> Exchange:
        group, _, rank, owners = self._here(leaves)
        mean = {path: leaf for path, leaf in leaves.items() if not owners.shape(path).numel()}
        inexact = {path: leaf for path, leaf in leaves.items() if path not in mean and is_inexact(leaf)}
        others = {path: leaf for path, leaf in leaves.items() if path not in mean and path not in inexact}
        for each, codecs in ((inexact, layers), (others, ())):
            mean |= _gathered(codecs, each, owners, group, rank)
        sent = {path: leaf if path not in inexact else torch.zeros_like(leaf) for path, leaf in leaves.items()}
        for path in inexact:  # which counts n times in a mean
            own = owners.own(path, mean[path], rank) * collectives.ranks(group)
            if own.numel():
                missing = leaves[path].shape[0] - own.shape[0] if own.ndim else 0
                sent[path] = torch.cat([own, own.new_zeros(missing, *own.shape[1:])]) if missing else own
        sent |= {path: mean[path] for path in others}
        return Exchange({path: mean[path] for path in leaves}, sent, state)


def _gathered(layers: Layers, leaves: Leaves, owners: Owners, group: str | None, rank: int) -> Leaves:
    """Return whole leaves, of what each owner has of them."""
    wires = {path: layout.to_wire(leaf).reshape(-1) for path, leaf in leaves.items()}
    n = owners.n
    # Rows of other owners are encoded for their sizes alone, which plans do not run.
    of_owner: list[Leaves] = [{} for _ in range(n)]
    cut: Leaves = {}
    for path, wire in wires.items():
        owner, shape = owners.owner(path), owners.shape(path)
        numbers = shape.numel() * (2 if leaves[path].is_complex() else 1)
        if owner is None:
            chunk = -(-shape[0] // n) * (numbers // shape[0])
            cut[path] = pad(wire, (0, chunk - wire.numel())).unsqueeze(0)
        else:
            of_owner[owner][path] = (wire if owner == rank else wire.new_zeros(numbers)).unsqueeze(0)
    batches = [batches_of(layers, rows) for rows in of_owner]
    encoded = [{name: encode(layers, b.x, Key(f"{name} again", rank)) for name, b in each.items()} for each in batches]
    of_rows = batches_of(layers, cut)
    length: dict[str, Tensor | None] = {}
    for name, batch in of_rows.items():
        is_padded = layers and batch.is_one and wires[name].numel() < batch.x.shape[1]
        length[name] = torch.full((1, 1), wires[name].numel(), device=batch.x.device) if is_padded else None
    in_rows = {name: encode(layers, b.x, Key(f"{name} again", rank), length[name]) for name, b in of_rows.items()}

    rows = OwnerRows(batches, encoded)
    moved = collectives.all_gather_leaves(rows.of_one(rank, wires), group)
    of_chunks = of_owners(in_rows, group)
    flat: Leaves = {}
    for r in range(n):
        for name, batch in batches[r].items():
            flat |= batch.split(encoded[r][name].decode(rows.sent(moved, r, name)))
    for name, batch in of_rows.items():
        flat |= batch.split(of_chunks[name])
    whole: Leaves = {}
    for path, wire in wires.items():
        shape = [*owners.shape(path), *((2,) if leaves[path].is_complex() else ())]
        made = rounded(shortened(flat[path].reshape(-1), math.prod(shape)), wire.dtype).view(shape)
        if leaves[path].shape == owners.shape(path):
            whole[path] = layout.from_wire(made, leaves[path])
        else:
            whole[path] = layout.as_complex(made) if leaves[path].is_complex() else made
    return whole


class OwnerRows:
    """The payloads of whole leaves, by owner: those of one bucket and dtype have one row for each owner, padded."""

    def __init__(self, batches: list[dict[str, Batch]], encoded: list[dict[str, Encoded]]) -> None:
        self._encoded = encoded
        self._paths = [{name: batch.paths for name, batch in each.items()} for each in batches]
        bucket_of = current().bucket_of
        self._of: dict[tuple[str, str], list[list[tuple[str, str]]]] = {}  # batches and parts in each row, by message
        for r, each in enumerate(encoded):
            for name, batch in each.items():
                bucket = None if bucket_of is None else bucket_of(name)
                for part, tensor in batch.payload.items():
                    key = f"owners {bucket}", f"{part} {tensor.dtype}"
                    self._of.setdefault(key, [[] for _ in encoded])[r].append((name, part))

    def to_each(self) -> dict[tuple[str, str], Tensor]:
        """Return messages with a row for each owner: `[n, width]`."""
        made: dict[tuple[str, str], Tensor] = {}
        for key in self._of:
            made[key] = torch.stack([self._row(key, r) for r in range(len(self._encoded))])
        return made

    def of_one(self, rank: int, wires: Leaves) -> dict[tuple[str, str], Tensor]:
        """Return messages with the row of one owner, `[width]`, which depend on all leaves of all owners in them.

        Else plans would order messages on each rank by the leaves that it owns.
        """
        made: dict[tuple[str, str], Tensor] = {}
        for key, rows in self._of.items():
            row = self._row(key, rank)
            batches = [(r, name) for r, each in enumerate(rows) for name, _ in each]
            names = dict.fromkeys(path for r, name in batches for path in self._paths[r][name])
            made[key] = torch.cat([row, *(wires[path][:0].to(row.dtype) for path in names)])
        return made

    def of_each(
        self, rank: int, payloads: Mapping[str, Payload], device: torch.device
    ) -> dict[tuple[str, str], Tensor]:
        """Return messages with a row for each rank, `[n, width]`, of `payloads: [n, ...]` of what `rank` owns."""
        made: dict[tuple[str, str], Tensor] = {}
        for key, rows in self._of.items():
            width, n = max(self._sizes(key)), len(self._encoded)
            flat = [payloads[name][part].reshape(n, -1) for name, part in rows[rank]]
            r = next(r for r, row in enumerate(rows) if row)
            like = self._encoded[r][rows[r][0][0]].payload[rows[r][0][1]]
            missing = width - sum(each.shape[1] for each in flat)
            made[key] = torch.cat([*flat, torch.zeros(n, missing, dtype=like.dtype, device=device)], 1)
        return made

    def received(self, moved: Mapping[Any, Tensor], rank: int, name: str) -> Payload:
        """Return the payloads of the batch `name` that all ranks have sent to its owner."""
        return self._cut(moved, rank, name, slice(None))

    def sent(self, moved: Mapping[Any, Tensor], rank: int, name: str) -> Payload:
        """Return the payload of the batch `name` that its owner has sent to all."""
        return self._cut(moved, rank, name, slice(rank, rank + 1))

    def nothing(self, moved: Mapping[Any, Tensor], name: str) -> Tensor:
        """Return no elements, of all messages with the batch `name`: a plan drops collectives that none reads."""
        read = [moved[key] for key, rows in self._of.items() if any(name == each for row in rows for each, _ in row)]
        return torch.cat([each.reshape(-1)[:0].to(torch.float32) for each in read])

    def _cut(self, moved: Mapping[Any, Tensor], owner: int, name: str, ranks: slice) -> Payload:
        payload: Payload = {}
        for key, rows in self._of.items():
            at = 0
            for other, part in rows[owner]:
                like = self._encoded[owner][other].payload[part]
                if other == name:
                    row = moved[key][ranks, at : at + like.numel()]
                    payload[part] = row.reshape(-1, *like.shape[1:])
                at += like.numel()
        return payload

    def _sizes(self, key: tuple[str, str]) -> list[int]:
        rows = self._of[key]
        return [sum(self._encoded[r][name].payload[part].numel() for name, part in row) for r, row in enumerate(rows)]

    def _row(self, key: tuple[str, str], rank: int) -> Tensor:
        rows = self._of[key]
        sizes = self._sizes(key)
        flat = [self._encoded[rank][name].payload[part].reshape(-1) for name, part in rows[rank]]
        missing = max(sizes) - sizes[rank]
        if missing:
            r = next(r for r, row in enumerate(rows) if row)
            name, part = rows[r][0]
            flat.append(self._encoded[r][name].payload[part].new_zeros(missing))
        return torch.cat(flat) if len(flat) > 1 else flat[0]


def _rows(wire: Tensor, n: int) -> Tensor:
    """Return the rows of each owner, the last ones padded with zeros: `[n, elements]`."""
    return layout.in_rows(wire, n).flatten(1)


def _lengths(wire: Tensor, n: int) -> Tensor | None:
    """Return how many elements in the rows of each owner are no padding, `[n, 1]`; None if all are."""
    height = wire.shape[0]
    if height % n == 0:
        return None
    each, size = -(-height // n), wire.numel() // height
    return (height - each * torch.arange(n, device=wire.device)).clamp(0, each).unsqueeze(1) * size


def with_halves(sync: Sync, half: Sync) -> Sync:
    """Return the pipeline with `half` in place of each carrier."""
    if isinstance(sync, Carrier):
        return half
    return sync._map_children(lambda child: with_halves(child, half))  # pyright: ignore[reportPrivateUsage]
