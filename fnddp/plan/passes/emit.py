"""Pass 10: write the code of each segment, as a function of named values.

It is straight-line Python code that consists of calls, and it frees each value after its last read.
"""

import linecache
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx

from fnddp.device import device_of
from fnddp.ir.program import (
    BufferSlice,
    Collective,
    Grad,
    LeafSpec,
    Mean,
    Name,
    Operation,
    PayloadRange,
    Received,
    Scratch,
    Segment,
    Sent,
    Temp,
)
from fnddp.kernels.keep import KEEP
from fnddp.kernels.leaves import OUT
from fnddp.plan.draft import Draft, DraftSegment
from fnddp.plan.graph import (
    is_light,
    is_made_in_list,
    is_tensor,
    is_view,
    launch,
    launch_of,
    output_nodes,
    take,
    take_of,
    value,
)
from fnddp.plan.passes.foreach import is_in_place, is_whole
from fnddp.plan.passes.place import COPIES, PRODUCTS, elementwise
from fnddp.torch_private import FOREACH, foreach_copy

aten: Any = torch.ops.aten


def _filled(size: Sequence[int], number: Any, **options: Any) -> torch.Tensor:
    """Return a tensor filled with `number`. It is a scalar tensor if counters are on the device: see `Engine.pin`."""
    if isinstance(number, torch.Tensor):
        return torch.empty(size, **options).copy_(number)
    return aten.full.default(size, number, **options)


# Faster calls of the same operations, because plans of many small leaves call them once or more per leaf.
_QUICK: dict[Any, Any] = {
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.transpose.int: torch.transpose,
    aten.full.default: _filled,
}
_SHOWN = ("dtype", "alpha", "beta")  # options of operations that change the result
_PERSISTENT = BufferSlice | Mean | Scratch


def emit(draft: Draft) -> tuple[Segment, ...]:
    """Return the segments of the plan. This is the last pass."""
    kept = {name_of(node, draft.names) for node in output_nodes(draft.graph) if isinstance(node, fx.Node)}
    kept |= {name_of(memory, draft.names) for memory in draft.placement.memories.values()}
    segments: list[Segment] = []
    reads: Counter[fx.Node] = Counter()
    for node in draft.graph.nodes:
        fx.map_arg((node.args, node.kwargs), lambda read: reads.update([read]))
    written = [_Emitter(segment, draft, reads) for segment in draft.segments]
    last_read = {name: i for i, code in enumerate(written) for name in code.inputs}
    for i, (segment, code) in enumerate(zip(draft.segments, written, strict=True)):
        outputs = [node for node in code.made if name_of(node, draft.names) in kept or Temp(node.name) in last_read]
        done = [name for name in code.inputs if last_read[name] == i and name not in kept]
        segments.append(
            Segment(
                slot=segment.slot,
                needs=tuple(segment.needs),
                waits=tuple(segment.waits),
                inputs=tuple(code.inputs),
                outputs=tuple(name_of(node, draft.names) for node in outputs),
                frees=tuple(name for name in done if not isinstance(name, _PERSISTENT)),
                run=code.script.function(code.inputs.values(), [code.made[node] for node in outputs]),
                launches=None if segment.launches is None else launch_of(segment.launches)[1],
                operations=tuple(code.operations),
                commits=segment.commits,
                fills=tuple(code.fills.items()),
            )
        )
    return tuple(segments)


def name_of(node: Any, inputs: dict[fx.Node, Name]) -> Any:
    """Return the name of the value of `node`; return names and numbers unchanged."""
    if not isinstance(node, fx.Node):
        return node
    if node.target is take:
        launched, position = take_of(node)
        return Received(launch_of(launched)[1].index, position)
    return inputs.get(node) or Temp(node.name)


class Variable(str):
    """The name of a variable in a script."""


