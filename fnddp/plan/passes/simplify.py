"""Passes 2, 3 and 5: drop unused nodes, remove nodes without effect, fuse residuals into one pass over memory.

Pass 3 also computes constants.
"""

import operator
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, fx

from fnddp.device import device_of
from fnddp.ir.program import Held
from fnddp.plan.draft import Draft
from fnddp.plan.graph import (
    call,
    is_light,
    is_tensor,
    is_view,
    output_nodes,
    placeholders,
    remove_dead,
    tensor_nodes,
    value,
)
from fnddp.plan.passes.combine import reaches
from fnddp.torch_private import fake_like, without_modes

aten: Any = torch.ops.aten

_FACTORIES = {aten.eye.default, aten.scalar_tensor.default}
SMALLEST = 2**16  # number of elements from which on saving a pass over memory pays
SAMPLE = 512  # number of rows and columns for a comparison of bits


def drop(draft: Draft) -> Draft:
    """Replace the means of dropped leaves by their gradients (zeros), and keep the state that only they change."""
    graph, n = draft.graph, len(draft.paths)
    gone = sum(1 << i for i, path in enumerate(draft.paths) if path in draft.request.dropped)
    if not gone:
        return draft
    reach = reaches(graph, draft.weight)

    def is_dropped(i: int, node: Any) -> bool:
        read = reach[node].leaves & ((1 << n) - 1) if isinstance(node, fx.Node) else 0
        return (read != 0 and read & ~gone == 0) or (i < n and node is not None and bool(gone >> i & 1))

    both = zip(placeholders(graph), output_nodes(graph), strict=False)
    kept: Any = [given if is_dropped(i, node) else node for i, (given, node) in enumerate(both)]
    graph.output_node().args = (kept,)
    remove_dead(graph)
    return draft


def simplify(draft: Draft) -> Draft:
    """Remove views with the same shape and strides as their base, and subtractions of zeros.

    On devices that convert operands within a product, also remove copies of 8-bit integers as floats (they are exact).
    """
    for node in list(tensor_nodes(draft.graph)):
        if node.target is aten.mul.Tensor and all(map(is_tensor, node.args)):
            _multiply_integers(node)
        source: Any = node.args[0] if node.args else None
        changes_nothing = is_view(node) or _subtracts_zeros(node)
        if changes_nothing and is_tensor(source) and is_tensor(node) and _layout(source) == _layout(node):
            node.replace_all_uses_with(source)
    _fold(draft)
    remove_dead(draft.graph)
    return draft


def _fold(draft: Draft) -> None:
    """Compute small tensors that depend on numbers of the pipeline's code only, and keep them in the plan."""
    graph, made = draft.graph, dict[fx.Node, Tensor]()
    for node in tensor_nodes(graph):
        sources = node.all_input_nodes
        is_literal = node.target is aten.lift_fresh_copy.default and sources[0].op == "get_attr"
        is_known = node.target in _FACTORIES if not sources else all(source in made for source in sources)
        if is_literal:
            made[node] = draft.held[str(sources[0].target)]
        elif is_known and getattr(node.target, "namespace", "") == "aten" and is_tensor(node) and is_light(node):
            compute: Any = node.target
            arguments: Any = fx.map_arg((node.args, node.kwargs), cast(Any, made.__getitem__))
            with without_modes():
                made[node] = compute(*arguments[0], **arguments[1])
    for node in reversed(list(made)):  # constants, and views of them, must not be results, which are written over
        if any(user not in made and (user.op == "output" or is_view(user)) for user in node.users):
            del made[node]
    held: dict[str, Tensor] = {}
    for node, constant in made.items():
        if any(user not in made for user in node.users):
            with graph.inserting_before(node):
                kept = graph.create_node("get_attr", f"constant_{node.name}")
            kept.meta["val"] = value(node)
            draft.names[kept], held[str(kept.target)] = Held(str(kept.target)), constant
            node.replace_all_uses_with(kept)
    draft.held = {**draft.held, **held}


def _multiply_integers(node: fx.Node) -> None:
    copy, other = (arg for arg in node.args if isinstance(arg, fx.Node))
    if copy is other or copy.target is not aten._to_copy.default or set(copy.kwargs) != {"dtype"}:
        return
    (source,) = copy.all_input_nodes
    is_exact = value(source).dtype in (torch.int8, torch.uint8) and value(other).dtype == value(copy).dtype
    if is_exact and value(other).ndim and device_of(value(node).device).converts_in_place:
        node.replace_input_with(copy, source)


def _subtracts_zeros(node: fx.Node) -> bool:
    # x - 0 has the bits of x for all x, including -0.0 and NaN.
    is_difference = node.target is aten.sub.Tensor and not node.kwargs
    return is_difference and getattr(node.args[1], "target", None) is aten.zeros_like.default


def _layout(node: fx.Node) -> Any:
    made: Tensor = value(node)
    return made.shape, made.stride(), made.storage_offset(), made.dtype, made.is_conj(), made.is_neg()


