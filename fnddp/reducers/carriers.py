"""Carriers: reducers that send encoded payloads, decode them, and add the decoded values."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnddp.core import collectives, layout, tree
from fnddp.core.codec import Carrier, Encoded, Key, Layers, encode, wide
from fnddp.core.group import Group, group_name
from fnddp.core.opaque import rounded, shortened
from fnddp.core.sync import Local, Remembered, State, registry, require_state, transform
from fnddp.core.table import Cut, Hop, Table
from fnddp.core.tree import Leaves, Tree, check_entries, is_compressible
from fnddp.kernels.leaves import DECODE, ENCODE, REDUCE, SENT, batches_for_operators, text_of


@transform
class all_gather(Carrier):
    """Send each rank's payload to all ranks; every rank decodes all payloads and adds them in float32, in rank order.

    `allgather` is the ready-made `all_gather()`. A codec sees each leaf as one row. A gradient loses precision once, in
    the encoding on its own rank. With many ranks use `two_shot`: here a rank receives n - 1 payloads, but with
    `two_shot` about two. A payload of s bits an element beats an all_reduce of b bits only while n < 2 b / s.

    Args:
        group: See `all_reduce`.

    >>> allgather({"w": torch.ones(2)}, allgather.init(None))
    ({'w': tensor([1., 1.])}, ())
    """

    group: Group = None

    def carry_flat(self, layers: Layers, leaves: Leaves, state: State) -> tuple[Leaves, Leaves, State]:
        group = group_name(self.group)
        n, rank, ranks = collectives.world_size(group), collectives.rank(group), collectives.ranks(group)
        table = Table(n, {path: Cut(n * x.numel(), x.numel()) for path, x in leaves.items()})  # of each rank a row
        hop = Hop.of(table, layers, {path: x.unsqueeze(0) for path, x in leaves.items()}, rank)
        sums = hop.added(collectives.all_gather_leaves(hop.to_each(), group), rank)
        mean = hop.split({name: (total / ranks).unsqueeze(0) for name, total in sums.items()})
        sent = hop.split(hop.decoded()) if layers else {}
        return (
            {path: row[0] for path, row in mean.items()},
            {path: row[0] for path, row in sent.items()} or leaves,
            state,
        )

    def __repr__(self) -> str:
        return "allgather" if self == allgather else super().__repr__()


allgather = all_gather()
registry.add("allgather", allgather)


class TwoShotState(NamedTuple):
    """`residual`: the error of this rank's second hop by leaf path, `[ceil(elements / ranks)]`, float32 or wider."""

    residual: Local[Remembered[Leaves]]


