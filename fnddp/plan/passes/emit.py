"""Pass 8: the code of every segment, as a function of named values."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fnddp.plan.draft import Cut, Draft, Placement
from fnddp.plan.graph import launch, launch_of, output_nodes, take, take_of, value
from fnddp.plan.ir import Collective, LeafSpec, Mean, Name, Operation, Received, Segment, Sent, Temp
from fnddp.plan.passes.place import COPIES, ELEMENTWISE, PRODUCTS

aten: Any = torch.ops.aten
_SHOWN = ("dtype", "alpha", "beta")  # options of operations that change what they compute


def emit(draft: Draft) -> Draft:
    """Turns every cut into a segment."""
    assert draft.placement is not None
    kept = {name_of(node, draft.names) for node in output_nodes(draft.graph) if isinstance(node, fx.Node)}
    kept |= {name_of(memory, draft.names) for memory in draft.placement.memories.values()}
    written = [_Code(cut, draft.placement, draft.names) for cut in draft.cuts]
    last_read = {name: i for i, code in enumerate(written) for name in code.inputs}
    segments: list[Segment] = []
    for i, (cut, code) in enumerate(zip(draft.cuts, written, strict=True)):
        outputs = [node for node in code.made if name_of(node, draft.names) in kept or Temp(node.name) in last_read]
        frees = [name for name in code.inputs if last_read[name] == i and name not in kept and not _persists(name)]
        segments.append(
            Segment(
                slot=cut.slot,
                needs=cut.needs,
                waits=cut.waits,
                inputs=tuple(code.inputs),
                outputs=tuple(name_of(node, draft.names) for node in outputs),
                frees=tuple(frees),
                run=code.function(outputs),
                launches=None if cut.launches is None else launch_of(cut.launches)[1],
                operations=tuple(code.operations),
                commits=cut.commits,
            )
        )
    return replace(draft, segments=tuple(segments))


def name_of(node: Any, inputs: dict[fx.Node, Name]) -> Any:
    """The name of what `node` stands for; names and numbers are themselves."""
    if not isinstance(node, fx.Node):
        return node
    if node.target is take:
        launched, position = take_of(node)
        return Received(launch_of(launched)[1].index, position)
    return inputs.get(node) or Temp(node.name)


def _persists(name: Name) -> bool:
    return isinstance(name, Sent | Received | Mean)


class _Code:
    """The code of one segment while it is written.

    Attributes:
        inputs: What it reads or writes of what is there, and what stands for it.
        made: What it computes, and what stands for it.
        operations: The same, to be shown.
    """

    def __init__(self, cut: Cut, placement: Placement, names: dict[fx.Node, Name]) -> None:
        self.inputs: dict[Name, fx.Node] = {}
        self.made: dict[fx.Node, fx.Node] = {}
        self.operations: list[Operation] = []
        self._graph = fx.Graph()
        self._placement, self._names = placement, names
        for node in cut.nodes:
            if node.target is not take:
                self._compute(node)
        if cut.launches is not None:
            self._pack_the_rest(cut.launches)

    def function(self, outputs: Sequence[fx.Node]) -> Callable[..., tuple[Any, ...]]:
        """The code, as a function of `inputs` that returns `outputs`."""
        self._graph.output(tuple(self.made[node] for node in outputs))
        code = self._graph.python_code("self")
        scope = dict(code.globals)
        exec(compile(code.src, "<segment of a fnddp plan>", "exec"), scope)
        return partial(scope["forward"], None)

    def _compute(self, node: fx.Node) -> None:
        target = self._placement.targets.get(node)
        if target is None:
            self.made[node] = self._graph.node_copy(node, self._value)
        else:
            self.made[node] = self._into(node, self._destination(target, node))
        self._say(node, target)
        for place in self._placement.payloads.get(node, ()):
            if Sent(*place) != target:
                self._copy(node, _collective_of(node, place), place[1])

    def _destination(self, target: fx.Node | Name, node: fx.Node) -> fx.Node:
        where = self._value(target) if isinstance(target, fx.Node) else self._input(target)
        if isinstance(target, Sent) or (isinstance(target, fx.Node) and value(target).shape == value(node).shape):
            return where
        return self._graph.call_function(aten.view.default, (where, list(value(node).shape)))

    def _into(self, node: fx.Node, destination: fx.Node) -> fx.Node:
        arguments: Any = fx.map_arg(node.args, self._value)
        options: Any = fx.map_arg(node.kwargs, self._value)
        if node.target in COPIES:
            return self._graph.call_function(aten.copy_.default, (destination, arguments[0]))
        writing = ELEMENTWISE.get(node.target) or PRODUCTS[node.target]
        return self._graph.call_function(writing, arguments, {**options, "out": destination})

    def _pack_the_rest(self, launched: fx.Node) -> None:
        sources, collective = launch_of(launched)
        for position, source in enumerate(sources):
            # A gradient, a part of the state, or the result of another collective: no segment has computed it.
            if source.op != "call_function" or source.target in (launch, take):
                self._copy(source, collective, position)

    def _copy(self, source: fx.Node, collective: Collective, position: int) -> None:
        sent, made = Sent(collective.index, position), self._value(source)
        shape = collective.sent_shape(position)
        if shape != tuple(value(source).shape):
            made = self._graph.call_function(aten.reshape.default, (made, list(shape)))
        self._graph.call_function(aten.copy_.default, (self._input(sent), made))
        self.operations.append(Operation(sent, None, "copy", (name_of(source, self._names),)))

    def _value(self, node: fx.Node) -> fx.Node:
        return self.made[node] if node in self.made else self._input(name_of(node, self._names))

    def _input(self, name: Name) -> fx.Node:
        if name not in self.inputs:
            self.inputs[name] = self._graph.placeholder(f"x{len(self.inputs)}")
        return self.inputs[name]

    def _say(self, node: fx.Node, target: fx.Node | Name | None) -> None:
        written = name_of(target, self._names)
        is_only_sent = isinstance(written, Sent) and all(user.target is launch for user in node.users)
        made: Any = value(node)
        self.operations.append(
            Operation(
                made=written if is_only_sent else Temp(node.name),
                spec=LeafSpec.of(made) if isinstance(made, torch.Tensor) else None,
                function=getattr(node.target, "__name__", str(node.target)).partition(".")[0],
                arguments=tuple(_named(argument, self._names) for argument in node.args),
                options=tuple((key, a) for key, a in node.kwargs.items() if key in _SHOWN and a != 1),
                written=None if is_only_sent else written,
            )
        )


def _collective_of(node: fx.Node, place: tuple[int, int]) -> Collective:
    found = (launch_of(user)[1] for user in node.users if user.target is launch)
    return next(collective for collective in found if collective.index == place[0])


def _named(argument: Any, names: dict[fx.Node, Name]) -> Any:
    if isinstance(argument, list | tuple):
        return [_named(each, names) for each in argument]
    return name_of(argument, names)
