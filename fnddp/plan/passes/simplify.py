"""Pass 3: without operations that change nothing, such as a view of the same shape."""

from torch import Tensor, fx

from fnddp.plan.draft import Draft
from fnddp.plan.graph import is_view, remove_dead, tensor_nodes, value


def simplify(draft: Draft) -> Draft:
    """Removes views whose shape and strides are those of what they view, and then what nobody reads."""
    graph = draft.graph
    for node in list(tensor_nodes(graph)):
        source = node.args[0] if node.args else None
        if is_view(node) and isinstance(source, fx.Node) and _same(value(source), value(node)):
            node.replace_all_uses_with(source)
    remove_dead(graph)
    return draft


def _same(before: object, after: object) -> bool:
    return (
        isinstance(before, Tensor)
        and isinstance(after, Tensor)
        and before.shape == after.shape
        and before.stride() == after.stride()
        and before.storage_offset() == after.storage_offset()
        and before.dtype == after.dtype
        and before.is_conj() == after.is_conj()
        and before.is_neg() == after.is_neg()
    )