class Script:
    """The body of a function that is being written."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, list[Variable], set[Variable]]] = []  # line, variables made, variables read
        self._scope: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # names of constants in the scope, by id
        self._count = 0

    def variable(self) -> Variable:
        self._count += 1
        return Variable(f"v{self._count}")

    def call(self, function: Callable[..., Any], arguments: Any, options: Any = MappingProxyType({})) -> Variable:
        """Add a call and return the variable of its result. Arguments are variables, constants, or lists of them."""
        made = self.variable()
        self._add(made, [made], function, arguments, options)
        return made

    def call_for(self, count: int, function: Callable[..., Any], arguments: Any, options: Any) -> list[Variable]:
        """Add a call that returns a list of `count` results."""
        made = [self.variable() for _ in range(count)]
        self._add(f"[{', '.join(made)}]", made, function, arguments, options)
        return made

    def divide(self, memory: Variable, number: Any) -> None:
        """Add a division in place, skipped at run time if the number is 1, as for a single rank."""
        made = self.variable()
        self._add(made, [made], torch.div, [memory, number], {"out": memory}, unless=f"{number} == 1 or ")

    def function(self, inputs: Iterable[Variable], outputs: Sequence[Variable]) -> Callable[..., tuple[Any, ...]]:
        """Return the script as a function of `inputs` that returns a tuple of `outputs`."""
        kept, lines = set(outputs), list[str]()
        for line, made, read in reversed(self._lines):
            done = sorted({*made, *read} - kept)
            kept |= {*made, *read}
            lines.append(f" {line}{'; ' if done else ''}{' = '.join([*done, 'None']) if done else ''}")
        returned = "".join(f"{variable}, " for variable in outputs)
        scope = dict(self._scope)
        code = "\n".join([f"def run({', '.join(inputs)}):", *reversed(lines), f" return ({returned})"])
        file = f"<plan {id(scope):x}>"  # unique while the function lives: it holds the scope
        exec(compile(code, file, "exec"), scope)
        run = scope.pop("run")  # otherwise the function and its scope would form a cycle
        linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file  # for tracebacks and debuggers
        weakref.finalize(run, linecache.cache.pop, file, None).atexit = False
        return run

    def _add(
        self, to: str, made: list[Variable], function: Any, arguments: Any, options: Any, *, unless: str = ""
    ) -> None:
        read: set[Variable] = set()
        given = [self._text(argument, read) for argument in arguments]
        given += [f"{'from_' if key == 'from' else key}={self._text(option, read)}" for key, option in options.items()]
        self._lines.append((f"{to} = {unless}{self._constant(function)}({', '.join(given)})", made, read))

    def _text(self, argument: Any, read: set[Variable]) -> str:
        if isinstance(argument, Variable):
            read.add(argument)
            return argument
        if isinstance(argument, list | tuple):
            return f"[{', '.join([self._text(each, read) for each in argument])}]"
        if argument is None or isinstance(argument, bool | int | str):
            return repr(argument)
        return self._constant(argument)

    def _constant(self, value: Any) -> str:
        if id(value) not in self._names:
            self._names[id(value)] = f"c{len(self._names)}"
            self._scope[self._names[id(value)]] = value  # keeps the value alive, so that its id stays unique
        return self._names[id(value)]


class _Copy(NamedTuple):
    """A copy of a node's value into a place, in the shape of that place."""

    source: fx.Node
    place: Name
    memory: Variable
    shape: Sequence[int]


