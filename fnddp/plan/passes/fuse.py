"""Pass 4: residuals in one pass over memory: `x - p @ q.T` as one product with an addition."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from fnddp.plan.draft import Draft
from fnddp.plan.graph import is_tensor, is_view, remove_dead, tensor_nodes, value

aten: Any = torch.ops.aten

SMALLEST = 2**16  # elements from which a pass over memory is worth saving
SAMPLE = 512  # rows and columns on which bits are compared


def fuse(draft: Draft) -> Draft:
    """Turn the difference of a matrix and a product that nothing else reads into `addmm`, where the bits stay the same.

    They do where the product is summed before x is added. BLAS libraries differ in that, so it is tried.
    """
    graph = draft.graph
    for node in list(tensor_nodes(graph)):
        if node.target is not aten.sub.Tensor or node.kwargs or not isinstance(node.args[1], fx.Node):
            continue
        x, product = node.args[0], _through_views(node.args[1])
        if not isinstance(x, fx.Node) or product.target is not aten.mm.default or not _fits(value(x), value(product)):
            continue
        p, q = product.args
        layouts = tuple(value(factor).stride(-1) == 1 for factor in (p, q))
        shape = (*_sample(value(product)), value(p).shape[1])
        device = torch.device("cpu") if value(x).device.type == "meta" else value(x).device
        if len(product.users) > 1 or not _keeps_bits(shape, layouts, device):
            continue
        with graph.inserting_before(node):
            matrix = _view(graph, x, value(product).shape)
            lost = graph.call_function(aten.addmm.default, (matrix, p, q), {"alpha": -1})
            lost.meta["val"] = value(product)
            node.replace_all_uses_with(_view(graph, lost, value(node).shape))
    remove_dead(graph)
    return draft


def _through_views(node: fx.Node) -> fx.Node:
    while is_view(node) and len(node.users) == 1 and is_tensor(node) and value(node).is_contiguous():
        (node,) = node.all_input_nodes
    return node


def _fits(x: Any, product: Tensor) -> bool:
    return (
        isinstance(x, Tensor)
        and x.dtype == product.dtype == torch.float32
        and x.numel() == product.numel() >= SMALLEST
        and x.is_contiguous()
        and product.is_contiguous()
    )


def _view(graph: fx.Graph, node: fx.Node, shape: torch.Size) -> fx.Node:
    if value(node).shape == shape:
        return node
    view = graph.call_function(aten.view.default, (node, list(shape)))
    view.meta["val"] = value(node).view(shape)
    return view


def _sample(product: Tensor) -> tuple[int, int]:
    """Return a smaller shape that a product's kernels treat alike: with the same remainders."""
    rows, columns = (size if size <= SAMPLE else SAMPLE + size % SAMPLE for size in product.shape)
    return rows, columns


@cache
def _keeps_bits(shape: tuple[int, int, int], is_row_major: tuple[bool, ...], device: torch.device) -> bool:
    rows, columns, rank = shape
    generator = torch.Generator(device).manual_seed(0)

    def random(n: int, m: int, row_major: bool = True) -> Tensor:
        return torch.randn(n, m, generator=generator, device=device) if row_major else random(m, n).mT

    x, p, q = random(rows, columns), random(rows, rank, is_row_major[0]), random(rank, columns, is_row_major[1])
    return torch.equal(x - p @ q, torch.addmm(x, p, q, alpha=-1))
