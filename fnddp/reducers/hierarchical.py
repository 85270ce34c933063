"""Two-level reduction: a mean inside the node, exact or with codecs, and any pipeline across nodes."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fnddp.core import collectives, layout, tree
from fnddp.core.codec import Carrier, Carrying, Layers, wide
from fnddp.core.group import Group, group_name
from fnddp.core.opaque import rounded
from fnddp.core.sync import Exchange, Local, State, Sync, all_in, groups_of, require_state, transform
from fnddp.core.table import Cut, Hop, Table
from fnddp.core.tree import Leaves, Tree, is_compressible, replaced
from fnddp.reducers.all_reduce import none
from fnddp.reducers.carriers import two_shot_mean
from fnddp.reducers.halves import with_halves

MOST_PADDING = 1 / 16  # of a leaf's rows, for its shards to be matrices


class HierarchicalState(NamedTuple):
    """`inner`: the state of the exchange across nodes. It is local, because ranks of a node have different shards.

    With codecs in `intra`, `inner` is their state and contains the state of the exchange across nodes.
    """

    inner: Local[State]


@transform
class hierarchical(Sync):
    """Run a reduce_scatter inside the node, any pipeline across nodes on this rank's shard, and an all_gather inside.

    Each of the n ranks of a node runs `inner` on 1/n of the gradients (its shard). So a node sends its gradients across
    once, and memory inside, `hierarchical(error_feedback(...))`, is as small as a shard. `inner` must name the group of
    the ranks with the same position in their nodes. With a mesh: `hierarchical(powersgd(allreduce).over((mesh,
    "across")), intra=(mesh, "inside"))`.

    A shard is 1/n of a leaf's rows (dimension 0), if padding adds at most a sixteenth of them; else 1/n of its
    flattened elements, a vector that PowerSGD does not compress. The owner of a shard counts the error of `inner` n
    times in its `sent`, because a mean over the node divides by n: put memory inside. Integer leaves are summed inside
    and across, and divided once.

    With codecs inside, `intra=quantize(two_shot)`, the node averages in the two hops of `two_shot`, an all_to_all and
    an all_gather of encoded parts, and `inner` runs between them. An owner counts the error of its second hop n times,
    too. Put `rotate`, `bucketize` and memory around `hierarchical`; they then apply to both levels.

    The wrong choice in one node, and where links inside are no faster than those across: it takes two more rounds. On
    gloo a reduce_scatter sends as much as an all_reduce. Like all pipelines over several groups, it refuses weights.

    Args:
        inner: The pipeline across nodes, a mean over its own group: `powersgd(allreduce).over(across)`. `none` for one
            node. `init` and `exchange` raise a ValueError for the default group and for the group inside the node.
        intra: The group inside the node, see `all_reduce`; or, to send fewer bytes inside as well, codecs around
            `two_shot` over that group: `quantize(two_shot).over(inside)`. This adds an error even on fast links.
        shard: Exchange a shard on each rank. If False, leaves stay whole: after a mean inside the node, every rank of
            it runs the same exchange, so the node sends n times as much. Means are then bitwise equal only if the
            backend adds in the same order in all groups across nodes, as carriers do.

    Source: two-level all-reduces as in Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 4; with compression
    across nodes only as in 1-bit Adam; on both levels as in ZeRO++ (Wang et al., 2023) and SDP4Bit (Jia et al., NeurIPS
    2024): these send 4 bits across.

    >>> from fnddp import allreduce, fp16, none
    >>> sync = hierarchical(none)
    >>> sync({"w": torch.ones(3, 2)}, sync.init({"w": torch.ones(3, 2)}))[0]["w"].shape
    torch.Size([3, 2])
    >>> hierarchical(fp16(allreduce)).init({"w": torch.ones(3, 2)})
    Traceback (most recent call last):
        ...
    ValueError: hierarchical: fp16(allreduce) must reduce across nodes, over another group than the default one, whose
    ranks have other shards; name it, hierarchical(fp16(allreduce).over(across), intra=inside)
    """

    inner: Sync
    intra: Group | Carrying = None
    shard: bool = True

    ops: ClassVar[Any] = frozenset({"mean"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.intra, Sync):
            *_, carrier = all_in(self.intra)
            is_two_shot = isinstance(carrier, two_shot_mean) and not carrier.server_memory
            if not (self.intra.carries and is_two_shot and self.shard):
                raise TypeError(
                    f"hierarchical: intra={self.intra!r} must be the group inside the node, or codecs around two_shot, "
                    f"which give each rank a shard (shard=True), got shard={self.shard}; write "
                    "intra=quantize(two_shot), and put other transforms outside: rotate(hierarchical(...))"
                )
        else:
            object.__setattr__(self, "intra", group_name(self.intra))
        if self.inner.ops - {"mean"}:
            others = ", ".join(sorted(self.inner.ops - {"mean"}))
            raise TypeError(f"hierarchical: {self.inner!r} takes a {others}, but the node takes a mean; use a mean")
        if self.inner.groups is None:
            raise TypeError(
                f"hierarchical: {self.inner!r} does not name the group it reduces over; use one of fnddp's pipelines"
            )
        for inner in all_in(self.inner) if self.shard else ():
            if inner.wants_whole_leaves:
                name = type(inner).__name__
                raise TypeError(
                    f"hierarchical: {name} needs whole leaves, but here each rank has only a shard of each leaf; put "
                    f"it outside, {name}(hierarchical(...)), or keep leaves whole with shard=False"
                )

    @property
    def groups(self) -> frozenset[str | None] | None:
        return frozenset({self._inside, *(self.inner.groups or ())})

    @property
    def agrees(self) -> bool:
        return self.inner.agrees or not self.inner.ops

    @property
    def _inside(self) -> str | None:
        return groups_of(self.intra)[0] if isinstance(self.intra, Sync) else group_name(self.intra)

    def reduces(self, path: str) -> bool:
        return True

    def over(self, group: Group, *, unnamed_only: bool = False) -> Sync:
        name, intra = group_name(group), self.intra
        over = intra.over(group) if isinstance(intra, Carrying) else name
        if unnamed_only:
            return self if self._inside is not None else replace(self, intra=over)
        if name is not None:
            raise ValueError(f"{self!r} reduces over two groups, so over(group) cannot set both; build another one")
        return replace(self, inner=self.inner.over(None), intra=over)  # without names, to compare

    def init(self, grads: Tree) -> State:
        self._require_groups()
        leaves, _ = tree.flatten(grads)
        parts = {path: leaf for path, leaf in leaves.items() if is_compressible(leaf)}
        if not self.shard:
            return self.inner.init(parts)
        return HierarchicalState(self._between.init(parts))

    @property
    def _between(self) -> Sync:
        """The codecs of `intra`, with the exchange across nodes between their hops."""
        carrier = _Between(self._inside, self.inner)
        return with_halves(self.intra, carrier) if isinstance(self.intra, Sync) else carrier

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        self._require_groups()
        parts = {path: leaf for path, leaf in leaves.items() if is_compressible(leaf)}
        whole = {path: leaf for path, leaf in leaves.items() if path not in parts}
        reduced = collectives.all_reduce(whole, "mean", self._inside, *groups_of(self.inner))
        if self.shard:
            require_state("hierarchical", state, HierarchicalState)
            inner = self._between.exchange(parts, state.inner)
            inner = replaced(inner, state=HierarchicalState(inner.state))
        else:
            of_node = collectives.all_reduce(parts, "mean", self._inside)
            inner = self.inner.exchange(of_node, state)
            lossy = {path: leaf + (inner.sent[path] - of_node[path]) for path, leaf in parts.items()}
            inner = replaced(inner, sent=lossy)
        mean, sent = {**reduced, **inner.mean}, {**whole, **inner.sent}
        return Exchange({path: mean[path] for path in leaves}, {path: sent[path] for path in leaves}, inner.state)

    def _require_groups(self) -> None:
        across, inside = self.inner.groups or frozenset(), self._inside
        for group in across & {None, inside}:
            if _has_one_rank(inside) and not _has_one_rank(group):  # nodes of one rank
                continue
            which = "the default one" if group is None else f"{group!r}, that inside the node"
            raise ValueError(
                f"hierarchical: {self.inner!r} must reduce across nodes, over another group than {which}, whose ranks "
                f"have other shards; name it, hierarchical({self.inner.over(None)!r}.over(across), intra=inside)"
            )


def _has_one_rank(group: str | None) -> bool:
    try:
        return collectives.world_size(group) == 1
    except RuntimeError:  # it does not exist yet
        return False


@dataclass(frozen=True, repr=False)
class _Between(Carrier):
    """Average inside a node in two hops; between them, exchange this rank's shard across nodes."""

    group: Group = None
    inner: Sync = none

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        n = collectives.world_size(group_name(self.group))
        shapes = {path: _rows(x.to("meta"), n).shape[1:] for path, x in leaves.items()}
        return self.inner.init({path: x.detach().new_empty(shapes[path]) for path, x in leaves.items()})

    def carry(self, layers: Layers, leaves: Leaves, state: State) -> Exchange:
        group = group_name(self.group)
        n, rank, ranks = collectives.world_size(group), collectives.rank(group), collectives.ranks(group)
        rows = {path: _rows(leaf, n) for path, leaf in leaves.items()}  # [n, *shard]
        wires = {path: layout.to_wire(x).reshape(n, -1) for path, x in rows.items()} if layers else {}
        table = Table(n, {path: Cut(layout.size_of(leaves[path]), x.shape[1]) for path, x in wires.items()})
        counts = table.counts(wires)
        mine = rows
        total: Leaves = {}
        if not layers:
            # Divided before the sum, so that values that fit the dtype do not overflow.
            shard = total = collectives.reduce_scatter_leaves({path: x / ranks for path, x in rows.items()}, group)
        else:
            sender = rank  # within the ranks that the groups connect: nodes draw different numbers
            for each in groups_of(self.inner):
                sender = sender * collectives.world_size(each) + collectives.rank(each)
            first = Hop.of(table, layers, wires, sender, counts)
            mine = {path: _shaped(x, rows[path]) for path, x in first.split(first.decoded()).items()}
            sums = {name: x.unsqueeze(0) for name, x in first.scatter(rank, group).items()}
            for path, x in first.split(sums).items():
                if (count := counts[path]) is not None:  # a codec may have decoded padding to any values
                    x = torch.where(torch.arange(x.shape[1], device=x.device) < count[rank], x, 0)
                total[path] = _shaped(x / ranks, rows[path][0])
            shard = {path: rounded(x, leaves[path].dtype) for path, x in total.items()}
        done = self.inner.exchange(shard, state)
        lost = {path: done.sent[path] - total[path] for path in leaves}
        if not layers:
            everyone = collectives.all_gather_leaves(done.mean, group)
        else:
            # All nodes have the same mean of a shard, and draw the same numbers for it.
            own = {path: None if count is None else count[rank].unsqueeze(0) for path, count in counts.items()}
            row = {path: layout.to_wire(x).reshape(1, -1) for path, x in done.mean.items()}
            second = Hop.of(table, layers, row, rank, own, again=" again")
            for path, x in second.split(second.decoded()).items():
                lost[path] = lost[path] + _shaped(x, done.mean[path]) - done.mean[path]
            gathered = second.split(second.gather(rank, group))
            everyone = {path: _shaped(x, rows[path]) for path, x in gathered.items()}
        mean: Leaves = {}
        sent: Leaves = {}
        for path, leaf in leaves.items():
            owners = torch.arange(n, device=leaf.device).view(-1, *[1] * shard[path].ndim)
            both = everyone[path], mine[path] + torch.where(owners == rank, ranks * lost[path], 0)
            mean[path], sent[path] = (rounded(_whole(x, leaf), leaf.dtype) for x in both)
        return Exchange(mean, sent, done.state)

    def carry_flat(self, layers: Layers, leaves: Leaves, state: State) -> tuple[Leaves, Leaves, State]:
        raise AssertionError("shards have the shapes of leaves")


def _shaped(wire: Tensor, like: Tensor) -> Tensor:
    """Return real numbers in the shape of `like`, complex if `like` is complex, in float32 or wider."""
    wire = wire.to(wide(wire.dtype))  # there are no complex numbers of bfloat16
    return layout.from_wire(wire.reshape(*like.shape, 2) if like.is_complex() else wire, like)


def _view_shape(leaf: Tensor, n: int) -> tuple[int, ...]:
    """Return the shape of `leaf` that is cut into n shards along its first dimension."""
    has_rows = leaf.ndim > 1 and -leaf.shape[0] % n <= MOST_PADDING * leaf.shape[0]
    return tuple(leaf.shape) if has_rows else (leaf.numel(),)


def _rows(leaf: Tensor, n: int) -> Tensor:
    """Return the shards of `leaf`: `[n, *shard]`."""
    return layout.in_rows(leaf.reshape(_view_shape(leaf, n)), n)


def _whole(rows: Tensor, leaf: Tensor) -> Tensor:
    """Return the inverse of `_rows`, laid out like `leaf`."""
    first = _view_shape(leaf, rows.shape[0])[0]
    return layout.in_format_of(leaf, rows.flatten(0, 1)[:first].reshape(leaf.shape))
