"""Pass 2: without operations that change nothing, such as a view of the same shape."""

from torch import Tensor, fx

from fnddp.plan.ir import is_view, remove_dead, tensor_nodes, value


def simplify(graph: fx.Graph) -> fx.Graph:
    """Removes views whose shape and strides are those of what they view, and then what nobody reads."""
    for node in list(tensor_nodes(graph)):
        source = node.args[0] if node.args else None
        if is_view(node) and isinstance(source, fx.Node) and _same(value(source), value(node)):
            node.replace_all_uses_with(source)
    return remove_dead(graph)


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
