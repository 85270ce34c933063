"""Pass 5: where results are written.

Payloads are written into the flat buffers of their collectives by the operation that computes them. An elementwise
operation writes over its first operand when nobody reads that again. A mean may be written over the gradient that it
replaces. All of it is decided here, once; none of it changes a bit of any result.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx

from fnddp.plan.ir import Collective, is_view, launch, output_nodes, take, value
from fnddp.plan.order import Segment

aten: Any = torch.ops.aten

Donate: TypeAlias = Literal["no", "at_end", "yes"]
"""Whether gradients may be overwritten: never, once all collectives are complete, or as soon as nobody reads them."""

# What can write its result into given memory. All but the products are elementwise: they may also write over an operand.
_ELEMENTWISE: dict[Any, Any] = {
    aten.add.Tensor: aten.add.out,
    aten.sub.Tensor: aten.sub.out,
    aten.mul.Tensor: aten.mul.out,
    aten.div.Tensor: aten.div.out,
}
_PRODUCTS: dict[Any, Any] = {aten.mm.default: aten.mm.out}
_COPIES = {aten._to_copy.default, aten.clone.default}

Place: TypeAlias = tuple[Collective, int]
"""A payload of a collective."""


class Memory:
    """Where each node of ordered segments writes.

    Attributes:
        payloads: The payloads that a node is copied to.
        computed: The nodes that some segment computes.
        overwritten: Names of the gradients that are written over.
    """

    def __init__(self, graph: fx.Graph, segments: Sequence[Segment], paths: Sequence[str], donate: Donate) -> None:
        nodes = [node for s in segments for node in [*s.nodes, s.launches] if node is not None]
        inputs = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]
        outputs = output_nodes(graph)
        leaves = inputs[: len(paths)]
        waiting = [s.nodes[0] for s in segments if s.waits and s.nodes]
        self._when = {node: i for i, node in enumerate(nodes)}
        self._leaves = set(leaves)
        self._writable_from = {
            "no": float("inf"),
            "at_end": max([self._when[node] for node in waiting], default=0),
            "yes": -1.0,
        }[donate]
        self.payloads: dict[fx.Node, list[Place]] = {}
        for node in nodes:
            if node.target is launch:
                sources, collective = node.args
                for position, source in enumerate(sources):  # pyright: ignore[reportArgumentType]
                    self.payloads.setdefault(source, []).append((collective, position))  # pyright: ignore[reportArgumentType]
        self.computed = {node for node in nodes if node.target is not launch and node.target is not take}

        self._lies_in = {node: node.all_input_nodes[0] for node in nodes if is_view(node)}
        self._last_read: dict[fx.Node, float] = {}
        for node in nodes:
            for source in node.all_input_nodes:
                self._last_read[self._memory(source)] = self._when[node]
        for node in outputs:
            if isinstance(node, fx.Node):
                self._last_read[self._memory(node)] = float("inf")
        self._gradient_of = {
            self._memory(node): leaf for leaf, node in zip(leaves, outputs, strict=False) if isinstance(node, fx.Node)
        }
        self.overwritten: set[str] = set()
        self._targets: dict[fx.Node, fx.Node | Place] = {}
        for node in nodes:
            self._decide(node)

    def target_of(self, node: fx.Node) -> fx.Node | Place | None:
        """What the result of `node` is written over: a payload, another node's result, or nothing."""
        return self._targets.get(node)

    def _decide(self, node: fx.Node) -> None:
        places = self.payloads.get(node, [])
        if len(places) == 1 and len(node.users) == 1 and (node.target in _ELEMENTWISE or node.target in _COPIES):
            self._targets[node] = places[0]
            return
        target = self._operand(node) or self._gradient(node)
        if target is not None:
            self._targets[node] = target
            memory = self._memory(target)
            self._lies_in[node] = memory
            if memory in self._leaves:
                self.overwritten.add(memory.name)
            self._last_read[memory] = max(self._last_read.get(memory, -1), self._last_read.get(node, -1))

    def _memory(self, node: fx.Node) -> fx.Node:
        """The node that made the memory in which the result of `node` lies."""
        while node in self._lies_in:
            node = self._lies_in[node]
        return node

    def _operand(self, node: fx.Node) -> fx.Node | None:
        operand = node.args[0] if node.target in _ELEMENTWISE else None
        if not isinstance(operand, fx.Node) or not _same_layout(value(operand), value(node)):
            return None
        memory = self._memory(operand)
        if not isinstance(value(memory), Tensor) or value(memory).numel() != value(node).numel():
            return None
        if any(self._memory(other) is memory for other in node.all_input_nodes if other is not operand):
            return None
        return operand if self._last_read[memory] == self._when[node] and self._is_ours(memory, node) else None

    def _gradient(self, node: fx.Node) -> fx.Node | None:
        leaf = self._gradient_of.get(node)
        writes = node.target in _COPIES or node.target in _ELEMENTWISE or node.target in _PRODUCTS
        if leaf is None or not writes or not self._is_ours(leaf, node) or self._memory(leaf) is not leaf:
            return None
        if not _same_kind(value(leaf), value(node)) or not value(leaf).is_contiguous() or not value(node).is_contiguous():
            return None
        read_now = node.target in _PRODUCTS and leaf in [self._memory(source) for source in node.all_input_nodes]
        return leaf if self._last_read.get(leaf, -1) <= self._when[node] and not read_now else None

    def _is_ours(self, memory: fx.Node, node: fx.Node) -> bool:
        if memory in self._leaves:
            return self._when[node] >= self._writable_from
        return memory.op == "call_function" and memory.target is not launch


def into(graph: fx.Graph, node: fx.Node, value_of: Callable[[fx.Node], fx.Node], destination: fx.Node) -> fx.Node:
    """`node` in `graph`, written into `destination`."""
    arguments, options = fx.map_arg(node.args, value_of), fx.map_arg(node.kwargs, value_of)
    if node.target in _COPIES:
        return graph.call_function(aten.copy_.default, (destination, arguments[0]))  # pyright: ignore[reportIndexIssue, reportOptionalSubscript, reportArgumentType]
    writing = _ELEMENTWISE.get(node.target) or _PRODUCTS[node.target]
    return graph.call_function(writing, arguments, {**options, "out": destination})  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]


def _same_kind(a: Any, b: Any) -> bool:
    return isinstance(b, Tensor) and (a.numel(), a.dtype, a.device) == (b.numel(), b.dtype, b.device)


def _same_layout(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and _same_kind(a, b) and (a.shape, a.stride()) == (b.shape, b.stride())