class _Emitter:
    """The code of one segment that is being written, with the variables of all values that it uses."""

    def __init__(self, segment: DraftSegment, draft: Draft, reads: Counter[fx.Node]) -> None:
        self._reads = reads
        self.inputs: dict[Name, Variable] = {}
        self.made: dict[fx.Node, Variable] = {}
        self.operations: list[Operation] = []
        self.fills: dict[str, Sent] = {}
        self.script = Script()
        self._placement, self._names = draft.placement, draft.names
        self._is_compiled = draft.request.backend == "inductor"
        joined: set[fx.Node] = set()
        for node in segment.nodes:
            if node in draft.batches:
                self._compute_all(draft.batches[node])
                joined.update(draft.batches[node])
            elif node.target in OUT:
                self._compute_list(node)
            elif node.target is not take and node not in joined:
                if node not in self.made:
                    self._compute(node)
                if not is_light(node):
                    for collective, position in self._placement.payloads.get(node, ()):
                        if Sent(collective.index, position) != self._placement.targets.get(node):
                            self._copy_into([(node, collective, position)])
        if segment.launches is not None:
            self._pack_the_rest(segment.launches)

    def _compute(self, node: fx.Node) -> None:
        target, function = self._placement.targets.get(node), _QUICK.get(node.target, node.target)
        arguments, options = self._values(node.args), self._values(node.kwargs)
        if target is None:
            self.made[node] = self.script.call(function, arguments, options)
        elif node.target in COPIES:
            self.made[node] = self.script.call(aten.copy_.default, [self._destination(target, node), arguments[0]])
        else:
            self.made[node] = self._write(node, arguments, options, self._destination(target, node))
        self._record(node)

    def _compute_list(self, node: fx.Node) -> None:
        results: dict[Any, fx.Node] = {user.args[1]: user for user in node.users}
        places: list[Variable] = []
        for i, made in enumerate(value(node)):
            target = self._placement.targets.get(results[i]) if i in results else None
            if target is None:
                options = {"dtype": made.dtype, "device": made.device}
                places.append(self.script.call(torch.empty_strided, [list(made.shape), list(made.stride())], options))
            else:
                places.append(self._destination(target, results[i]))
        self.script.call(OUT[node.target], self._values(node.args), {"out": places})
        self.made |= {made: places[i] for i, made in results.items()}
        self._record_list(node, results[min(results)])

    def _record_list(self, node: fx.Node, first: fx.Node) -> None:
        arguments: Any = node.args
        codec = "" if node.target is KEEP else f" {arguments[0]}"
        counts = next(each for each in arguments[1:] if each and isinstance(each[0], int)) if codec else arguments[0]
        source = name_of(arguments[1][0], self._names)
        target = self._placement.targets.get(first)
        self.operations.append(
            Operation(
                made=Temp(first.name) if target is None else name_of(target, self._names),
                spec=None,
                function=f"{_function(node).removesuffix('_leaves')}{codec}",
                arguments=(source,) if isinstance(source, Received) else (),
                leaves=len(counts),
            )
        )

    def _write(self, node: fx.Node, arguments: Any, options: Any, place: Variable) -> Variable:
        if self._is_compiled:  # Inductor fuses the copy, and refuses an `out` with gaps
            made = self.script.call(_QUICK.get(node.target, node.target), arguments, options)
            return self.script.call(aten.copy_.default, [place, made])
        writing = PRODUCTS.get(node.target) or elementwise(node.target)
        return self.script.call(writing, arguments, {**options, "out": place})

    def _compute_all(self, nodes: Sequence[fx.Node]) -> None:
        first = nodes[0]
        rest = self._values(first.args[1:])
        if len(first.args) > 1 and is_tensor(first.args[1]):
            rest = [[self._values(node.args[1]) for node in nodes]]
        options = self._values(first.kwargs)
        if first not in self._placement.targets:
            operands = [self._values(node.args[0]) for node in nodes]
            results = self.script.call_for(len(nodes), FOREACH[first.target][0], [operands, *rest], options)
            self.made.update(zip(nodes, results, strict=True))
            self._record(first, len(nodes))
            return
        places: list[Variable] = []
        elsewhere: list[_Copy] = []
        for node in nodes:
            if is_in_place(node, self._placement):
                places.append(self._values(node.args[0]))
            else:
                target = self._placement.targets[node]
                places.append(self._destination(target, node))
                source: Any = node.args[0]
                elsewhere.append(_Copy(source, name_of(target, self._names), places[-1], value(source).shape))
        self._copy(elsewhere)
        self.made.update(zip(nodes, places, strict=True))
        if first.target in COPIES:
            return
        if is_whole(first, self._placement):
            for span in _spans(self._placement.targets[node] for node in nodes):
                memory = self._input(span)
                if first.target is aten.div.Tensor:
                    self.script.divide(memory, rest[0])
                else:
                    self._write(first, [memory, *rest], options, memory)
                self.operations.append(Operation(span, None, _function(first), (span, *self._shown(first.args[1:]))))
        else:
            self.script.call(FOREACH[first.target][1], [places, *rest], options)
            self._record(first, len(nodes))

    def _destination(self, target: Any, node: fx.Node) -> Variable:
        where = self._value(target) if isinstance(target, fx.Node) else self._input(target)
        if isinstance(target, Scratch) and self._placement.scratch[target] != LeafSpec.of(value(node)):
            nbytes = value(node).numel() * value(node).element_size()  # a slice: other results may use the memory too
            some = self.script.call(aten.slice.Tensor, [where, 0, 0, nbytes])
            typed = self.script.call(aten.view.dtype, [some, value(node).dtype])
            return self.script.call(aten.view.default, [typed, list(value(node).shape)])
        if isinstance(target, Sent | Scratch) or (
            isinstance(target, fx.Node) and value(target).shape == value(node).shape
        ):
            return where
        return self.script.call(aten.view.default, [where, list(value(node).shape)])

    def _pack_the_rest(self, launched: fx.Node) -> None:
        """Copy all other payloads into the buffer: small results, gradients, parts of the state, received results."""
        sources, collective = launch_of(launched)
        rest = [
            (source, collective, position)
            for position, source in enumerate(sources)
            if self._placement.targets.get(source) != Sent(collective.index, position)
            and (is_light(source) or source.op != "call_function" or source.target in (launch, take))
        ]
        self._copy_into([place for place in rest if is_light(place[0])])
        for place in rest:
            if not is_light(place[0]):
                self._copy_into([place])

    def _copy_into(self, copies: Sequence[tuple[fx.Node, Collective, int]]) -> None:
        given = [(source, Sent(each.index, position), each.sent_shape(position)) for source, each, position in copies]
        self._copy([_Copy(source, place, self._input(place), shape) for source, place, shape in given])

    def _copy(self, copies: Sequence[_Copy]) -> None:
        if not copies:
            return
        values: list[Variable] = []
        places: list[Variable] = []
        for copy in copies:
            grad = self._names.get(copy.source)
            if isinstance(grad, Grad) and isinstance(copy.place, Sent) and self._fills(copy):
                self.fills[grad.path] = copy.place
                continue
            made = self._value(copy.source)
            if tuple(copy.shape) != tuple(value(copy.source).shape):
                made = self.script.call(aten.reshape.default, [made, list(copy.shape)])
            values.append(made)
            places.append(copy.memory)
        if len(places) > 1:
            self.script.call(foreach_copy, [places, values])
        elif places:
            self.script.call(aten.copy_.default, [places[0], values[0]])
        source = name_of(copies[0].source, self._names)
        self.operations.append(Operation(copies[0].place, None, "copy", (source,), count=len(copies)))

    def _fills(self, copy: _Copy) -> bool:
        """Return True if a gradient may be copied when it arrives: it is small, and nothing else reads or writes it."""
        grad, source = value(copy.source), copy.source
        is_alone = self._reads[source] == 1 and source not in self._placement.overwritten
        is_plain = tuple(copy.shape) == tuple(grad.shape) and not grad.dtype.is_complex
        runs_at_once = not self._is_compiled and not device_of(grad.device).is_asynchronous
        return is_alone and is_plain and runs_at_once and is_light(source)

    def _values(self, arguments: Any) -> Any:
        to_variable: Any = self._value
        return fx.map_arg(arguments, to_variable)

    def _value(self, node: fx.Node) -> Variable:
        return self.made[node] if node in self.made else self._input(name_of(node, self._names))

    def _input(self, name: Name) -> Variable:
        if name not in self.inputs:
            self.inputs[name] = self.script.variable()
        return self.inputs[name]

    def _record(self, node: fx.Node, count: int = 1) -> None:
        if is_view(node) and (
            is_made_in_list(node.all_input_nodes[0]) or all(user.target in OUT for user in node.users)
        ):
            return
        written = name_of(self._placement.targets.get(node), self._names)
        is_only_sent = isinstance(written, Sent) and all(user.target is launch for user in node.users)
        made: Any = value(node)
        self.operations.append(
            Operation(
                made=written if is_only_sent else Temp(node.name),
                spec=LeafSpec.of(made) if isinstance(made, torch.Tensor) else None,
                function=_function(node),
                arguments=self._shown(node.args),
                options=tuple((key, a) for key, a in node.kwargs.items() if key in _SHOWN and a != 1),
                written=None if is_only_sent else written,
                count=count,
            )
        )

    def _shown(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, lambda node: name_of(node, self._names))


def _spans(places: Iterable[Any]) -> Iterator[PayloadRange]:
    """Yield ranges of payloads that are adjacent in a buffer."""
    ordered = enumerate(sorted(places, key=lambda place: (place.collective, place.position)))
    for _, run in groupby(ordered, lambda at: (at[1].collective, at[1].position - at[0])):
        neighbours = [place for _, place in run]
        yield PayloadRange(neighbours[0].collective, neighbours[0].position, neighbours[-1].position)


def _function(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).partition(".")[0]
