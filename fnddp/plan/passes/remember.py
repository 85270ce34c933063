"""Pass 4: let the operations that write memory on an accelerator read whether the step has found NaN or infinity.

The host does not know it there. The last operation on memory writes the old values again if a flag on the device is
set. For `error_feedback` around `two_shot` it does more: one operator of `two_shot` encodes gradients plus residuals,
and another one writes the next residuals, so neither the sums nor the values that were sent are stored.
"""

import operator
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import fx

from fnddp.core import tree
from fnddp.core.codec import wide
from fnddp.core.sync import REMEMBERED
from fnddp.device import device_of
from fnddp.ir.program import FoundNonfinite, StatePart
from fnddp.kernels.int8 import FROM_INT8, TO_INT8
from fnddp.kernels.keep import KEEP
from fnddp.kernels.leaves import ENCODE, ENCODE_SUM, RESIDUAL, SENT
from fnddp.plan.draft import Draft
from fnddp.plan.graph import call, is_tensor, is_view, output_nodes, placeholders, remove_dead, tensor_nodes, value
from fnddp.plan.passes.combine import reaches
from fnddp.plan.passes.simplify import reshaped
from fnddp.torch_private import fake_like

aten: Any = torch.ops.aten


class _Sum(NamedTuple):
    """A leaf `x`, to which an exchange adds `decay` times a residual, and the nodes of the next residual.

    `residual` and `following` have one node, or two in int8: numbers and scales.
    """

    x: fx.Node
    residual: tuple[fx.Node, ...]
    decay: float
    following: tuple[fx.Node, ...]


def remember(draft: Draft) -> Draft:
    """Keep the memory of a plan for an accelerator in a step with NaN or infinity."""
    places, inputs = _remembered(draft), placeholders(draft.graph)
    if not places or not device_of(value(inputs[0]).device).is_asynchronous:
        return draft
    with draft.graph.inserting_after(inputs[-1]):
        found = draft.graph.placeholder("found_nonfinite")
    found.meta["val"] = value(inputs[0]).new_empty((), dtype=torch.bool)
    draft.names[found] = FoundNonfinite()
    kept = _with_operators(draft, places, found)
    _keep(draft, {old: i for old, i in places.items() if i not in kept}, found)
    remove_dead(draft.graph)
    return draft


def _with_operators(draft: Draft, places: dict[fx.Node, int], found: fx.Node) -> set[int]:
    """Replace operators of `two_shot`, and sums and differences around them, if all their leaves have residuals.

    Return the positions of these residuals.
    """
    graph, kept = draft.graph, set[int]()
    for sent in [node for node in tensor_nodes(graph) if node.target is SENT.default]:
        given: Any = sent.args
        codec, payload, moved, again, counts, n, dtype, *ranks = given
        (encoded,) = payload[0].all_input_nodes
        if encoded.target is not ENCODE.default or len(sent.users) != len(counts):
            continue
        draws: Any = encoded.args[5:]
        sums = list(_sums(encoded, sent, dtype, places, output_nodes(graph)[len(draft.paths) :]))
        if len(sums) != len(counts) or len({(each.decay, len(each.residual)) for each in sums}) > 1:
            continue
        kept |= {places[part] for each in sums for part in each.residual}
        decay = sums[0].decay
        with graph.inserting_before(encoded):
            x = [reshaped(graph, each.x, value(each.x).view(-1).shape) for each in sums]
            residuals = [
                [reshaped(graph, part, value(part).view(-1).shape) for part in parts]
                for parts in zip(*(each.residual for each in sums), strict=True)
            ]
            residual, factor = (*residuals, [])[:2]
            arguments: Any = codec, x, residual, factor, counts, n, dtype, decay, *draws
            encoded.replace_all_uses_with(call(graph, ENCODE_SUM.default, arguments, {}, value(encoded), "encode_sum"))
        with graph.inserting_before(sent):
            made = [fake_like(value(each), value(each).shape) for each in (*residual, *factor)]
            arguments = codec, payload, moved, again, x, residual, factor, counts, n, dtype, *ranks, decay, found
            following = call(graph, RESIDUAL.default, arguments, {}, made, "residual")
            next_parts = chain.from_iterable(zip(*(each.following for each in sums), strict=True))
            for i, part in enumerate(next_parts):
                item = call(graph, operator.getitem, (following, i), {}, made[i], "getitem")
                part.replace_all_uses_with(reshaped(graph, item, value(part).shape))
    return kept


