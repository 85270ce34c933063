"""A pass that is not always run: takes leaves out that never have a gradient, and all that is only theirs."""

from collections.abc import Container, Sequence
from typing import Any

from torch import fx

from fnddp.plan.ir import output_nodes, remove_dead
from fnddp.plan.passes.combine import reaches


def drop(graph: fx.Graph, paths: Sequence[str], dropped: Container[str]) -> fx.Graph:
    """Their means become their gradients, which are zeros; the state that only they change stays what it is.

    Args:
        graph: From `trace`.
        paths: The leaves: the graph's first placeholders.
        dropped: Some of them.
    """
    gone = sum(1 << i for i, path in enumerate(paths) if path in dropped)
    if not gone:
        return graph
    inputs, outputs = list(graph.find_nodes(op="placeholder")), output_nodes(graph)
    reach = reaches(graph)
    ours = (1 << len(paths)) - 1

    def is_theirs(node: Any) -> bool:
        leaves = reach[node].leaves & ours if isinstance(node, fx.Node) else 0
        return leaves != 0 and leaves & ~gone == 0

    kept: Any = [
        inputs[i] if is_theirs(node) or (i < len(paths) and gone >> i & 1) else node for i, node in enumerate(outputs)
    ]
    graph.output_node().args = (kept,)
    return remove_dead(graph)
