"""Carriers: they move payloads that need not add, and add up what they decode to."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnddp.core import collectives, layout, tree
from fnddp.core.codec import Carrier, Encoded, Key, Layers, added_up, batches_of, encode, exchanged, wide
from fnddp.core.group import Group, group_name
from fnddp.core.opaque import rounded, shortened
from fnddp.core.sync import Local, Remembered, State, registry, require_state, transform
from fnddp.core.tree import Leaves, Tree, check_entries, is_inexact
from fnddp.reducers.halves import at_owners, of_owners


@transform
class all_gather(Carrier):
    """Send each rank's payload to all: encoded once, decoded by each, added in float32 in rank order.

    `allgather` is the ready-made `all_gather()`. A codec has one row for each leaf, and loses something once, on the
    rank whose gradient it was. The wrong choice for many ranks: each receives n - 1 payloads, where a ring receives
    about two whatever n. A payload of s bits an element beats a ring of b bits only while n < 2 b / s.

    Args:
        group: See `all_reduce`.

    >>> allgather({"w": torch.ones(2)}, allgather.init(None))
    ({'w': tensor([1., 1.])}, ())
    """

    group: Group = None

    def carry_flat(self, layers: Layers, leaves: Leaves, state: State) -> tuple[Leaves, Leaves, State]:
        group = group_name(self.group)
        rank = collectives.rank(group)
        batches = batches_of(layers, {path: x.unsqueeze(0) for path, x in leaves.items()})
        encoded = {name: encode(layers, each.x, Key(name, rank)) for name, each in batches.items()}
        everyone = exchanged(encoded, lambda parts: collectives.all_gather_leaves(parts, group))
        n, ranks = collectives.world_size(group), collectives.ranks(group)
        mean: Leaves = {}
        sent: Leaves = {}
        for name, batch in batches.items():
            each = encoded[name]
            total = added_up(each, everyone[name], n, batch.x[0]) / ranks  # [n] or [pieces, unit]
            mean |= {path: row[0] for path, row in batch.split(total.unsqueeze(0)).items()}
            sent |= {path: row[0] for path, row in batch.split(each.decode(each.payload)).items()} if layers else {}
        return mean, sent if layers else leaves, state

    def __repr__(self) -> str:
        return "allgather" if self == allgather else super().__repr__()


allgather = all_gather()
registry.add("allgather", allgather)


class TwoShotState(NamedTuple):
    """`residual`: the losses of this rank's second hop by leaf path, `[ceil(elements / ranks)]`, float32 or wider."""

    residual: Local[Remembered[Leaves]]


