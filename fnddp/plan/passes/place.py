"""Pass 6: where results are written.

Payloads are written into the flat buffers of their collectives by the operation that computes them. Means have memory
of their own that persists across steps (`Result`), which until then holds what a mean is computed from. The next state
is written over the last one, once all collectives are complete. An operation on elements writes over its operand when
nobody reads that again. All of it is decided here, once; none of it changes a bit of any result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx

from fnddp.plan.ir import Collective, is_view, launch, launch_of, output_nodes, take, value
from fnddp.plan.passes.order import Segment

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Donation:
    """What a step may write over.

    Attributes:
        gradients: "no", "at_end" (once all collectives are complete), or "yes" (as soon as nobody reads them).
        state: Whether the state may be, once all collectives are complete. A step that fails leaves it alone.
    """

    gradients: Literal["no", "at_end", "yes"] = "no"
    state: bool = False


# What can write its result into given memory. All but products act on elements: they may write over an operand too.
_ELEMENTWISE: dict[Any, Any] = {
    aten.add.Tensor: aten.add.out,
    aten.sub.Tensor: aten.sub.out,
    aten.mul.Tensor: aten.mul.out,
    aten.div.Tensor: aten.div.out,
    aten.addmm.default: aten.addmm.out,  # on the elements of its first operand
}
_PRODUCTS: dict[Any, Any] = {aten.mm.default: aten.mm.out}
_COPIES = {aten._to_copy.default, aten.clone.default}
_WRITERS = {*_ELEMENTWISE, *_PRODUCTS, *_COPIES}

Place: TypeAlias = tuple[Collective, int]
"""A payload of a collective."""


@dataclass(frozen=True)
class Result:
    """The persistent memory of the mean of the leaf at `index`."""

    index: int

    @property
    def name(self) -> str:
        return f"mean[{self.index}]"


Target: TypeAlias = fx.Node | Result | Place


class Memory:
    """Where each node of ordered segments writes.

    Attributes:
        payloads: The payloads that a node is copied to.
        computed: The nodes that some segment computes.
        overwritten: Names of the gradients and parts of the state that are written over.
        results: Leaves (by index) whose mean has memory of its own.
        memories: For leaves (by index) what is free to be that memory in the next step.
    """

    def __init__(self, graph: fx.Graph, segments: Sequence[Segment], paths: Sequence[str], donation: Donation) -> None:
        nodes = [node for s in segments for node in [*s.nodes, s.launches] if node is not None]
        inputs = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]
        outputs = output_nodes(graph)
        leaves = inputs[: len(paths)]
        committing = [s.nodes[0] for s in segments if s.commits]
        self._when = {node: i for i, node in enumerate(nodes)}
        self._leaves = {leaf: i for i, leaf in enumerate(leaves)}
        self._donation = donation
        self._commits = self._when[committing[0]] if committing else float("inf")
        self.payloads: dict[fx.Node, list[Place]] = {}
        for node in nodes:
            if node.target is launch:
                sources, collective = launch_of(node)
                for position, source in enumerate(sources):
                    self.payloads.setdefault(source, []).append((collective, position))
        self.computed = {node for node in nodes if node.target is not launch and node.target is not take}

        self._lies_in: dict[fx.Node, fx.Node | Result] = {
            node: node.all_input_nodes[0] for node in nodes if is_view(node)
        }
        self._last_read: dict[fx.Node | Result, float] = {}
        for node in nodes:
            for source in node.all_input_nodes:
                self._last_read[self._memory(source)] = self._when[node]
        for node in outputs:
            if isinstance(node, fx.Node):
                self._last_read[self._memory(node)] = float("inf")
        means, state = outputs[: len(leaves)], outputs[len(leaves) :]
        self._mean_of = {self._memory(node): i for i, node in enumerate(means) if isinstance(node, fx.Node)}
        self._part_of = {
            self._memory(node): part
            for node, part in zip(state, inputs[len(leaves) :], strict=False)
            if isinstance(node, fx.Node)
        }
        self._remembered = _read_together(leaves, inputs[len(leaves) :])
        self.overwritten: set[str] = set()
        self.results: set[int] = set()
        self._targets: dict[fx.Node, Target] = {}
        for node in nodes:
            self._decide(node)
        memories = {i: self._memory_for_next(i, node) for i, node in enumerate(means)}
        self.memories = {i: memory for i, memory in memories.items() if memory is not None}

    def peak_bytes(self) -> int:
        """Memory that a step takes at most beside gradients and state: buffers, means, and what is computed between."""
        persistent = sum(launch_of(node)[1].wire_bytes for node in self._when if node.target is launch)
        persistent += sum(_nbytes(value(leaf)) for leaf, index in self._leaves.items() if index in self.results)
        now = peak = 0
        freed: dict[float, int] = {}
        for node, when in self._when.items():
            if node in self.computed and node not in self._lies_in and node not in self._targets:
                now += _nbytes(value(node))
                peak = max(peak, now)
                last = self._last_read.get(node, when)
                freed[last] = freed.get(last, 0) + _nbytes(value(node))
            now -= freed.pop(when, 0)
        return persistent + peak

    def target_of(self, node: fx.Node) -> Target | None:
        """What the result of `node` is written over, if anything."""
        return self._targets.get(node)

    def _memory(self, node: fx.Node) -> fx.Node | Result:
        """The memory that the result of `node` lies in, called by the node that made it."""
        memory: fx.Node | Result = node
        while isinstance(memory, fx.Node) and memory in self._lies_in:
            memory = self._lies_in[memory]
        return memory

    def _decide(self, node: fx.Node) -> None:
        if node.target not in _WRITERS:
            return
        places = self.payloads.get(node, [])
        if len(places) == 1 and len(node.users) == 1 and node.target not in _PRODUCTS:
            self._targets[node] = places[0]
            return
        target = (
            self._operand(node)
            or self._part(node)
            or self._remembered_part(node)
            or self._result(node)
            or self._gradient(node)
        )
        if target is None:
            return
        memory = target if isinstance(target, Result) else self._memory(target)
        self._targets[node] = target
        self._lies_in[node] = memory
        self._last_read[memory] = max(self._last_read.get(memory, -1), self._last_read.get(node, -1))
        if isinstance(memory, Result):
            self.results.add(memory.index)
        elif memory.op == "placeholder":
            self.overwritten.add(memory.name)

    def _part(self, node: fx.Node) -> fx.Node | None:
        """The part of the state that `node` is the next value of."""
        part = self._part_of.get(node)
        if not self._donation.state or part is None or self._when[node] < self._commits:
            return None
        return part if _same_kind(value(part), value(node)) and self._is_free(part, node) else None

    def _result(self, node: fx.Node) -> Result | None:
        """The memory of a mean, for the mean or for what it is computed from."""
        index = self._mean_of.get(node)
        if self._donation.gradients == "at_end":  # where means go over gradients
            index = None
        if index is None and self._donation == Donation("at_end", state=True):
            index = next((self._leaves[source] for source in node.all_input_nodes if source in self._leaves), None)
        if index is None:
            return None
        leaf = value(list(self._leaves)[index])
        return Result(index) if _same_kind(leaf, value(node)) and self._is_free(Result(index), node) else None

    def _operand(self, node: fx.Node) -> fx.Node | None:
        """The operand of `node`, if it is ours and nobody reads it again."""
        operand = node.args[0] if node.target in _ELEMENTWISE else None
        if not isinstance(operand, fx.Node) or not _same_layout(value(operand), value(node)):
            return None
        memory = self._memory(operand)
        if isinstance(memory, fx.Node):
            in_graph = memory.op == "call_function" and memory.target is not launch
            gradient = memory in self._leaves and self._donation.gradients == "yes"
            whole = isinstance(value(memory), Tensor) and value(memory).numel() == value(node).numel()
            if not (in_graph or gradient) or not whole:
                return None
        return operand if self._is_free(memory, node) else None

    def _memory_for_next(self, index: int, mean: Any) -> fx.Node | Result | None:
        """What becomes the memory of the leaf's next mean, once nobody holds this one."""
        if index not in self.results:
            return None
        if isinstance(mean, fx.Node) and self._memory(mean) == Result(index):
            return Result(index)
        is_kept = self._last_read[Result(index)] == float("inf")  # as a part of the next state
        return self._remembered.get(index) if is_kept else Result(index)

    def _remembered_part(self, node: fx.Node) -> fx.Node | None:
        """What was remembered of the gradient that `node` is the mean of: its residual before this step."""
        part = self._remembered.get(self._mean_of.get(node, -1))
        if not self._donation.state or self._donation.gradients != "yes" or part is None:
            return None
        is_free = self._when[node] >= self._commits and self._is_free(part, node)
        return part if is_free and _same_kind(value(part), value(node)) else None

    def _gradient(self, node: fx.Node) -> fx.Node | None:
        """The gradient that `node` is the mean of."""
        index = self._mean_of.get(node)
        if index is None or self._donation.gradients == "no" or self._when[node] < self._commits:
            return None
        leaf = list(self._leaves)[index]
        fits = _same_kind(value(leaf), value(node)) and value(leaf).is_contiguous()
        return leaf if fits and self._memory(leaf) is leaf and self._is_free(leaf, node) else None

    def _is_free(self, memory: fx.Node | Result, node: fx.Node) -> bool:
        """Whether `node` may write there: nobody reads it later, and `node` itself only element by element."""
        now = self._when[node]
        if self._last_read.get(memory, -1) < now:
            return True
        reads = [source for source in node.all_input_nodes if self._memory(source) == memory]
        in_place = reads == [node.args[0]] and _same_layout(value(reads[0]), value(node))
        return self._last_read[memory] == now and node.target in _ELEMENTWISE and in_place


