"""Pass 6: combine many small collectives into few large ones.

Collectives of one bucket with the same depth, kind, device, group and operation share a flat buffer. Those that reduce
also need the same dtype; the others send bytes. They are independent by construction, because a collective is deeper
than those it depends on. XLA's all-reduce combiner does the same; the buckets are those of torch's DDP.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fnddp.ir.program import Collective, LoweringError, PayloadSpec
from fnddp.kernels.leaves import OUT
from fnddp.plan.draft import Draft
from fnddp.plan.graph import call, is_light, is_view, launch, sorted_topologically, take, tensor_nodes, value
from fnddp.torch_private import fake_like, functional_collectives
from fnddp.wire.groups import DEFAULT_GROUP, within, world_size
from fnddp.wire.kinds import KINDS, Kind

aten: Any = torch.ops.aten
MATRIX_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}
_wait: Any = functional_collectives.wait_tensor.default


class Reach(NamedTuple):
    """The dependencies of a node: inputs of the graph (one bit each), and the longest chain of collectives."""

    leaves: int
    depth: int


def reaches(graph: fx.Graph, weight: fx.Node | None) -> dict[fx.Node, Reach]:
    """Return the reach of each node of a traced graph. A collective has the depth of its payload, its result one more.

    Nodes that depend on the `weight` only have depth -1, because its collective is sent before all gradients.
    """
    reach: dict[fx.Node, Reach] = {}
    first = 0 if weight is None else -1
    for i, node in enumerate(graph.nodes):
        is_input = node.op == "placeholder"
        leaves, depth = 1 << i if is_input else 0, 0 if is_input and node is not weight else first
        for source in node.all_input_nodes:
            leaves |= reach[source].leaves
            depth = max(depth, reach[source].depth)
        reach[node] = Reach(leaves, depth + (node.target is _wait))
    return reach


class Traced(NamedTuple):
    """A collective of a traced graph: the nodes of its start, result and payload; other fields as in `Collective`."""

    node: fx.Node
    waited: fx.Node
    payload: fx.Node
    kind: Kind
    op: str | None
    group: str | None


class BufferKey(NamedTuple):
    """A key, equal for collectives that share a buffer. Sorting by it gives the order in which they are issued.

    It sorts by slot, then depth: a bucket's second round is issued after the next bucket's first. It has no names of
    groups, because these may differ between ranks: collectives of several groups keep the order of the trace.
    """

    slot: int
    depth: int
    bucket: int
    kind: str
    dtype: str
    device: str


def combine(draft: Draft) -> Draft:
    """Replace the collectives of a traced graph by combined ones; raise a LoweringError for an unknown kind."""
    graph, paths, buckets = draft.graph, draft.paths, draft.request.buckets
    reach = reaches(graph, draft.weight)
    arrival = {path: position for position, path in enumerate(buckets)}
    ours = (1 << len(paths)) - 1  # bits of the leaves; other placeholders are state

    def leaves_of(node: fx.Node) -> list[str]:
        mask = reach[node].leaves & ours
        return sorted((paths[i] for i in _bits(mask)), key=arrival.__getitem__)

    groups: dict[tuple[BufferKey, str | None, str | None], list[Traced]] = {}
    for traced in _traced(draft):
        depth, like = reach[traced.node].depth, value(traced.payload)
        bucket = max((buckets[path] for path in leaves_of(traced.node)), default=0)  # 0 without leaves
        dtype = str(like.dtype) if traced.kind.computes else ""
        key = BufferKey(bucket + depth, depth, bucket, traced.kind.name, dtype, str(like.device))
        groups.setdefault((key, traced.op, traced.group), []).append(traced)

    with within(draft.request.world):
        for index, (key, op, group) in enumerate(sorted(groups, key=lambda found: found[0])):
            members = sorted(groups[key, op, group], key=_alignment, reverse=True)
            without = "weight" if key.depth < 0 else "(state)"
            paths_of = [leaves_of(traced.node) for traced in members]
            labels = ["..".join([each[0], *each[1:][-1:]]) if each else without for each in paths_of]
            _replace(graph, members, _laid_out(index, key, members, labels, world_size(group)))
    sorted_topologically(graph)
    return draft


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _traced(draft: Draft) -> list[Traced]:
    found: list[Traced] = []
    for node in tensor_nodes(draft.graph):
        if node.target is _wait or not str(node.target).startswith(("_c10d_functional", "c10d")):
            continue
        kind = next((kind for kind in KINDS.values() if kind.operator is node.target), None)
        read, users = kind and kind.read(node.args), list(node.users)
        if not kind or not read or len(users) != 1 or users[0].target is not _wait:
            raise LoweringError(
                f"{draft.request.sync!r} cannot be lowered: its use of {node.target} cannot be scheduled; use the "
                "collectives of fnddp.collectives"
            )
        payload, op, group = read
        found.append(Traced(node, users[0], payload, kind, op, None if group == DEFAULT_GROUP else group))
    return found


def _alignment(traced: Traced) -> tuple[int, bool, int]:
    # Payloads with larger alignment come first, so that all are aligned without gaps, for vector instructions and views
    # as other dtypes. Light ones are side by side, so that one operation can run on the memory of all of them.
    numel = value(traced.payload).numel()
    return value(traced.payload).dtype.itemsize, not is_light(traced.payload), min(numel & -numel, 64)


ALIGNMENT, BETTER_ALIGNMENT = 16, 128  # bytes
MOST_PADDING = 0.01  # fraction of a row, for the better alignment


def _padding(width: int, itemsize: int) -> int:
    """Return the number of columns to add to a row, so that all rows are aligned for each dtype and for fast NCCL."""
    padding = -width % (BETTER_ALIGNMENT // itemsize)
    return padding if padding < MOST_PADDING * width else -width % (ALIGNMENT // itemsize)


def _laid_out(index: int, key: BufferKey, members: Sequence[Traced], labels: Sequence[str], n: int) -> Collective:
    kind, like = members[0].kind, value(members[0].payload)
    payloads: list[PayloadSpec] = []
    end = 0
    for traced, label in zip(members, labels, strict=True):
        sent = value(traced.payload)
        rows = n if kind.sends_rows else 1
        width = sent.numel() // rows * (1 if kind.computes else sent.dtype.itemsize)
        shapes = tuple(sent.shape), tuple(value(traced.waited).shape)
        payloads.append(PayloadSpec(label, *shapes, sent.dtype, offset=end, width=width))
        end += width
    if kind.sends_rows or kind.receives_rows:
        end += _padding(end, like.dtype.itemsize if kind.computes else 1)
    return Collective(
        index=index,
        kind=kind,
        op=members[0].op,
        group=members[0].group,
        world_size=n,
        dtype=like.dtype if kind.computes else torch.uint8,
        device=like.device,
        depth=key.depth,
        bucket=key.bucket,
        slot=key.slot,
        width=end,
        payloads=tuple(payloads),
    )


def _replace(graph: fx.Graph, members: Sequence[Traced], collective: Collective) -> None:
    with graph.inserting_before(graph.output_node()):
        # Read the arguments now: those that were results of other collectives have been replaced.
        arguments: Any = ([traced.node.args[0] for traced in members], collective)
        launched = graph.call_function(launch, arguments)
        launched.meta["val"] = [value(traced.waited) for traced in members]
        for position, traced in enumerate(members):
            result = graph.call_function(take, (launched, position))
            like, start = value(traced.waited), collective.payloads[position].offset * collective.dtype.itemsize
            result.meta["val"] = like
            if collective.has_gaps:  # columns of the buffer: later nodes were traced without gaps
                rows, width = collective.received_shape(position)
                result.meta["val"] = fake_like(like, (rows, width), 2 * width)
                if like.ndim != 2 or any(user.target not in OUT for user in traced.waited.users):
                    options = {"memory_format": torch.contiguous_format}
                    result = call(graph, aten.clone.default, (result,), options, fake_like(like, (rows, width)))
                    result = call(graph, aten.view.default, (result, list(like.shape)), {}, like)
            elif start % ALIGNMENT and _is_multiplied(traced.waited):  # BLAS rounds by the alignment of its operands
                result = call(graph, aten.clone.default, (result,), {}, like)
            traced.waited.replace_all_uses_with(result)
            graph.erase_node(traced.waited)
            graph.erase_node(traced.node)


def _is_multiplied(node: fx.Node) -> bool:
    return any(user.target in MATRIX_PRODUCTS or (is_view(user) and _is_multiplied(user)) for user in node.users)
