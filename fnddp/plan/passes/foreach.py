"""Pass 9: use one operation for many small tensors.

An operation on a small tensor costs its call. So operations of a segment that differ only in their leaf become one of
torch's `_foreach` operations, with the same bits. (For large tensors this would only lose the cache.) The pass `order`
has put them side by side; this pass checks that none writes memory that another reads.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx

from fnddp.device import device_of
from fnddp.ir.program import LeafSpec, Scratch, Sent
from fnddp.plan.draft import Draft, Placement
from fnddp.plan.graph import is_light, is_tensor, kind_of, launch, launch_of, output_nodes, value
from fnddp.plan.passes.place import COPIES
from fnddp.torch_private import FOREACH

aten: Any = torch.ops.aten


def foreach(draft: Draft) -> Draft:
    """Find batches of operations that run as one `_foreach` operation."""
    if draft.request.backend == "inductor":  # it compiles loops, without a call per operation
        return draft
    placement = draft.placement
    returned = {placement.memory(node) for node in output_nodes(draft.graph) if isinstance(node, fx.Node)}
    for segment in draft.segments:
        draft.batches |= {members[0]: members for members in _alike(segment.nodes, placement, returned)}
    # A `_foreach` copy writes into existing memory, so copies without a place get scratch memory.
    for node in [node for members in draft.batches.values() for node in members if node.target in COPIES]:
        if node not in placement.targets:
            placement.targets[node] = placement.stored_in[node] = Scratch(node.name)
            placement.scratch[Scratch(node.name)] = LeafSpec.of(value(node))
    return draft


def is_in_place(node: fx.Node, placement: Placement) -> bool:
    """Return whether an operation writes over its first operand."""
    target, operand = placement.targets.get(node), node.args[0]
    if target is None or not isinstance(operand, fx.Node):
        return False
    return placement.memory(node) == placement.memory(operand)


def _alike(nodes: Sequence[fx.Node], placement: Placement, returned: set[Any]) -> Iterator[tuple[fx.Node, ...]]:
    """Yield batches of neighbours: the same operation on different tensors, written to the same kind of place."""

    def kind(node: fx.Node) -> object:
        return kind_of(node) if _may_be_joined(node, placement, returned) else node

    for _, neighbours in groupby(nodes, kind):
        for together in _independent(neighbours, placement):
            batches: dict[object, list[fx.Node]] = {}
            for node in together:
                whole = is_whole(node, placement)
                over_operand = not whole and is_in_place(node, placement)
                batches.setdefault((type(placement.targets.get(node)), whole, over_operand), []).append(node)
            yield from (tuple(batch) for batch in batches.values() if len(batch) > 1)


def _may_be_joined(node: fx.Node, placement: Placement, returned: set[Any]) -> bool:
    if not is_light(node) or not isinstance(value(node), torch.Tensor):
        return False
    if node.target in COPIES:
        return node in placement.targets or placement.memory(node) not in returned
    if node.kwargs and not is_tensor(node.args[-1]) and not is_whole(node, placement):
        return False  # it has both alpha and a number
    made, tensors = value(node), [value(arg) for arg in node.args if is_tensor(arg)]
    is_plain = all((t.shape, t.dtype, t.device) == (made.shape, made.dtype, made.device) for t in tensors)
    return node.target in FOREACH and is_plain and _has_same_bits(node, placement)


def _has_same_bits(node: fx.Node, placement: Placement) -> bool:
    number, made = node.args[1], value(node)
    if is_tensor(number) or is_whole(node, placement):
        return True
    if node.target is aten.div.Tensor:
        return device_of(made.device).divides_lists_alike
    if node.target is not aten.mul.Tensor or made.dtype not in (torch.bfloat16, torch.float16):
        return True
    # The CPU's `_foreach_mul` rounds a factor to 16 bits first.
    return isinstance(number, int | float) and _is_exact(number, torch.finfo(made.dtype))


def _is_exact(number: float, info: torch.finfo) -> bool:
    digits = math.frexp(number)[0] * 2 / info.eps  # an integer if no digit is rounded off
    return info.smallest_normal <= abs(number) <= info.max and digits.is_integer()


def is_whole(node: fx.Node, placement: Placement) -> bool:
    """Return whether an operation with a number may treat several results, stored in a buffer, as one tensor."""
    by_number = node.target in FOREACH and not is_tensor(node.args[1])
    # If the collective computes nothing, its buffer consists of bytes.
    is_sent = any(user.target is launch and launch_of(user)[1].kind.computes for user in node.users)
    return by_number and is_sent and isinstance(placement.targets.get(node), Sent)


def _independent(nodes: Iterable[fx.Node], placement: Placement) -> Iterator[list[fx.Node]]:
    """Yield runs of neighbours in which no operation makes or writes memory that another reads.

    None may write memory that it reads itself, except its first operand: that is copied to the place beforehand.
    """
    run: list[fx.Node] = []
    written: set[Any] = set()
    read: set[Any] = set()
    for node in nodes:
        memory, first = placement.memory(node), node.args[0]
        others = {placement.memory(source) for source in node.all_input_nodes if source is not first}
        operands = others | ({placement.memory(first)} if isinstance(first, fx.Node) else set())
        if memory in read or memory in others or operands & written:
            yield run
            run, written, read = [], set(), set()
        if memory not in others:
            run.append(node)
            written.add(memory)
            read |= operands
    yield run