def fuse(draft: Draft) -> Draft:
    """Turn `x - p @ q` into `addmm` if nothing else reads the product and the bits stay the same.

    Bits stay the same if the product is summed before x is added. BLAS libraries differ here, so a sample is computed.
    For products of stacks it is `baddbmm`.
    """
    graph = draft.graph
    _fuse_stacks(graph)
    for node in list(tensor_nodes(graph)):
        if node.target is not aten.sub.Tensor or node.kwargs or not all(map(is_tensor, node.args)):
            continue
        x: Any = node.args[0]
        product = _through_views(node.args[1])
        if product.target is not aten.mm.default or len(product.users) > 1 or not _fits(value(x), value(product)):
            continue
        if not _sample_keeps_bits(product):
            continue
        with graph.inserting_before(node):
            matrix = reshaped(graph, x, value(product).shape)
            lost = call(graph, aten.addmm.default, (matrix, *product.args), {"alpha": -1}, value(product))
            node.replace_all_uses_with(reshaped(graph, lost, value(node).shape))
    remove_dead(graph)
    return draft


def _fuse_stacks(graph: fx.Graph) -> None:
    """Subtract the product of stacks from a stack if each of its parts is subtracted from that part of the stack."""
    for x in [node for node in tensor_nodes(graph) if node.target is aten.stack.default]:
        sources: Any = x.args[0]
        differences = [_difference(_through_views(source)) for source in sources]
        parts = [None if node is None else _part(node.args[1]) for node in differences]
        unbound: Any = parts[0][0] if parts[0] else x
        if unbound.target is not aten.unbind.int or parts != [(unbound, i) for i in range(len(unbound.users))]:
            continue
        product: Any = unbound.args[0]
        if product.target is not aten.bmm.default or len(product.users) > 1 or _layout(product) != _layout(x):
            continue
        if value(x).dtype == torch.float32 and _sample_keeps_bits(product):
            with graph.inserting_before(product):
                lost = call(graph, aten.baddbmm.default, (x, *product.args), {"alpha": -1}, value(product))
            product.replace_all_uses_with(lost)
            for node in differences:
                node.replace_all_uses_with(node.args[1])


def _difference(x: fx.Node) -> Any:
    """Return the only subtraction of a tensor of the same shape from `x`; None if there is none."""
    readers = [user for user in x.users if user.target is aten.sub.Tensor and not user.kwargs and user.args[0] is x]
    if len(readers) != 1 or not is_tensor(readers[0].args[1]):
        return None
    made, y = value(readers[0]), value(readers[0].args[1])
    return readers[0] if (made.shape, made.stride()) == (y.shape, y.stride()) and y.is_contiguous() else None


def _part(node: Any) -> tuple[Any, Any] | None:
    """Return the list and the index of which `node` is a view, if nothing else reads that item."""
    while len(node.users) == 1 and is_view(node) and value(node).is_contiguous():
        if node.target is operator.getitem:
            return node.args
        (node,) = node.all_input_nodes
    return None


def _through_views(node: Any) -> fx.Node:
    while is_view(node) and len(node.users) == 1 and is_tensor(node) and value(node).is_contiguous():
        (node,) = node.all_input_nodes
    return node


def _fits(x: Tensor, product: Tensor) -> bool:
    is_large = x.numel() == product.numel() >= SMALLEST and x.dtype == product.dtype == torch.float32
    return is_large and x.is_contiguous() and product.is_contiguous()


def reshaped(graph: fx.Graph, node: fx.Node, shape: torch.Size) -> fx.Node:
    """Return `node`, which is contiguous, or a new view of it that has this shape."""
    if value(node).shape == shape:
        return node
    return call(graph, aten.view.default, (node, list(shape)), {}, fake_like(value(node), shape))


def _sample_keeps_bits(product: fx.Node) -> bool:
    p, q = map(value, product.args)
    # A smaller shape with the same remainders, so that kernels treat it like the full one.
    sizes = (size if size <= SAMPLE else SAMPLE + size % SAMPLE for size in value(product).shape)
    device = torch.device("cpu") if p.is_meta else p.device
    return _keeps_bits((*sizes, p.shape[-1]), (p.stride(-1) == 1, q.stride(-1) == 1), device)


@cache
def _keeps_bits(shape: tuple[int, ...], is_row_major: tuple[bool, ...], device: torch.device) -> bool:
    *count, rows, columns, rank = shape
    generator = torch.Generator(device).manual_seed(0)

    def random(n: int, m: int, row_major: bool = True) -> Tensor:
        return torch.randn(*count, n, m, generator=generator, device=device) if row_major else random(m, n).mT

    x, p, q = random(rows, columns), random(rows, rank, is_row_major[0]), random(rank, columns, is_row_major[1])
    return torch.equal(x - p @ q, (torch.baddbmm if count else torch.addmm)(x, p, q, alpha=-1))
