"""Text to pipeline, for config files and the command line: literals and registered names, nothing else."""

import ast
import inspect
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

from fnddp.core.codec import Carrier
from fnddp.core.options import did_you_mean
from fnddp.core.sync import Sync, registry, require_sync
from fnddp.core.syntax import PIPELINE, expression_of, pointer, problem

T = TypeVar("T")

MAX_DEPTH = 100

ABOUT_AUTO = (
    '"auto" cannot be part of a pipeline. sync="auto" measures the link between the ranks of a wrapped model and '
    "takes the fastest safe pipeline; without running ranks, fnddp.choose(params, link) and `fnddp plan auto --link "
    "1gbit` name it"
)


def parse(text: str) -> Sync:
    """Return the pipeline that `text` describes: the inverse of `repr`.

    Safe on hostile text: nothing is evaluated. Accepted are calls of registered names (transforms of this package and
    those made with `@fnddp.transform`), registered values (`allreduce`), literals, and dicts, tuples and lists of them.

    Args:
        text: For example "error_feedback(powersgd(bf16(allreduce), rank=4))".

    Raises:
        TypeError, ValueError: From the constructors, or for other text; with the position.

    >>> parse("powersgd(fp16(allreduce), rank=4)")
    powersgd(fp16(allreduce), rank=4)
    >>> parse("__import__('os')")
    Traceback (most recent call last):
        ...
    ValueError: parse: unknown name '__import__'; known names are all_gather, all_reduce, ...
      __import__('os')
      ^
    """
    return read(text, registry, Sync, PIPELINE)


def read(text: str, names: Mapping[str, Any], kind: type[T], wanted: str) -> T:
    """Return the value of type `kind`, `wanted` in errors, that `text` describes with `names`. Raises as `parse`."""
    text, expression = expression_of(text, wanted)
    import_module("fnddp.api")  # registers all names of the package: only a part may be imported so far
    value = _Reader(text, names).read(expression, depth=0)
    if not isinstance(value, kind):
        raise problem(text, 1, 0, f"this is a {type(value).__name__}, not {wanted}")
    return value


class _Reader:
    def __init__(self, text: str, names: Mapping[str, Any]) -> None:
        self.text, self.names = text, names

    def read(self, node: ast.expr, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self.problem(node, f"nested more than {MAX_DEPTH} deep")
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None):
                return node.value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.Name(id=name):
                entry = self.look_up(node, name)
                if not isinstance(entry, Sync):
                    raise self.problem(node, f"{name!r} is a transform, not a value; call it: {name}(...)")
                return entry
            case ast.Call(func=ast.Name(id=name)):
                return self.call(node, name, depth)
            case ast.Dict(keys=keys, values=values):
                names = [self.key(node, key).value for key in keys]
                if len(set(names)) < len(names):
                    raise self.problem(node, "a key occurs twice")
                return {name: self.read(value, depth + 1) for name, value in zip(names, values, strict=True)}
            case ast.Tuple(elts=parts):
                return tuple(self.read(part, depth + 1) for part in parts)
            case ast.List(elts=parts):
                return [self.read(part, depth + 1) for part in parts]
            case _:
                raise self.problem(
                    node, f"{type(node).__name__} is not allowed: only registered names, calls and literals"
                )

    def call(self, node: ast.Call, name: str, depth: int) -> Sync:
        entry = self.look_up(node, name)
        if isinstance(entry, Sync) and (node.args or not isinstance(entry, Carrier)):
            raise self.problem(node, f"{name!r} is a ready-made value; write it without parentheses")
        if any(keyword.arg is None for keyword in node.keywords):
            raise self.problem(node, "** is not allowed")
        arguments = [self.read(argument, depth + 1) for argument in node.args]
        keywords = {str(keyword.arg): self.read(keyword.value, depth + 1) for keyword in node.keywords}
        make: Any = type(entry) if isinstance(entry, Sync) else entry  # of a carrier: `two_shot(server_memory=True)`
        try:
            _require_fit(name, make, arguments, keywords)
            return make(*arguments, **keywords)
        except (TypeError, ValueError) as error:
            error.add_note(pointer(self.text, node.lineno, self.column(node)))
            raise

    def look_up(self, node: ast.expr, name: str) -> Any:
        if name == "auto":
            raise self.problem(node, ABOUT_AUTO)
        if name not in self.names:
            known = [known for known, entry in self.names.items() if _is_public(known, entry)]
            hint = did_you_mean(name, [*known, "auto"]) or f"; known names are {', '.join(sorted(known))}"
            about = f" {ABOUT_AUTO}" if "'auto'" in hint and name != self.text else ""
            raise self.problem(node, f"unknown name {name!r}{hint}{about}")
        return self.names[name]

    def key(self, node: ast.Dict, key: ast.expr | None) -> ast.Constant:
        if not isinstance(key, ast.Constant):
            raise self.problem(key or node, "a dict key must be a literal")
        return key

    def column(self, node: ast.expr) -> int:
        line = self.text.split("\n")[node.lineno - 1]
        return len(line.encode()[: node.col_offset].decode())  # ast counts bytes

    def problem(self, node: ast.expr, what: str) -> ValueError:
        return problem(self.text, node.lineno, self.column(node), what)


def _is_public(name: str, entry: Any) -> bool:
    """Return False for a class of this package that users only know by its ready-made value."""
    is_own = isinstance(entry, type) and issubclass(entry, Sync) and entry.__module__.startswith("fnddp.")
    return not is_own or hasattr(sys.modules["fnddp.api"], name)


def _require_fit(name: str, make: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Raise a TypeError that lists the options of `name` unless the arguments fit them."""
    signature = inspect.signature(make)
    known = signature.parameters
    unknown = [option for option in keywords if option not in known]
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        hint = did_you_mean(unknown[0], known) or f"; it has {', '.join(known)}"
        raise TypeError(f"{name}: unknown option {unknown[0]!r}{hint}")
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        options = [f"{each} (a pipeline)" if each == "inner" else each for each in known]
        raise TypeError(f"{name}: {error}; its options are {', '.join(options)}") from None


def pipeline_of(what: str, sync: str | Sync) -> Sync:
    """Return the pipeline `sync`, or the pipeline of the text `sync`; else raise a TypeError that calls it `what`."""
    return require_sync(what, parse(sync) if isinstance(sync, str) else sync)
