"""Pass 7: the code of every step, as a function of named values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fnddp.plan.ir import Collective, LeafSpec, launch, launch_of, output_nodes, take, take_of, value
from fnddp.plan.passes.order import Segment
from fnddp.plan.passes.place import Memory, Result, into

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Step:
    """What the executor does without a break.

    Attributes:
        slot: Position in the software pipeline.
        needs: Names of the gradients that must have arrived.
        waits: Collectives that must be complete.
        inputs: Names of the values that `run` takes.
        outputs: Names of the values that it returns.
        frees: Names of the values that nobody reads after it.
        run: The computation.
        launches: The collective that is issued at the end.
        code: The computation as text, an operation a line.
        commits: Whether it runs after all collectives, when the step can no longer fail on another rank.
    """

    slot: int
    needs: tuple[str, ...]
    waits: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    frees: tuple[str, ...]
    run: Callable[..., tuple[Any, ...]]
    launches: Collective | None
    code: tuple[str, ...]
    commits: bool


def emit(module: fx.GraphModule, segments: Sequence[Segment], memory: Memory, leaf_names: dict[str, str]) -> list[Step]:
    """Turns segments into steps.

    Args:
        module: The combined graph.
        segments: Its nodes in order.
        memory: Where results are written.
        leaf_names: The name of each leaf's value.
    """
    kept = {name for name in map(name_of, output_nodes(module.graph)) if isinstance(name, str)}
    kept |= {memory.name for memory in memory.memories.values()}
    drafts = [_draft(segment, memory) for segment in segments]
    last_read = {name: i for i, draft in enumerate(drafts) for name in draft.inputs}
    read_later = kept | set(last_read)
    steps: list[Step] = []
    for i, (segment, draft) in enumerate(zip(segments, drafts, strict=True)):
        outputs = [node for node in draft.made if node.name in read_later]
        draft.graph.output(tuple(draft.made[node] for node in outputs))
        code = fx.GraphModule({}, draft.graph)
        frees = [name for name in draft.inputs if last_read[name] == i and name not in kept and not _persists(name)]
        steps.append(
            Step(
                slot=segment.slot,
                needs=tuple(leaf_names[path] for path in segment.needs),
                waits=tuple(segment.waits),
                inputs=tuple(draft.inputs),
                outputs=tuple(node.name for node in outputs),
                frees=tuple(frees),
                run=code.forward,
                launches=None if segment.launches is None else launch_of(segment.launches)[1],
                code=tuple(draft.lines),
                commits=segment.commits,
            )
        )
    return steps


def name_of(node: Any) -> Any:
    """The name of a node's value: results of collectives are parts of their buffers. Numbers are themselves."""
    if not isinstance(node, fx.Node):
        return node
    if node.target is take:
        launched, position = take_of(node)
        return buffer_name(launch_of(launched)[1], position)
    return node.name


def buffer_name(collective: Collective, position: int) -> str:
    """The name of the payload at `position`."""
    return f"{collective.name}[{position}]"


def _persists(name: str) -> bool:
    return name.endswith("]")


class _draft:
    """The graph of one step while it is made."""

    def __init__(self, segment: Segment, memory: Memory) -> None:
        self.graph = fx.Graph()
        self.inputs: dict[str, fx.Node] = {}
        self.made: dict[fx.Node, fx.Node] = {}
        self.lines: list[str] = []
        for node in segment.nodes:
            if node.target is not take:
                self._compute(node, memory)
        if segment.launches is not None:
            self._pack_the_rest(segment.launches, memory)

    def value(self, node: fx.Node) -> fx.Node:
        if node in self.made:
            return self.made[node]
        name = name_of(node)
        if name not in self.inputs:
            made = self.graph.placeholder(name.replace("[", "_").replace("]", ""))
            made.meta["val"] = value(node)
            self.inputs[name] = made
        return self.inputs[name]

    def placed(self, name: str) -> fx.Node:
        if name not in self.inputs:
            self.inputs[name] = self.graph.placeholder(name.replace("[", "_").replace("]", ""))
        return self.inputs[name]

    def _compute(self, node: fx.Node, memory: Memory) -> None:
        places = memory.payloads.get(node, [])
        target = memory.target_of(node)
        if isinstance(target, tuple):
            destination, shown = self.placed(buffer_name(*target)), buffer_name(*target)
        elif isinstance(target, Result):
            destination, shown = self.placed(target.name), target.name
            destination = self.graph.call_function(aten.view.default, (destination, list(value(node).shape)))
        elif target is not None:
            destination, shown = self.value(target), name_of(target)
            if value(target).shape != value(node).shape:
                destination = self.graph.call_function(aten.view.default, (destination, list(value(node).shape)))
        else:
            destination, shown = None, None
        if destination is None:
            self.made[node] = self.graph.node_copy(node, self.value)
            self._say(node, node.name)
        else:
            self.made[node] = into(self.graph, node, self.value, destination)
            self._say(node, shown)
        for collective, position in places:
            if (collective, position) != target:
                self._copy(node, collective, position)

    def _pack_the_rest(self, launched: fx.Node, memory: Memory) -> None:
        sources, collective = launch_of(launched)
        for position, source in enumerate(sources):
            if source not in memory.computed:  # a gradient, a part of the state, or the result of another collective
                self._copy(source, collective, position)

    def _copy(self, source: fx.Node, collective: Collective, position: int) -> None:
        self.graph.call_function(
            aten.copy_.default, (self.placed(buffer_name(collective, position)), self.value(source))
        )
        self.lines.append(f"{buffer_name(collective, position)} = {name_of(source)}")

    def _say(self, node: fx.Node, written: Any) -> None:
        called = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
        arguments = [str(name_of(a)) if isinstance(a, fx.Node) else str(a) for a in node.args]
        arguments += [f"{key}={a}" for key, a in node.kwargs.items() if key in ("dtype", "alpha", "beta") and a != 1]
        name = written if all(user.target is launch for user in node.users) else node.name
        made = f": {LeafSpec.of(value(node))}" if isinstance(value(node), torch.Tensor) else ""
        place = "" if written in (name, node.name) else f" in {written}"
        self.lines.append(f"{name}{made} = {called}({', '.join(arguments).replace('torch.', '')}){place}")
