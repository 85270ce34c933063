"""The two halves of a mean: send each leaf to the rank that owns it, and send the owners' results to all ranks."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fnddp.core import collectives, layout
from fnddp.core.codec import Carrier, Layers
from fnddp.core.expression import CHECKS
from fnddp.core.group import Group, group_name
from fnddp.core.opaque import rounded, shortened
from fnddp.core.options import checked_int, did_you_mean
from fnddp.core.sync import Exchange, State, Sync, transform
from fnddp.core.table import Cut, Hop, Table
from fnddp.core.tree import Leaves, is_compressible, is_inexact, ordered
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
        """Return owners with about equal costs: assign the costliest leaf first, to the rank with the least load.

        Leaves of equal cost go around the ranks in the reverse order of their paths. So all ranks compute the same
        owners, and each rank owns a share of the gradients that backward produces at about the same time.

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
        """Return owners as `of` does, but in the order of `leaves`; this order must be the same on all ranks."""
        if checked_int("Owners.of: n", n) < 1:
            raise ValueError(f"Owners.of: n must be at least 1, got {n}")
        apart = frozenset(cut)
        if unknown := min(apart - leaves.keys(), default=None):
            raise ValueError(f"Owners.of: cut: no leaf is called {unknown!r}{did_you_mean(unknown, leaves)}")
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
        """Return the half-open range of rows of the leaf that `rank` owns; a scalar has one row."""
        owner, shape = self._owner[path], self._shape[path]
        height = shape[0] if shape else 1
        if owner is not None:
            return (0, height) if owner == rank else (0, 0)
        each = -(-height // self.n)
        return min(rank * each, height), min((rank + 1) * each, height)

    def shape(self, path: str) -> torch.Size:
        return self._shape[path]

    def sent_shape(self, path: str) -> torch.Size:
        """Return the shape that all ranks pass to `to_all` for a leaf: its own, or that of the first rank's rows."""
        return self._shape[path] if self._owner[path] is not None else self.own_shape(path, 0)

    def own_shape(self, path: str, rank: int) -> torch.Size:
        """Return the shape of the part of a leaf that `rank` owns: `[rows, ...]`, `[]` for a scalar, or no rows."""
        begin, end = self.rows(path, rank)
        shape = self._shape[path]
        return shape if end and not shape else torch.Size([end - begin, *shape[1:]])

    def table(self, leaves: Mapping[str, bool]) -> Table:
        """Return the table of messages of `leaves`, by path; a value of True means that the leaf is complex."""
        cuts: dict[str, Cut] = {}
        for path, is_complex in leaves.items():
            shape, owner = self._shape[path], self._owner[path]
            count = shape.numel() * (2 if is_complex else 1)
            height = max(1, shape[0] if shape else 1)
            cuts[path] = Cut(count, count if owner is not None else -(-height // self.n) * (count // height), owner)
        return Table(self.n, cuts)

    def owner(self, path: str) -> int | None:
        """Return the rank that owns the leaf; None for a leaf that is divided among the ranks by rows."""
        return self._owner[path]

    def own(self, path: str, leaf: Tensor, rank: int) -> Tensor:
        """Return a view of the rows of `leaf` that `rank` owns: `[rows, ...]`, a whole scalar, or `[0]`."""
        begin, end = self.rows(path, rank)
        return (leaf if end else leaf.reshape(1)[:0]) if leaf.ndim == 0 else leaf[begin:end]

    def __post_init__(self) -> None:
        owner: dict[str, int | None] = {path: None for path, _ in self.shapes}
        object.__setattr__(self, "_shape", dict(self.shapes))
        object.__setattr__(self, "_owner", owner | dict(self.whole))

    _shape: dict[str, torch.Size] = field(init=False, repr=False, compare=False)
    _owner: dict[str, int | None] = field(init=False, repr=False, compare=False)


def _checked_owners(what: str, value: Any) -> Owners:
    if not isinstance(value, Owners):
        raise TypeError(f"{what} must be a table of Owners.of(leaves, ranks), or None, got {value!r}")
    return value


CHECKS["Owners"] = _checked_owners


@dataclass(frozen=True, repr=False)
class _Half(Carrier):
    """Shared base of both halves: batches of each owner's leaves, and payloads with one row for each owner."""

    group: Group = None
    owners: Owners | None = None

    def __repr__(self) -> str:  # without `owners`, which belong to one model's leaves
        return f"{type(self).__name__}({'' if self.group is None else f'group={self.group!r}'})"

    def carry_flat(self, layers: Layers, leaves: Leaves, state: State) -> tuple[Leaves, Leaves, State]:
        raise AssertionError("halves carry leaves in their shapes")

    def _here(self, leaves: Leaves) -> tuple[str | None, int, Owners]:
        group = group_name(self.group)
        n, rank = collectives.world_size(group), collectives.rank(group)
        name = type(self).__name__
        if current().simulated is not None:
            raise TypeError(f"{name}: ranks own different leaves, which one process cannot simulate; use real ranks")
        owners = Owners.of(leaves, n) if self.owners is None else self.owners
        if owners.n != n:
            raise ValueError(f"{name}: the owners are for {owners.n} ranks, but there are {n}; make new ones")
        return group, rank, owners


@transform
class to_owners(_Half):
    """Send each leaf to the rank that owns it; the owner adds in float32, in rank order: the first half of a mean.

    On each rank the result has the part of each leaf that this rank owns: the leaf itself, its rows, or `[0, ...]`. All
    ranks' parts together are bitwise equal to the mean of `allgather` with the same codecs; for leaves that are cut by
    rows, to the result of the first hop of `two_shot`. A rank sends the parts of all other ranks once, whatever their
    number. Rows for owners are padded to the longest: by little, if owners have about as many bytes in each message.

    The wrong choice as a synchronization by itself, because only owners have the mean. `own` runs an optimizer on the
    owners, and `to_all` sends the updated leaves to all ranks.

    Args:
        group: See `all_reduce`.
        owners: The owners of the leaves, from `Owners.of`; None for whole leaves balanced by their elements.

    >>> to_owners()({"w": torch.ones(2)}, ())
    ({'w': tensor([1., 1.])}, ())
    """

    agrees: ClassVar[Any] = False  # ranks have different leaves

    def carry(self, layers: Layers, leaves: Leaves, state: State) -> Exchange:
        group, rank, owners = self._here(leaves)
        exact = {path: leaf for path, leaf in leaves.items() if not is_compressible(leaf)}
        mean: Leaves = {
            path: owners.own(path, each, rank) for path, each in collectives.all_reduce(exact, "mean", group).items()
        }
        sent = dict(exact)
        wires = {path: layout.to_wire(leaf) for path, leaf in leaves.items() if path not in exact}
        table = owners.table({path: leaves[path].is_complex() for path in wires})
        hop = Hop.of(table, layers, table.rows(wires), rank, table.counts(wires) if layers else {})
        sums, ranks = hop.scatter(rank, group), collectives.ranks(group)
        own: Leaves = {}
        for name, batch in hop.batches.items():
            is_here = owners.owner(name) in (None, rank)
            own |= batch.split((sums[name] / ranks).unsqueeze(0)) if is_here else dict.fromkeys(batch.paths, sums[name])
        decoded = hop.split(hop.decoded()) if layers else {}
        for path, wire in wires.items():
            leaf = leaves[path]
            mean[path] = _shaped(own[path], owners.own_shape(path, rank), wire.dtype, leaf)
            sent[path] = _shaped(decoded[path], leaf.shape, wire.dtype, leaf) if layers else leaf
        return Exchange({path: mean[path] for path in leaves}, {path: sent[path] for path in leaves}, state)


@transform
class to_all(_Half):
    """Send the part of each leaf that a rank owns to all ranks, encoded by the codecs: the second half of a mean.

    The input on a rank is its part of each leaf, as `to_owners` returns it; the result is the whole decoded leaf,
    bitwise equal on all ranks. Values of leaves that another rank owns are not read. A plan needs leaves of the same
    shapes on all ranks: `Owners.sent_shape`. Rows of owners are padded to the longest.

    The wrong choice for gradients: nothing is added up.

    Args:
        group: See `all_reduce`.
        owners: The owners, from `Owners.of`; None if all ranks pass whole leaves, balanced by their elements.

    >>> to_all()({"w": torch.ones(2)}, ())
    ({'w': tensor([1., 1.])}, ())
    """

    def carry(self, layers: Layers, leaves: Leaves, state: State) -> Exchange:
        group, rank, owners = self._here(leaves)
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
    wires = {path: layout.to_wire(leaf).reshape(-1) for path, leaf in leaves.items()}
    table = owners.table({path: leaf.is_complex() for path, leaf in leaves.items()})
    rows: Leaves = {}
    counts: dict[str, Tensor | None] = {}
    for path, wire in wires.items():
        width, owner = table.cuts[path].width, owners.owner(path)
        # Rows of other owners are encoded only for their sizes; plans do not run this.
        row = pad(wire, (0, width - wire.numel())) if owner is None else wire
        if layers and row.numel() > wire.numel():
            counts[path] = torch.full((1, 1), wire.numel(), device=wire.device)
        rows[path] = (row if owner in (None, rank) else wire.new_zeros(width)).unsqueeze(0)
    hop = Hop.of(table, layers, rows, rank, counts, " again")
    flat = hop.split(hop.gather(rank, group, wires))
    return {path: _shaped(flat[path], owners.shape(path), wires[path].dtype, leaf) for path, leaf in leaves.items()}


def _shaped(flat: Tensor, shape: torch.Size, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return flat numbers in the `shape` of a leaf or of its rows; a whole leaf has the memory format of `like`."""
    pairs = [*shape, *((2,) if like.is_complex() else ())]
    wire = rounded(shortened(flat.reshape(-1), math.prod(pairs)), dtype).view(pairs)
    if shape == like.shape:
        return layout.from_wire(wire, like)
    return layout.as_complex(wire) if like.is_complex() else wire


def with_halves(sync: Sync, half: Sync) -> Sync:
    """Return the pipeline with `half` in place of each carrier."""
    if isinstance(sync, Carrier):
        return half
    return sync._map_children(lambda child: with_halves(child, half))  # pyright: ignore[reportPrivateUsage]