@transform
class two_shot_mean(Carrier):
    """Average in two hops: an all_to_all after which each rank sums one chunk, and an all_gather of the chunks' means.

    `two_shot` is the ready-made `two_shot_mean()`, and `two_shot(server_memory=True)`, as text and in Python, is
    `two_shot_mean(server_memory=True)`. Payloads are encoded once for each hop. As in a ring, a rank sends about two
    payloads for any number of ranks. Sums are in float32 or wider and in rank order, also those of `fp16(two_shot)`, so
    the error does not grow with the number of ranks. A codec sees one row for each rank's chunk, padded to one length.

    The rank that sums a chunk (its owner) counts the error of its second hop n times in its `sent`, because a mean
    divides by n. So error feedback outside corrects both hops. The wrong choice for leaves with few elements a rank,
    because rows are then shorter than a codec's blocks: `bucketize(quantize(two_shot))`.

    Args:
        group: See `all_reduce`.
        server_memory: The owner keeps the error of its second hop, a residual of one chunk, and adds it to the next
            mean. This error no longer counts n times in `sent`, where it would inflate the scales of its chunk's
            blocks. All outputs, the mean residual of `error_feedback` outside and this residual add up to all mean
            gradients. The state is for a fixed number of ranks: the exchange raises a ValueError for another number.

    Source: owners sum and average as in torchft's quantized all-reduce and in 1-bit Adam (Tang et al., ICML 2021). The
    two residuals of 1-bit Adam are `error_feedback(sign(two_shot(server_memory=True)))`.

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
        """Synchronize gradients; with options alone, return a new pipeline, so that Python is written like text."""
        is_exchange = arguments or "grads" in options
        return super().__call__(*arguments, **options) if is_exchange else two_shot_mean(**options)

    def init(self, grads: Tree) -> State:
        if not self.server_memory:
            return ()
        n = collectives.world_size(group_name(self.group))
        leaves, _ = tree.flatten(grads)
        residual: Leaves = {}
        for path, leaf in leaves.items():
            if is_compressible(leaf):
                real = leaf.dtype.to_real()
                residual[path] = torch.zeros(-(-layout.size_of(leaf) // n), dtype=wide(real), device=leaf.device)
        return TwoShotState(residual)

    def carry_flat(self, layers: Layers, leaves: Leaves, state: State) -> tuple[Leaves, Leaves, State]:
        group = group_name(self.group)
        n, rank, ranks = collectives.world_size(group), collectives.rank(group), collectives.ranks(group)
        batches = {} if self.server_memory else batches_for_operators(layers, leaves)
        if batches:
            return *_carried_by_operators(layers, batches, group), state
        table = Table(n, {path: Cut(x.numel(), -(-x.numel() // n)) for path, x in leaves.items()})
        counts = table.counts(leaves) if layers else {}
        first = Hop.of(table, layers, table.rows(leaves), rank, counts)
        sums = first.scatter(rank, group)
        if self.server_memory:
            require_state("two_shot", state, TwoShotState)
            shapes = {path: (cut.width,) for path, cut in table.cuts.items()}
            check_entries("two_shot", state.residual, shapes, "another tree or another number of ranks")
        again: dict[str, Encoded] = {}
        lost: Leaves = {}
        for name, batch in first.batches.items():
            total = (sums[name] / ranks).unsqueeze(0)  # [1, chunk], or [1, pieces, unit]
            count = counts.get(name) if batch.is_one else None
            own = None if count is None else count[rank].unsqueeze(0)
            if own is not None:  # a codec may have decoded padding to any values
                total = torch.where(torch.arange(total.shape[1], device=total.device) >= own, 0, total)
            elif layers and not batch.is_one:
                lengths = {path: table.count(path, rank) for path in batch.paths}
                total = batch.cleared(total, lengths, is_kept=self.server_memory)
            if self.server_memory:
                total = total + batch.join({path: state.residual[path].unsqueeze(0) for path in batch.paths})
            again[name] = encode(layers, rounded(total, batch.x.dtype), Key(f"{name} again", rank), own)
            lost[name] = again[name].decode(again[name].payload) - total
        means = Hop(table, first.batches, again).gather(rank, group)

        mine = first.decoded()
        if self.server_memory:
            rows = first.split(lost)
            state = TwoShotState({path: (-rows[path][0]).to(each.dtype) for path, each in state.residual.items()})
        else:
            for name, each in mine.items():
                owned = torch.arange(n, device=each.device).view(n, *[1] * (each.ndim - 1)) == rank
                mine[name] = each + torch.where(owned, ranks * lost[name], 0)
        mean, sent = (
            {path: shortened(rows[path].reshape(-1), x.numel()) for path, x in leaves.items()}
            for rows in (first.split(means), first.split(mine))
        )
        return mean, sent, state

    def __repr__(self) -> str:
        options = super().__repr__().removeprefix("two_shot_mean")
        return "two_shot" if options == "()" else f"two_shot{options}"


def _carried_by_operators(layers: Layers, batches: Mapping[str, Leaves], group: str | None) -> tuple[Leaves, Leaves]:
    """Return mean and sent of `two_shot`: the same numbers, by one operation for each hop and batch."""
    n, ranks = collectives.world_size(group), (collectives.rank(group), collectives.ranks(group))
    codec, draws, again_draws = text_of(layers), dict[str, tuple[Any, ...]](), dict[str, tuple[Any, ...]]()
    if layers[0].codec.draws:
        some = next(iter(next(iter(batches.values())).values()))
        step = torch.full((), layers[0].step, dtype=torch.int64, device=some.device)
        draws = {name: (ranks[0], step, list(batch)) for name, batch in batches.items()}
        again_draws = {name: (step, [f"{path} again" for path in batch]) for name, batch in batches.items()}
    about: dict[str, Any] = {}
    sent: dict[tuple[str, int], Tensor] = {}
    again: dict[tuple[str, int], Tensor] = {}
    for name, batch in batches.items():
        first = next(iter(batch.values()))
        about[name] = [x.numel() for x in batch.values()], n, first.dtype
        made = ENCODE.default(codec, list(batch.values()), *about[name], *draws.get(name, ()))
        sent |= {(name, i): x for i, x in enumerate(made)}
    moved = collectives.all_to_all_leaves(sent, group)
    for name in batches:
        made = REDUCE.default(codec, _of(moved, name), *about[name], *ranks, *again_draws.get(name, ()))
        again |= {(name, i): x for i, x in enumerate(made)}
    gathered = collectives.gather_rows(again, group)
    means: Leaves = {}
    sents: Leaves = {}
    for name, batch in batches.items():
        means |= zip(batch, DECODE.default(codec, _of(gathered, name), *about[name]), strict=True)
        parts = (_of(parts, name) for parts in (sent, moved, again))
        sents |= zip(batch, SENT.default(codec, *parts, *about[name], *ranks), strict=True)
    return means, sents


def _of(parts: Mapping[tuple[str, int], Tensor], name: str) -> list[Tensor]:
    return [part for (of, _), part in sorted(parts.items(), key=lambda each: each[0]) if of == name]


two_shot = two_shot_mean()
registry.add("two_shot", two_shot)
