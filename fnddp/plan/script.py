"""Straight-line Python code of calls, which frees each value when it has been read for the last time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variable:
    """A name in a script."""

    name: str


class Script:
    """The body of a function while it is written."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, list[Variable], set[Variable]]] = []  # with what they make and what they read
        self._scope: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # in the scope, by what they stand for
        self._count = 0

    def variable(self) -> Variable:
        """Return a new variable."""
        self._count += 1
        return Variable(f"v{self._count}")

    def call(self, function: Callable[..., Any], arguments: Any = (), options: Any = None) -> Variable:
        """Add a call; return the variable of its result. Arguments are variables, constants, and lists of them."""
        made = self.variable()
        self._call(made.name, [made], function, arguments, options or {})
        return made

    def call_for(self, count: int, function: Callable[..., Any], arguments: Any, options: Any) -> list[Variable]:
        """Add a call that returns a list of `count` results."""
        made = [self.variable() for _ in range(count)]
        self._call(f"[{', '.join([each.name for each in made])}]", made, function, arguments, options)
        return made

    def function(self, inputs: Iterable[Variable], outputs: Sequence[Variable]) -> Callable[..., tuple[Any, ...]]:
        """Return the script as a function of `inputs`, which returns a tuple of `outputs`."""
        inputs = list(inputs)
        kept = set(outputs)
        lines: list[str] = []
        for line, made, read in reversed(self._lines):
            done = sorted({variable.name for variable in {*made, *read} - kept})
            kept |= {*made, *read}
            lines.append(f" {line}{'; ' if done else ''}{' = '.join([*done, 'None']) if done else ''}")
        returned = "".join(f"{variable.name}, " for variable in outputs)
        head = f"def run({', '.join([variable.name for variable in inputs])}):"
        scope = dict(self._scope)
        exec(compile("\n".join([head, *reversed(lines), f" return ({returned})"]), "<plan>", "exec"), scope)
        return scope["run"]

    def _call(self, to: str, made: list[Variable], function: Any, arguments: Any, options: Any) -> None:
        read: set[Variable] = set()
        given = [self._text(argument, read) for argument in arguments]
        given += [f"{'from_' if key == 'from' else key}={self._text(option, read)}" for key, option in options.items()]
        self._lines.append((f"{to} = {self._constant(function)}({', '.join(given)})", made, read))

    def _text(self, argument: Any, read: set[Variable]) -> str:
        if isinstance(argument, Variable):
            read.add(argument)
            return argument.name
        if isinstance(argument, list | tuple):
            return f"[{', '.join([self._text(each, read) for each in argument])}]"
        if argument is None or isinstance(argument, bool | int | str):
            return repr(argument)
        return self._constant(argument)

    def _constant(self, value: Any) -> str:
        if id(value) not in self._names:
            self._names[id(value)] = f"c{len(self._names)}"
            self._scope[self._names[id(value)]] = value  # which keeps it alive, and its id its own
        return self._names[id(value)]
