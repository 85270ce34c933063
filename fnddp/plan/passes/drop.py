"""Pass 2: without leaves that never have a gradient, and all that only they need."""

from typing import Any

from torch import fx

from fnddp.plan.draft import Draft
from fnddp.plan.graph import output_nodes, placeholders, remove_dead
from fnddp.plan.passes.combine import reaches


def drop(draft: Draft) -> Draft:
    """Make the means of dropped leaves their gradients, which are zeros, and keep the state that only they change."""
    graph, paths = draft.graph, draft.paths
    gone = sum(1 << i for i, path in enumerate(paths) if path in draft.request.dropped)
    if not gone:
        return draft
    inputs, outputs = placeholders(graph), output_nodes(graph)
    reach = reaches(graph)
    ours = (1 << len(paths)) - 1

    def is_theirs(node: Any) -> bool:
        leaves = reach[node].leaves & ours if isinstance(node, fx.Node) else 0
        return leaves != 0 and leaves & ~gone == 0

    def is_dropped(i: int, node: Any) -> bool:
        return is_theirs(node) or (i < len(paths) and node is not None and bool(gone >> i & 1))

    kept: Any = [inputs[i] if is_dropped(i, node) else node for i, node in enumerate(outputs)]
    graph.output_node().args = (kept,)
    remove_dead(graph)
    return draft
