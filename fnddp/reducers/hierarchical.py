"""Two levels: a mean inside the node, any pipeline across nodes."""

from typing import NamedTuple

import torch
from torch import Tensor

from fnddp.core import collectives, layout, tree
from fnddp.core.group import Group, group_name
from fnddp.core.sync import Exchange, Local, State, Sync, all_in, groups_of, require_state, transform
from fnddp.core.tree import Leaves, Tree, is_inexact, replaced

MOST_PADDING = 1 / 16  # of a leaf's rows, for its shards to be matrices


class HierarchicalState(NamedTuple):
    """`inner`: the state of the exchange across nodes, all local: ranks of a node have different shards."""

    inner: Local[State]


@transform
class hierarchical(Sync):
    """Run a reduce_scatter inside the node, any pipeline across nodes on this rank's shard, and an all_gather inside.

    Each of the n ranks of a node runs `inner` on 1/n of the gradients, so together they send all of them across once,
    and memory inside, `hierarchical(error_feedback(...))`, is as small as a shard. `inner` must name the group of the
    ranks with the same position in their nodes. With a mesh: `hierarchical(powersgd(allreduce).over((mesh, "across")),
    intra=(mesh, "inside"))`.

    A shard is 1/n of a leaf's rows (dimension 0), if padding adds no more than a sixteenth of them, else of its
    flattened elements, a vector, which PowerSGD leaves alone. The owner of a shard counts the losses of `inner` n times
    in its `sent`, since a mean over the node divides by n: put memory inside. Integer leaves are summed inside and
    across, and divided once.

    The wrong choice in one node, and where links inside are no faster than those across: it takes two more rounds. On
    gloo a reduce_scatter sends as much as an all_reduce. It refuses weights, as all pipelines over several groups.

    Args:
        inner: The pipeline across nodes, a mean over its own group: `powersgd(allreduce).over(across)`. `none` for one
            node. The default group, and that inside the node, are a ValueError in `init` and `exchange`.
        intra: The group inside the node, see `all_reduce`.
        shard: Exchange a shard on each rank. If False, leaves stay whole: a mean inside the node, then the same
            exchange by every rank of it, so the node sends n times as much. Means are then equal to the bit only if
            the backend adds in the same order in all groups across nodes, as carriers do.

    Source: two-level all-reduces as in Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 4; with compression
    across nodes only as in ZeRO++ (Wang et al., 2023) and 1-bit Adam.

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
    intra: Group = None
    shard: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "intra", group_name(self.intra))
        if self.inner.ops - {"mean"}:
            others = ", ".join(sorted(self.inner.ops - {"mean"}))
            raise TypeError(
                f"hierarchical: {self.inner!r} takes a {others}, but inside the node a mean is taken; use a mean"
            )
        if self.inner.groups is None:
            raise TypeError(
                f"hierarchical: {self.inner!r} does not name the group it reduces over; use one of fnddp's pipelines"
            )
        for inner in all_in(self.inner) if self.shard else ():
            if inner.wants_whole_leaves:
                name = type(inner).__name__
                raise TypeError(
                    f"hierarchical: {name} needs whole leaves, but here a rank has a shard of each; put it outside, "
                    f"{name}(hierarchical(...)), or give whole leaves, shard=False"
                )

    @property
    def ops(self) -> frozenset[str]:
        return frozenset({"mean"})

    @property
    def groups(self) -> frozenset[str | None] | None:
        return frozenset({group_name(self.intra), *(self.inner.groups or ())})

    def reduces(self, path: str) -> bool:
        return True

    def over(self, group: Group, *, unnamed_only: bool = False) -> Sync:
        name = group_name(group)
        if unnamed_only:
            return self if self.intra is not None else hierarchical(self.inner, name, self.shard)
        if name is not None:
            raise ValueError(f"{self!r} reduces over two groups, so it cannot be put on one; make it with others")
        return hierarchical(self.inner.over(None), None, self.shard)  # without names, to compare

    def init(self, grads: Tree) -> State:
        self._require_groups()
        leaves, _ = tree.flatten(grads)
        n = collectives.world_size(group_name(self.intra))
        parts = {path: leaf for path, leaf in leaves.items() if _has_parts(leaf)}
        if not self.shard:
            return self.inner.init(parts)
        shards = {path: leaf.detach().new_empty(_shard_shape(leaf, n)) for path, leaf in parts.items()}
        return HierarchicalState(self.inner.init(shards))

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        self._require_groups()
        parts = {path: leaf for path, leaf in leaves.items() if _has_parts(leaf)}
        whole = {path: leaf for path, leaf in leaves.items() if path not in parts}
        everywhere = group_name(self.intra), *groups_of(self.inner)
        reduced = collectives.all_reduce(whole, "mean", *everywhere)
        inner = self._sharded(parts, state) if self.shard else self._unsharded(parts, state)
        mean, sent = {**reduced, **inner.mean}, {**whole, **inner.sent}
        return Exchange({path: mean[path] for path in leaves}, {path: sent[path] for path in leaves}, inner.state)

    def _sharded(self, leaves: Leaves, state: HierarchicalState) -> Exchange:
        require_state("hierarchical", state, HierarchicalState)
        group = group_name(self.intra)
        n, rank, ranks = collectives.world_size(group), collectives.rank(group), collectives.ranks(group)
        # Divided before the sum, so that what fits the dtype does not overflow.
        rows = {path: _rows(leaf / ranks, n) for path, leaf in leaves.items()}  # [n, *shard]
        shard = collectives.reduce_scatter_leaves(rows, group)
        inner = self.inner.exchange(shard, state.inner)
        everyone = collectives.all_gather_leaves(inner.mean, group)
        sent: Leaves = {}
        for path, leaf in leaves.items():
            lost = ranks * (inner.sent[path] - shard[path])
            owners = torch.arange(n, device=leaf.device).view(-1, *[1] * shard[path].ndim)
            sent[path] = _whole(_rows(leaf, n) + torch.where(owners == rank, lost, 0), leaf)
        mean = {path: _whole(everyone[path], leaf) for path, leaf in leaves.items()}
        return Exchange(mean, sent, HierarchicalState(inner.state))

    def _unsharded(self, leaves: Leaves, state: State) -> Exchange:
        of_node = collectives.all_reduce(leaves, "mean", group_name(self.intra))
        inner = self.inner.exchange(of_node, state)
        sent = {path: leaf + (inner.sent[path] - of_node[path]) for path, leaf in leaves.items()}
        return replaced(inner, sent=sent)

    def _require_groups(self) -> None:
        across, inside = self.inner.groups or frozenset(), group_name(self.intra)
        for group in across & {None, inside}:
            which = "the default one" if group is None else f"{group!r}, that inside the node"
            raise ValueError(
                f"hierarchical: {self.inner!r} must reduce across nodes, over another group than {which}, whose ranks "
                f"have other shards; name it, hierarchical({self.inner.over(None)!r}.over(across), intra=inside)"
            )


def _has_parts(leaf: Tensor) -> bool:
    return is_inexact(leaf) and leaf.numel() > 0


def _view_shape(leaf: Tensor, n: int) -> tuple[int, ...]:
    """Return the shape of which a shard is 1/n, along the first dimension."""
    has_rows = leaf.ndim > 1 and -leaf.shape[0] % n <= MOST_PADDING * leaf.shape[0]
    return tuple(leaf.shape) if has_rows else (leaf.numel(),)


def _shard_shape(leaf: Tensor, n: int) -> tuple[int, ...]:
    first, *rest = _view_shape(leaf, n)
    return (-(-first // n), *rest)


def _rows(leaf: Tensor, n: int) -> Tensor:
    """Return the shards of `leaf`: `[n, *shard]`."""
    return layout.in_rows(leaf.reshape(_view_shape(leaf, n)), n)


def _whole(rows: Tensor, leaf: Tensor) -> Tensor:
    """Return the inverse of `_rows`, laid out like `leaf`."""
    first = _view_shape(leaf, rows.shape[0])[0]
    return layout.in_format_of(leaf, rows.flatten(0, 1)[:first].reshape(leaf.shape))