def _keep(draft: Draft, places: dict[fx.Node, int], found: fx.Node) -> None:
    """Let one operation for each bucket, or large tensor, return old values if `found` is true, and else the next."""
    graph, outputs, n = draft.graph, output_nodes(draft.graph), len(draft.paths)
    reach, bucket_of = reaches(graph, draft.weight), [draft.request.buckets[path] for path in draft.paths]
    together: dict[Any, list[tuple[int, fx.Node, fx.Node]]] = {}
    for old, i in places.items():
        new = outputs[n + i]
        if not is_tensor(new) or new is old or not value(new).numel():
            continue
        like: torch.Tensor = value(new)
        bucket = max((bucket for at, bucket in enumerate(bucket_of) if reach[new].leaves >> at & 1), default=0)
        is_small = like.nbytes <= device_of(like.device).light_bytes
        together.setdefault((bucket, like.dtype, None if is_small else i), []).append((i, old, new))
    with graph.inserting_before(graph.output_node()):
        for parts in together.values():
            following = [_apart_from(places, graph, new) for _, _, new in parts]
            if draft.request.backend is not None:  # a compiler selects while it computes
                made = [(found, old, new) for (_, old, _), new in zip(parts, following, strict=True)]
                items = [call(graph, aten.where.self, each, {}, value(each[2]), "keep") for each in made]
            else:
                likes = [torch.empty_like(value(new)) for new in following]
                whole = call(graph, KEEP, ([old for _, old, _ in parts], following, found), {}, likes, "keep")
                items = [call(graph, operator.getitem, (whole, k), {}, like, "getitem") for k, like in enumerate(likes)]
            for (i, _, _), item in zip(parts, items, strict=True):
                outputs[n + i] = item
    graph.output_node().args = (outputs,)


def _apart_from(places: dict[fx.Node, int], graph: fx.Graph, new: fx.Node) -> fx.Node:
    """Return `new`, or a copy if it is the old value of another part, which may be written over."""
    source: Any = new
    while is_view(source):
        source = source.args[0]
    return call(graph, aten.clone.default, (new,), {}, value(new), "clone") if source in places else new


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
        if getattr(following, "target", None) is not aten.sub.Tensor or following.kwargs or len(following.users) > 1:
            continue
        old, new = (residual,), (following,)
        if _source(residual).target is FROM_INT8:
            old, new = tuple(map(_source, _source(residual).args)), _stored(following)
        likes = [(value(each).shape, value(each).dtype, value(each).is_contiguous()) for each in (residual, total)]
        if (
            all(part in places for part in old)
            and [state[places[part]] for part in old] == list(new)
            and all(len(part.users) == 1 for part in new)
            and following.args[0] is total
            and likes == [(value(x).shape, wide(dtype), True)] * 2
            and (value(x).dtype, value(x).is_contiguous()) == (dtype, True)
        ):
            yield _Sum(x, old, decay, new)


def _stored(following: fx.Node) -> tuple[fx.Node, ...]:
    """Return the numbers and scales in int8 of a residual, through views; nothing if it is stored in another way."""
    stored: Any = _reader(following)
    if getattr(stored, "target", None) is not TO_INT8 or len(stored.users) != 2:
        return ()
    return tuple(sorted(stored.users, key=lambda item: item.args[1]))


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
