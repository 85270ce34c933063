"""Pass 7: one total order of everything, the same on all ranks.

Bucket i of gradients arrives in slot i. A collective of depth d is issued d slots after its bucket, and the input of
the next round is computed from its result one slot later. So a bucket's second round is issued after the next bucket's
first: a software pipeline that sends one bucket while another is computed. Means and the next state come last, after
all collectives are complete and the step can no longer fail on another rank. No collective needs them. Until then
nothing is overwritten, and no encoding waits for a collective.

The cost of an operation on small tensors is its call, so equal operations are put next to each other for a later pass
to join. Those of a bucket wait for its last gradient (except copies: the CPU makes them as gradients arrive, see
`Segment.fills`). The cost of an operation on large tensors is its pass over memory, so each runs as soon as possible,
while its operands are in the cache, and its result is soon freed.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import fx

from fnddp.plan.draft import Draft, DraftSegment
from fnddp.plan.graph import (
    is_light,
    is_made_in_list,
    is_view,
    kind_of,
    launch,
    launch_of,
    output_nodes,
    placeholders,
    take,
    take_of,
    tensor_nodes,
)


class Position(NamedTuple):
    """The place of a node in the order: by slot, then collectives of earlier rounds first, then order of arrival.

    Nodes that only a mean needs follow those of the state, so that a mean may use the memory of a residual.
    """

    slot: int
    depth: int
    arrival: float
    only_for_mean: bool = False
    launched: int = -1  # the index of the collective


def order(draft: Draft) -> Draft:
    """Sort the nodes of a combined graph, and cut them into segments at arrivals, waits and sends."""
    graph, paths = draft.graph, draft.paths
    positions, reading = _positions(graph, paths, draft.request.buckets, draft.weight)
    outputs = output_nodes(graph)
    feeding = _ancestors([node for node in graph.nodes if node.target is launch])
    for_state = _ancestors([node for node in outputs[len(paths) :] if isinstance(node, fx.Node)])
    end = max((positions[node].slot for node in feeding), default=-1) + 1
    feeding |= {node for node in positions if is_made_in_list(node) and node.all_input_nodes[0] in feeding}
    for node, at in positions.items():
        if node not in feeding:
            positions[node] = at._replace(slot=end, depth=0, only_for_mean=node not in for_state)
    leaf_of = dict(zip(placeholders(graph), paths, strict=False))
    runs: dict[Position, list[fx.Node]] = {}
    for node in tensor_nodes(graph):
        runs.setdefault(positions[node], []).append(node)
    nodes = [node for position in sorted(runs) for node in _side_by_side(runs[position], reading)]
    draft.segments = _cut(nodes, positions, leaf_of, end)
    return draft


def _positions(
    graph: fx.Graph, paths: Sequence[str], buckets: Mapping[str, int], weight: fx.Node | None
) -> tuple[dict[fx.Node, Position], dict[fx.Node, float]]:
    """Return for each node its position, and the index (in order of arrival) of the last leaf that it depends on."""
    arrival = {path: float(place) for place, path in enumerate(buckets)}
    last_of = {bucket: arrival[path] for path, bucket in buckets.items()}
    end_of = {arrival[path]: last_of[bucket] for path, bucket in buckets.items()}
    leaves, first = iter(paths), 0 if weight is None else -1
    at: dict[fx.Node, Position] = {}
    reading: dict[fx.Node, float] = {}
    for node in graph.nodes:
        inputs = [at[source] for source in node.all_input_nodes]
        slot = max((position.slot for position in inputs), default=first)
        depth = max((position.depth for position in inputs), default=first)
        latest = max((position.arrival for position in inputs), default=-1.0)
        launched = -1
        reading[node] = max((reading[source] for source in node.all_input_nodes), default=-1.0)
        if node.op == "placeholder":
            path = next(leaves, None)  # other placeholders come after the leaves
            if path is not None:
                slot, depth, latest = buckets[path], 0, arrival[path]
                reading[node] = latest
            elif node is not weight:
                slot, depth = 0, 0
        elif node.target is launch:
            _, collective = launch_of(node)
            slot, depth, latest, launched = collective.slot, collective.depth, float("inf"), collective.index
        elif node.target is take:
            launching, position = take_of(node)
            payloads, collective = launch_of(launching)
            slot, depth = collective.slot + 1, collective.depth + 1
            latest, reading[node] = at[payloads[position]].arrival, reading[payloads[position]]
        elif node.op == "call_function" and is_light(node):
            latest = end_of.get(latest, latest)
        at[node] = Position(slot, depth, latest, launched=launched)
    return at, reading


def _side_by_side(nodes: Sequence[fx.Node], reading: Mapping[fx.Node, float]) -> list[fx.Node]:
    """Return `nodes` in an order in which they can run: equal light ones together, heavy ones leaf by leaf.

    Views cost nothing and run as soon as they can. Light nodes of a kind run as soon as all of them can, before heavy
    nodes, because heavy nodes may wait for them while their inputs take memory.
    """
    index = {node: i for i, node in enumerate(nodes)}
    lacking = {node: sum(source in index for source in node.all_input_nodes) for node in nodes}
    kinds = {node: kind_of(node) for node in nodes if is_light(node) and not is_view(node)}
    waiting = Counter(kinds.values())
    views: list[fx.Node] = []
    heavy: list[tuple[float, int]] = []
    light: dict[object, list[fx.Node]] = {}  # light nodes that can run, by kind
    done: list[fx.Node] = []

    def enqueue(node: fx.Node) -> None:
        if is_view(node):
            views.append(node)
        elif node in kinds:
            light.setdefault(kinds[node], []).append(node)
        else:
            heapq.heappush(heavy, (reading[node], index[node]))

    def run(node: fx.Node) -> None:
        done.append(node)
        for user in node.users:
            if user in lacking:
                lacking[user] -= 1
                if not lacking[user]:
                    enqueue(user)

    for node in nodes:
        if not lacking[node]:
            enqueue(node)
    while views or heavy or light:
        if views:
            run(views.pop())
            continue
        # Run all nodes of a kind together, as soon as possible. If nothing else can run, run a part of a kind.
        kind = next((kind for kind, ready in light.items() if len(ready) == waiting[kind]), None)
        if kind is None and heavy:
            run(nodes[heapq.heappop(heavy)[1]])
            continue
        kind = next(iter(light)) if kind is None else kind
        waiting[kind] -= len(light[kind])
        for node in sorted(light.pop(kind), key=lambda node: (reading[node], index[node])):
            run(node)
    return done


def _cut(
    nodes: Sequence[fx.Node], at: Mapping[fx.Node, Position], leaf_of: Mapping[fx.Node, str], end: int
) -> list[DraftSegment]:
    segments: list[DraftSegment] = []
    current: DraftSegment | None = None
    arrived: set[fx.Node] = set()
    waited: set[int] = set()
    launched = {launch_of(node)[1].index for node in nodes if node.target is launch}
    for node in nodes:
        commits = at[node].slot == end
        needs = {source: None for source in node.all_input_nodes if source in leaf_of and source not in arrived}
        waits: set[int] = launched - waited if commits else set()
        if node.target is take:
            waits |= {launch_of(take_of(node)[0])[1].index} - waited
        is_later = current is not None and current.nodes and at[current.nodes[-1]] != at[node]
        if current is None or ((needs or waits) and is_later) or commits != current.commits:
            current = DraftSegment(at[node].slot, commits)
            segments.append(current)
        arrived.update(needs)
        waited |= waits
        current.needs += [leaf_of[source] for source in needs]
        current.waits += sorted(waits)
        if node.target is launch:
            current.launches, current = node, None
        else:
            current.nodes.append(node)
    return segments


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node not in found:
            found.add(node)
            queue += node.all_input_nodes
    return found
