"""Pass 4: few large collectives instead of many small ones.

Collectives of one bucket that have the same depth, dtype, device, group and operation share a flat buffer. They are
independent by construction: of two that depend on each other, one is deeper. XLA's all-reduce combiner does the same;
the buckets are those of torch's DDP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.passes.tools_common import legalize_graph

from fnddp import collectives
from fnddp.plan.ir import Collective, Payload, launch, take, tensor_nodes, value

MB = 2**20
BUCKET_CAPS = (1 * MB, 25 * MB)  # those of torch's DDP

_all_reduce: Any = torch.ops._c10d_functional.all_reduce.default
_wait: Any = torch.ops._c10d_functional.wait_tensor.default


def assign_buckets(nbytes: Mapping[str, int], caps: Sequence[float]) -> dict[str, int]:
    """The bucket of every leaf: filled in the order of `nbytes`, closed once it holds its cap.

    Args:
        nbytes: Size of each leaf, in the order in which gradients are expected.
        caps: Bytes at which a bucket is closed: the first ones, and the last for all others. A small first one has
            communication start early.

    >>> assign_buckets({"c": 10, "b": 10, "a": 10}, caps=[1, 20])
    {'c': 0, 'b': 1, 'a': 1}
    """
    buckets: dict[str, int] = {}
    bucket, filled = 0, 0
    for path, size in nbytes.items():
        buckets[path] = bucket
        filled += size
        if filled >= caps[min(bucket, len(caps) - 1)]:
            bucket, filled = bucket + 1, 0
    return buckets


@dataclass(frozen=True)
class Reach:
    """What a node depends on: leaves (a bit for each), and the longest chain of collectives."""

    leaves: int
    depth: int


def reaches(graph: fx.Graph) -> dict[fx.Node, Reach]:
    """What each node of a traced graph depends on. A collective has the depth of its payload, its result one more."""
    reach: dict[fx.Node, Reach] = {}
    for i, node in enumerate(graph.nodes):
        inputs = [reach[source] for source in node.all_input_nodes]
        leaves = 1 << i if node.op == "placeholder" else 0
        depth = 0
        for source in inputs:
            leaves |= source.leaves
            depth = max(depth, source.depth)
        reach[node] = Reach(leaves, depth + (node.target is _wait))
    return reach


def combine(module: fx.GraphModule, paths: Sequence[str], buckets: Mapping[str, int]) -> fx.GraphModule:
    """Replaces the collectives of a traced graph by combined ones.

    Args:
        module: From `trace`. Its first placeholders are the leaves.
        paths: Their paths.
        buckets: The bucket of each leaf; its order is the order of arrival.
    """
    graph = module.graph
    reach = reaches(graph)
    arrival = {path: position for position, path in enumerate(buckets)}
    ours = (1 << len(paths)) - 1  # placeholders beyond the leaves are the state

    def leaves_of(node: fx.Node) -> list[str]:
        mask = reach[node].leaves & ours
        return sorted((path for i, path in enumerate(paths) if mask >> i & 1), key=arrival.__getitem__)

    groups: dict[Any, list[fx.Node]] = {}
    for node in tensor_nodes(graph):
        if node.target is _all_reduce:
            payload, op, group = node.args
            bucket = max((buckets[path] for path in leaves_of(node)), default=0)
            like = value(payload)
            key = (bucket + reach[node].depth, reach[node].depth, bucket, str(like.dtype), like.device, group, op)
            groups.setdefault(key, []).append(node)

    output = graph.output_node()
    # By slot, then depth: a bucket's second round is issued behind the next bucket's first.
    # Within those in the order of the trace: a group's name may differ between its ranks and others.
    for index, key in enumerate(sorted(groups, key=lambda key: (*key[:4], str(key[4])))):
        slot, depth, bucket, _, device, group, op = key
        # As aligned as its own size allows, without gaps: vector instructions and views as complex pairs ask for it.
        members = sorted(groups[key], key=_alignment, reverse=True)
        payloads: list[Payload] = []
        for node in members:
            labels, shape = leaves_of(node), tuple(value(node).shape)
            offset = payloads[-1].offset + payloads[-1].numel if payloads else 0
            payloads.append(Payload(_label(labels), shape, offset))
        name = None if group == collectives.DEFAULT_GROUP else group
        collective = Collective(
            index=index,
            kind="all_reduce",
            op=op,
            group=name,
            world_size=collectives.world_size(name),
            dtype=value(members[0]).dtype,
            device=device,
            depth=depth,
            bucket=bucket,
            slot=slot,
            payloads=tuple(payloads),
        )
        with graph.inserting_before(output):
            sources = [node.args[0] for node in members]
            arguments: Any = (sources, collective)
            launched = graph.call_function(launch, arguments)
            launched.meta["val"] = [value(node) for node in members]
            for position, node in enumerate(members):
                (waited,) = node.users
                taken = graph.call_function(take, (launched, position))
                taken.meta["val"] = value(waited)
                waited.replace_all_uses_with(taken)
                graph.erase_node(waited)
                graph.erase_node(node)
    return legalize_graph(module)


def _alignment(node: fx.Node) -> int:
    numel = value(node).numel()
    return min(numel & -numel, 64)


def _label(paths: list[str]) -> str:
    if not paths:
        return "(state)"
    return paths[0] if len(paths) == 1 else f"{paths[0]}..{paths[-1]}"
