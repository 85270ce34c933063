"""The memory of a step."""

from typing import Any

import torch
from torch import Tensor, fx

from fnddp.ir.program import Collective
from fnddp.plan.draft import Draft
from fnddp.plan.graph import launch, launch_of, output_nodes, take, value


def peak_bytes(draft: Draft) -> int:
    """Return the most memory that a step takes in addition to gradients and state."""
    placement = draft.placement
    assert placement is not None
    nodes = [node for cut in draft.cuts for node in (*cut.nodes, cut.launches) if node is not None]
    persistent = sum(_buffer_bytes(launch_of(node)[1]) for node in nodes if node.target is launch)
    persistent += sum(draft.request.leaves[path].nbytes for path in placement.results)
    persistent += sum(spec.nbytes for spec in placement.scratch.values())
    last_read: dict[Any, float] = {}
    for when, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last_read[placement.memory(source)] = when
    last_read |= {
        placement.memory(node): float("inf") for node in output_nodes(draft.graph) if isinstance(node, fx.Node)
    }
    now = peak = 0
    freed: dict[float, int] = {}
    for when, node in enumerate(nodes):
        is_new = node not in placement.lies_in and node not in placement.targets and node.target not in (launch, take)
        if is_new:
            now += _nbytes(value(node))
            peak = max(peak, now)
            last = last_read.get(node, when)
            freed[last] = freed.get(last, 0) + _nbytes(value(node))
        now -= freed.pop(when, 0)
    return persistent + peak


def _buffer_bytes(collective: Collective) -> int:
    received = [] if collective.kind.is_in_place else [collective.receive_shape]
    return sum(torch.Size(shape).numel() * collective.dtype.itemsize for shape in [collective.send_shape, *received])


def _nbytes(made: Any) -> int:
    parts = made if isinstance(made, tuple | list) else [made]
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, Tensor))
