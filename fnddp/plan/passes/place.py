"""Pass 8: choose the memory of each result.

The operation that computes a payload writes it into the flat buffer of its collective. Means have separate memory that
persists across steps (`Mean`) and holds operands of the mean at first. The next state is written over the previous one,
once all collectives are complete. An elementwise operation writes over its operand if nothing reads that later. No bit
of a result changes.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from fnddp.device import device_of
from fnddp.ir.program import LeafSpec, Mean, Scratch, Sent
from fnddp.kernels.keep import KEEP
from fnddp.kernels.leaves import ENCODE_SUM, OUT, RESIDUAL
from fnddp.plan.draft import Donation, Draft, Storage
from fnddp.plan.graph import (
    is_light,
    is_made_in_list,
    is_tensor,
    is_view,
    launch,
    launch_of,
    output_nodes,
    placeholders,
    value,
)
from fnddp.torch_private import elementwise_out
from fnddp.wire.kinds import SUM, SUM_INTO

aten: Any = torch.ops.aten

# Operations that can write into existing memory, in addition to elementwise ones.
PRODUCTS: dict[Any, Any] = {aten.mm.default: torch.mm, SUM: SUM_INTO}
ADDITIONS: dict[Any, Any] = {  # of products, to an operand that they may write over
    aten.addmm.default: aten.addmm.out,
    aten.baddbmm.default: aten.baddbmm.out,
}
COPIES = {aten._to_copy.default, aten.clone.default}


def elementwise(target: Any) -> Any:
    """Return the `out=` form of an elementwise operation, so that it may write over its operand; otherwise None."""
    return ADDITIONS.get(target) or elementwise_out(target)


def place(draft: Draft) -> Draft:
    memories = _Memories(draft)
    for node in memories.nodes:
        memories.decide(node)
    memories.decide_for_next_step()
    return draft


class _Memories:
    """The memory of each node, and its last read, while operations are assigned places in order."""

    def __init__(self, draft: Draft) -> None:
        graph, paths = draft.graph, draft.paths
        self.nodes = [
            node for segment in draft.segments for node in [*segment.nodes, segment.launches] if node is not None
        ]
        self.donation, self.is_compiled = draft.request.donation, draft.request.backend is not None
        self.placement = draft.placement
        self.memory = draft.placement.holder
        inputs, outputs = placeholders(graph), output_nodes(graph)
        self.when = {node: i for i, node in enumerate(self.nodes)}
        self.when |= {node: self.when[node.all_input_nodes[0]] for node in self.nodes if is_made_in_list(node)}
        self.leaves = dict(zip(inputs, paths, strict=False))
        self.leaf_at = dict(zip(paths, inputs, strict=False))
        parts, means, state = inputs[len(paths) :], outputs[: len(paths)], outputs[len(paths) :]
        committing = [segment.nodes[0] for segment in draft.segments if segment.commits]
        self.commits = self.when[committing[0]] if committing else float("inf")
        for node in self.nodes:
            if node.target is launch:
                sources, collective = launch_of(node)
                for position, source in enumerate(sources):
                    self.placement.payloads.setdefault(source, []).append((collective, position))
        self.placement.stored_in |= {node: node.all_input_nodes[0] for node in self.nodes if is_view(node)}
        self._last_read: dict[Storage, float] = {}
        for node in self.nodes:
            for source in node.all_input_nodes:
                self._last_read[self.memory(source)] = self.when[node]
        for node in outputs:
            if isinstance(node, fx.Node):
                self._last_read[self.memory(node)] = float("inf")
        self._means = means
        parts = parts[: len(state)]  # the remaining inputs are numbers
        self.mean_of = {self.memory(node): path for path, node in zip(paths, means, strict=True) if is_tensor(node)}
        self.part_of = {self.memory(node): part for node, part in zip(state, parts, strict=False) if is_tensor(node)}
        self.replaced: dict[fx.Node, set[Storage]] = {}  # memory of next values that KEEP may write over
        self.residual_of = _residuals(self.leaves, parts)
        for node in [node for node in self.nodes if node.target is ENCODE_SUM.default]:
            arguments: Any = node.args
            for x, residual in zip(arguments[1], arguments[2], strict=True):
                leaf, part = cast(Any, [self.memory(x), self.memory(residual)])
                if leaf in self.leaves and _same_kind(value(leaf), value(part)):
                    self.residual_of[self.leaves[leaf]] = part

    def decide(self, node: fx.Node) -> None:
        """Assign a place to `node`, by the first rule that returns one."""
        if node.target is KEEP:
            self.replaced[node] = self._replaced(node)
        is_writable = node.target in COPIES or node.target in PRODUCTS or elementwise(node.target) is not None
        if not (is_writable or is_made_in_list(node)):
            return
        payload = self._payload(node)
        if payload is not None:
            self.placement.targets[node] = payload
            return
        target = next((found for rule in RULES if (found := rule(self, node)) is not None), None)
        if target is None:
            return
        memory = target if isinstance(target, Mean | Scratch) else self.memory(target)
        self.placement.targets[node] = target
        self.placement.stored_in[node] = memory
        self._last_read[memory] = max(self._last_read.get(memory, -1), self._last_read.get(node, -1))
        if isinstance(memory, Mean):
            self.placement.results.add(memory.path)
        elif isinstance(memory, fx.Node) and memory.op == "placeholder":
            self.placement.overwritten.add(memory)

    def is_free(self, memory: Storage, node: fx.Node) -> bool:
        """Return True if `node` may write to `memory`: nothing reads it later, and `node` only reads it elementwise."""
        if isinstance(memory, Scratch) and self.is_kept(node):
            return False  # the next step will write over it
        now = self.when[node]
        if self._last_read.get(memory, -1) < now:
            return True
        if (before := _before(node)) is not None:
            return self._last_read[memory] == now and self.memory(before) == memory
        reads = [source for source in node.all_input_nodes if self.memory(source) == memory]
        in_place = len(reads) == 1 and _is_first_only(node, reads[0]) and _same_layout(value(reads[0]), value(node))
        return self._last_read[memory] == now and elementwise(node.target) is not None and in_place

    def is_ours(self, memory: Storage) -> bool:
        """Return True if `memory` is that of a result of the step, or of a gradient that it may write over."""
        if not isinstance(memory, fx.Node):
            return True
        is_made = memory.op == "call_function" and memory.target is not launch  # not a buffer of a collective
        return is_made or (memory in self.leaves and self.donation.gradients == "yes")

    def _replaced(self, node: fx.Node) -> set[Storage]:
        """Return the memory of next values that nothing reads later than `node`, and whose parts do not overlap."""
        parts: dict[Storage, list[fx.Node]] = {}
        arguments: Any = node.args
        for new in arguments[1]:
            parts.setdefault(self.memory(new), []).append(new)
        return {
            memory
            for memory, news in parts.items()
            if self.is_ours(memory)
            and not isinstance(self.placement.memory(news[0]), Sent | Scratch)
            and self._last_read[memory] == self.when[node]
            and _are_apart(news)
        }

    def may_commit(self, given: fx.Node | None, node: fx.Node) -> bool:
        """Return True if `node` may write over `given`, an input of the graph, once all collectives are complete."""
        if given is None or self.when[node] < self.commits:
            return False
        return _same_kind(value(given), value(node)) and self.is_free(given, node)

    def is_kept(self, memory: Storage) -> bool:
        """Return True if `memory` is part of the result."""
        return self._last_read.get(memory) == float("inf")

    def decide_for_next_step(self) -> None:
        """Choose memory for each leaf's mean in the next step. It is used once no caller holds the current mean."""
        for path, mean in zip(self.leaf_at, self._means, strict=True):
            if path in self.placement.results:
                is_there = is_tensor(mean) and self.memory(mean) == Mean(path)
                is_free = is_there or not self.is_kept(Mean(path))
                memory = Mean(path) if is_free else self.residual_of.get(path)
                self.placement.memories |= {} if memory is None else {path: memory}

    def _payload(self, node: fx.Node) -> Sent | None:
        """Return the only payload that `node` becomes, directly or by an operation that writes over it; or None."""
        is_shared = any(user.target in OUT for user in node.users)  # operators on lists read it in the buffer
        users = [user for user in node.users if user.target not in OUT] if is_made_in_list(node) else list(node.users)
        if len(users) != 1 or node.target in PRODUCTS:  # products are slower with gaps between rows
            return None
        (user,) = users
        is_written_over = (
            elementwise(user.target) is not None
            and not is_shared
            and _is_first_only(user, node)
            and _same_layout(value(node), value(user))
        )
        written = user if is_written_over and len(user.users) == 1 else node
        places = self.placement.payloads.get(written, [])
        if len(places) != 1:
            return None
        collective, position = places[0]
        fits = collective.sent_shape(position) == tuple(value(node).shape)
        return Sent(collective.index, position) if fits else None


