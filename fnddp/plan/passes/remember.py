"""Pass 4: let the operators of `two_shot` add and compute the residuals of `error_feedback`.

The first operator encodes gradients plus residuals, and another one writes the next residuals: neither the sums nor the
values that were sent are stored. The latter also leaves residuals as they are in a step with NaN or infinity, where
other memory has to be copied and selected.
"""

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from fnddp.core import tree
from fnddp.core.codec import wide
from fnddp.core.sync import REMEMBERED
from fnddp.ir.program import FoundNonfinite, StatePart
from fnddp.kernels.leaves import ENCODE, ENCODE_SUM, RESIDUAL, SENT
from fnddp.plan.draft import Draft
from fnddp.plan.graph import call, is_tensor, is_view, output_nodes, placeholders, remove_dead, tensor_nodes, value
from fnddp.plan.passes.simplify import reshaped
from fnddp.torch_private import fake_like

aten: Any = torch.ops.aten


class _Sum(NamedTuple):
    """A leaf `x`, to which an exchange adds `decay` times a residual, and the node of the next residual."""

    x: fx.Node
    residual: fx.Node
    decay: float
    following: fx.Node


def remember(draft: Draft) -> Draft:
    """Replace operators of `two_shot`, and sums and differences around them, if all their leaves have residuals."""
    graph, places = draft.graph, dict[fx.Node, int]()
    found: fx.Node | None = None
    for sent in [node for node in tensor_nodes(graph) if node.target is SENT.default]:
        given: Any = sent.args
        codec, payload, moved, again, counts, n, dtype, *ranks = given
        (encoded,) = payload[0].all_input_nodes
        if encoded.target is not ENCODE.default or len(sent.users) != len(counts):
            continue
        draws: Any = encoded.args[5:]
        places = places or _remembered(draft)
        sums = list(_sums(encoded, sent, dtype, places, output_nodes(graph)[len(draft.paths) :]))
        if len(sums) != len(counts) or len({each.decay for each in sums}) > 1:
            continue
        if found is None:
            with graph.inserting_after(placeholders(graph)[-1]):
                found = graph.placeholder("found_nonfinite")
            found.meta["val"] = value(sent.all_input_nodes[0]).new_empty((), dtype=torch.bool)
            draft.names[found] = FoundNonfinite()
        draft.kept |= {places[each.residual] for each in sums}
        decay = sums[0].decay
        with graph.inserting_before(encoded):
            x = [reshaped(graph, each.x, value(each.x).view(-1).shape) for each in sums]
            residual = [reshaped(graph, each.residual, value(each.residual).view(-1).shape) for each in sums]
            arguments: Any = codec, x, residual, counts, n, dtype, decay, *draws
            encoded.replace_all_uses_with(call(graph, ENCODE_SUM.default, arguments, {}, value(encoded), "encode_sum"))
        with graph.inserting_before(sent):
            made = [fake_like(value(each), value(each).shape) for each in residual]
            arguments = codec, payload, moved, again, x, residual, counts, n, dtype, *ranks, decay, found
            following = call(graph, RESIDUAL.default, arguments, {}, made, "residual")
            for i, each in enumerate(sums):
                item = call(graph, operator.getitem, (following, i), {}, made[i], "getitem")
                each.following.replace_all_uses_with(reshaped(graph, item, value(each.following).shape))
    remove_dead(graph)
    return draft


def _remembered(draft: Draft) -> dict[fx.Node, int]:
    """Return the inputs of the graph that a step with NaN or infinity leaves unchanged, and their positions."""
    names = {name: node for node, name in draft.names.items()}
    items = enumerate(tree.annotated_items(draft.request.state))
    return {names[StatePart(i)]: i for i, (_, marks, _) in items if REMEMBERED in marks}


def _sums(
    encoded: fx.Node, sent: fx.Node, dtype: torch.dtype, places: dict[fx.Node, int], state: list[Any]
) -> Iterator[_Sum]:
    """Yield the sum of each leaf that is encoded, unless its residual is computed in another way."""
    leaves: Any = encoded.args[1]
    items: list[Any] = list(sent.users)
    for item in sorted(items, key=lambda item: item.args[1]):
        total: Any = _source(leaves[item.args[1]])
        if total.target is aten._to_copy.default and total.kwargs == {"dtype": dtype}:
            total = total.args[0]
        following: Any = _reader(item)
        if total.target is not aten.add.Tensor or total.kwargs or not all(map(is_tensor, total.args)):
            continue
        x, residual = total.args
        decay = 1.0
        if residual.target is aten.mul.Tensor and isinstance(residual.args[1], float):
            residual, decay = residual.args
        likes = [(value(each).shape, value(each).dtype, value(each).is_contiguous()) for each in (residual, total)]
        if (
            residual in places
            and state[places[residual]] is following
            and len(following.users) == 1
            and following.target is aten.sub.Tensor
            and not following.kwargs
            and following.args[0] is total
            and likes == [(value(x).shape, wide(dtype), True)] * 2
            and (value(x).dtype, value(x).is_contiguous()) == (dtype, True)
        ):
            yield _Sum(x, residual, decay, following)


def _source(node: Any) -> fx.Node:
    """Return the tensor of which `node` is the same elements in another shape."""
    while is_view(node) and _is_reshaped(node.args[0], node):
        node = node.args[0]
    return node


def _reader(node: fx.Node) -> Any:
    """Return the only operation that reads `node`, or the same elements in another shape; None if there is none."""
    while len(node.users) == 1:
        (user,) = node.users
        if not is_view(user):
            return user
        if not _is_reshaped(node, user):
            return None
        node = user
    return None


def _is_reshaped(a: fx.Node, b: fx.Node) -> bool:
    if not (is_tensor(a) and is_tensor(b)):
        return False
    x, y = value(a), value(b)
    return x.is_contiguous() and y.is_contiguous() and (x.numel(), x.dtype) == (y.numel(), y.dtype)