def into(graph: fx.Graph, node: fx.Node, value_of: Callable[[fx.Node], fx.Node], destination: fx.Node) -> fx.Node:
    """`node` in `graph`, written into `destination`."""
    arguments, options = fx.map_arg(node.args, value_of), fx.map_arg(node.kwargs, value_of)
    if node.target in _COPIES:
        return graph.call_function(aten.copy_.default, (destination, arguments[0]))  # pyright: ignore[reportIndexIssue, reportOptionalSubscript, reportArgumentType]
    writing = _ELEMENTWISE.get(node.target) or _PRODUCTS[node.target]
    return graph.call_function(writing, arguments, {**options, "out": destination})  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]


def _read_together(leaves: Sequence[fx.Node], parts: Sequence[fx.Node]) -> dict[int, fx.Node]:
    """For each leaf the part of the state that is added to it, or otherwise read with it."""
    return {
        i: part
        for i, leaf in enumerate(leaves)
        for user in leaf.users
        for part in user.all_input_nodes
        if part in parts and _same_kind(value(leaf), value(part))
    }


def _nbytes(made: Any) -> int:
    parts = made if isinstance(made, tuple | list) else [made]
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, Tensor))


def _same_kind(a: Any, b: Any) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and (a.numel(), a.dtype, a.device) == (b.numel(), b.dtype, b.device)
        and b.is_contiguous()
    )


def _same_layout(a: Any, b: Any) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())
    )