def over_operand(memories: _Memories, node: fx.Node) -> Storage | None:
    """Return the operand, if it may be written over and nothing reads it later. First rule, as it needs no memory."""
    operand = node.args[0] if elementwise(node.target) is not None else None
    if not isinstance(operand, fx.Node) or not _same_layout(value(operand), value(node)):
        return None
    memory = memories.memory(operand)
    if isinstance(memory, fx.Node):
        is_whole = isinstance(value(memory), Tensor) and value(memory).numel() == value(node).numel()
        if not memories.is_ours(memory) or not is_whole:
            return None
    return operand if memories.is_free(memory, node) else None


def over_next(memories: _Memories, node: fx.Node) -> fx.Node | None:
    """Return the next value of memory if nothing else uses it: only a step with NaN or infinity writes there."""
    if not is_made_in_list(node) or node.all_input_nodes[0].target is not KEEP:
        return None
    keep = node.all_input_nodes[0]
    arguments, at = cast(Any, (keep.args, node.args[1]))
    new = arguments[1][at]
    return new if memories.memory(new) in memories.replaced[keep] else None


def over_state(memories: _Memories, node: fx.Node) -> fx.Node | None:
    """Return the part of the state that `node` is the next value of.

    For a mean, return the old residual of its gradient, or else that gradient: the next residual is in one of them.
    """
    if not memories.donation.state:
        return None
    path, parts = memories.mean_of.get(node), [memories.part_of.get(node)]
    if path is not None and memories.donation.gradients == "yes":
        residual = memories.residual_of.get(path)
        parts += [residual, None if residual is None else memories.leaf_at[path]]
    return next((part for part in parts if memories.may_commit(part, node)), None)


