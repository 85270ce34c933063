"""Pass 3: without operations that change nothing."""

from typing import Any

import torch
from torch import Tensor, fx

from fnddp.plan.draft import Draft
from fnddp.plan.graph import is_view, remove_dead, tensor_nodes, value

aten: Any = torch.ops.aten


def simplify(draft: Draft) -> Draft:
    """Remove views whose shape and strides are those of what they view, and zeros that memory subtracts."""
    graph = draft.graph
    for node in list(tensor_nodes(graph)):
        source = node.args[0] if node.args else None
        changes_nothing = is_view(node) or _subtracts_zeros(node)
        if changes_nothing and isinstance(source, fx.Node) and _same(value(source), value(node)):
            node.replace_all_uses_with(source)
    remove_dead(graph)
    return draft


def _subtracts_zeros(node: fx.Node) -> bool:
    # To the bit: x - 0 is x for all x, -0.0 and NaN too.
    is_difference = node.target is aten.sub.Tensor and not node.kwargs
    return is_difference and getattr(node.args[1], "target", None) is aten.zeros_like.default


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