@transform
class two_shot_mean(Carrier):
    """Run an all_to_all, sums in float32 or wider in rank order, and an all_gather of the means.

    `two_shot` is the ready-made `two_shot_mean()`, and `two_shot(server_memory=True)`, as text and in Python, is
    `two_shot_mean(server_memory=True)`. Payloads are encoded once for each hop, and a rank sends about two whatever the
    number of ranks, like a ring; but sums are in float32, also those of `fp16(two_shot)`, so the error does not grow
    with the ranks. A codec has a row for each rank's chunk, padded to equal length.

    The owner of a chunk counts the losses of its second hop n times in its `sent`, since a mean divides by n, so error
    feedback outside makes up for both hops. The wrong choice for many leaves of few elements a rank, whose rows are
    shorter than a codec's blocks: `bucketize(quantize(two_shot))`.

    Args:
        group: See `all_reduce`.
        server_memory: The owner keeps the losses of its second hop, a residual of one chunk, and adds it to the next
            mean, instead of counting it in `sent`, n times, which would inflate the scales of its chunk's blocks. The
            sum of all outputs plus the mean residual outside plus this one is the sum of all mean gradients. The state
            is for a fixed number of ranks: another number is a ValueError at the exchange.

    Source: sum and means by owner as in torchft's quantized all-reduce and in 1-bit Adam (Tang et al., ICML 2021). The
    two residuals of the latter are `error_feedback(sign(two_shot(server_memory=True)))`.

    >>> from fnddp import bf16
    >>> bf16(two_shot)({"w": torch.ones(3)}, two_shot.init(None))
    ({'w': tensor([1., 1., 1.])}, ())
    >>> two_shot(server_memory=True)
    two_shot(server_memory=True)
    """

    group: Group = None
    server_memory: bool = False

    @property
    def sent_is_exact(self) -> bool:
        return not self.server_memory

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Synchronize gradients; or, with options alone, construct another one: text and Python are written alike."""
        is_exchange = arguments or "grads" in options
        return super().__call__(*arguments, **options) if is_exchange else two_shot_mean(**options)

    def init(self, grads: Tree) -> State:
        if not self.server_memory:
            return ()
        n = collectives.world_size(group_name(self.group))
        leaves, _ = tree.flatten(grads)
        residual: Leaves = {}
        for path, leaf in leaves.items():
            if is_inexact(leaf) and leaf.numel():
                real = leaf.dtype.to_real()
                elements = leaf.numel() * (2 if leaf.is_complex() else 1)
                residual[path] = torch.zeros(_chunk(elements, n), dtype=wide(real), device=leaf.device)
        return TwoShotState(residual)

    def carry_flat(self, layers: Layers, leaves: Leaves, state: State) -> tuple[Leaves, Leaves, State]:
        group = group_name(self.group)
        n, rank, ranks = collectives.world_size(group), collectives.rank(group), collectives.ranks(group)
        batches = batches_of(layers, {path: layout.in_rows(x, n) for path, x in leaves.items()})
        # How much of each row is no padding, of a leaf that is encoded alone: [n, 1].
        lengths = {
            name: _lengths(leaves[name], n) if layers and each.is_one else None for name, each in batches.items()
        }
        first = {name: encode(layers, each.x, Key(name, rank), lengths[name]) for name, each in batches.items()}
        sums = at_owners(first, {name: batch.x[0] for name, batch in batches.items()}, group)
        if self.server_memory:
            require_state("two_shot", state, TwoShotState)
            shapes = {path: (_chunk(x.numel(), n),) for path, x in leaves.items()}
            check_entries("two_shot", state.residual, shapes, "another tree or another number of ranks")
        second: dict[str, Encoded] = {}
        lost: Leaves = {}
        for name, batch in batches.items():
            total = (sums[name] / ranks).unsqueeze(0)  # [1, chunk], or [1, pieces, unit]
            length = lengths[name]
            own = None if length is None else length[rank].unsqueeze(0)
            if own is not None:  # a codec may have decoded padding to any values
                total = torch.where(torch.arange(total.shape[1], device=total.device) >= own, 0, total)
            elif layers and not batch.is_one:
                lengths_of = {path: _own(leaves[path], n, rank) for path in batch.paths}
                total = batch.cleared(total, lengths_of, is_kept=self.server_memory)
            if self.server_memory:
                total = total + batch.join({path: state.residual[path].unsqueeze(0) for path in batch.paths})
            second[name] = encode(layers, rounded(total, batch.x.dtype), Key(f"{name} again", rank), own)
            lost[name] = second[name].decode(second[name].payload) - total
        means = of_owners(second, group)

        mean: Leaves = {}
        sent: Leaves = {}
        residual: Leaves = {}
        for name, batch in batches.items():
            mine = first[name].decode(first[name].payload)
            if self.server_memory:
                for path, row in batch.split(-lost[name]).items():  # each in memory of its own
                    kept = row[0].to(state.residual[path].dtype)
                    residual[path] = kept if batch.is_one else kept.clone()
            else:
                owned = torch.arange(n, device=mine.device).view(n, *[1] * (mine.ndim - 1)) == rank
                mine = mine + torch.where(owned, ranks * lost[name], 0)
            mean |= batch.split(means[name])
            sent |= batch.split(mine)
        if self.server_memory:
            state = TwoShotState({path: residual[path] for path in state.residual})
        flat = [
            {path: shortened(rows[path].reshape(-1), x.numel()) for path, x in leaves.items()} for rows in (mean, sent)
        ]
        return flat[0], flat[1], state

    def __repr__(self) -> str:
        options = super().__repr__().removeprefix("two_shot_mean")
        return "two_shot" if options == "()" else f"two_shot{options}"


def _chunk(elements: int, n: int) -> int:
    return -(-elements // n)


def _lengths(x: Tensor, n: int) -> Tensor | None:
    """Return how many numbers of each of `n` rows are elements of `x`; None if all are."""
    chunk = _chunk(x.numel(), n)
    if n * chunk == x.numel():
        return None
    return (x.numel() - chunk * torch.arange(n, device=x.device)).clamp(0, chunk).unsqueeze(1)


def _own(x: Tensor, n: int, rank: int) -> int:
    """Return how many elements of `x` are in the row of `rank`."""
    chunk = _chunk(x.numel(), n)
    return min(max(x.numel() - rank * chunk, 0), chunk)


two_shot = two_shot_mean()
registry.add("two_shot", two_shot)