def over_mean(memories: _Memories, node: fx.Node) -> Mean | None:
    """Return the memory of a mean, for the mean itself or its operands."""
    path = memories.mean_of.get(node)
    if memories.donation.gradients == "at_end":  # means are written over gradients
        path = None
    if path is None and memories.donation == Donation("at_end", state=True):
        path = next((memories.leaves[source] for source in node.all_input_nodes if source in memories.leaves), None)
    if path is None:
        return None
    fits = _same_kind(value(memories.leaf_at[path]), value(node))
    return Mean(path) if fits and memories.is_free(Mean(path), node) else None


def over_gradient(memories: _Memories, node: fx.Node) -> fx.Node | None:
    """Return the gradient that `node` is the mean of, if the step may write over gradients."""
    path = memories.mean_of.get(node)
    if path is None or memories.donation.gradients == "no":
        return None
    leaf = memories.leaf_at[path]
    return leaf if value(leaf).is_contiguous() and memories.may_commit(leaf, node) else None


def over_scratch(memories: _Memories, node: fx.Node) -> Scratch | None:
    """Return memory shared by steps, for large results that do not outlive a step, where new memory is slow."""
    made = value(node)
    if memories.is_compiled or not device_of(made.device).has_slow_pages or is_light(node):  # compilers use less memory
        return None
    if memories.is_kept(memories.memory(node)) or not made.is_contiguous():
        return None
    scratch = memories.placement.scratch
    name = next((name for name in scratch if memories.is_free(name, node)), Scratch(f"shared {len(scratch)}"))
    nbytes = max(made.numel() * made.element_size(), scratch[name].nbytes if name in scratch else 0)
    scratch[name] = LeafSpec.of(made.new_empty(nbytes, dtype=torch.uint8))
    return name


RULES: tuple[Callable[[_Memories, fx.Node], Storage | None], ...] = (
    over_operand,
    over_next,
    over_state,
    over_mean,
    over_gradient,
    over_scratch,
)
"""Rules that return memory for the result of an operation, or None. The first result counts."""


def _residuals(leaves: dict[fx.Node, str], parts: Sequence[fx.Node]) -> dict[str, fx.Node]:
    """Return for each leaf a part of the state that an operation reads together with it, such as its residual."""
    known = set(parts)
    return {
        path: part
        for leaf, path in leaves.items()
        for user in leaf.users
        for part in user.all_input_nodes
        if part in known and _same_kind(value(leaf), value(part))
    }


def _before(node: fx.Node) -> Any:
    """Return the old value if `node` is the next one, of an operator that may write it there; otherwise None."""
    arguments: Any = node.all_input_nodes[0].args if is_made_in_list(node) else ()
    target = node.all_input_nodes[0].target if arguments else None
    olds = [*arguments[5], *arguments[6]] if target is RESIDUAL.default else arguments[0] if target is KEEP else []
    return olds[cast(int, node.args[1])] if olds else None


def _are_apart(parts: Sequence[fx.Node]) -> bool:
    """Return whether different views of one tensor do not overlap: different items, for example, of one list."""
    following: dict[tuple[Any, ...], Any] = {}
    for part in parts:
        node, items = part, list[Any]()
        while is_view(node):
            items += [node.args] if node.target is operator.getitem else []
            node = node.all_input_nodes[0]
        for end, (whole, _) in enumerate([*items[::-1], (part, None)]):
            if following.setdefault(tuple(items[::-1][:end]), whole) is not whole:
                return False
    return len(set(parts)) == len(parts)


def _is_first_only(user: fx.Node, node: fx.Node) -> bool:
    return user.args[0] is node and user.args.count(node) == 1


def _same_kind(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and b.is_contiguous()):
        return False
    is_whole = a.shape == b.shape or (a.numel() == b.numel() and a.is_contiguous())
    return is_whole and (a.dtype, a.device) == (b.dtype, b.device)


def _same_layout(a: Any, b: Any) -> bool:
    are_tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    return are_tensors and (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())
