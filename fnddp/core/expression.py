"""Values that are written as the call that builds them: the base of pipelines and outer steps."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, replace
from inspect import get_annotations
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

import torch

from fnddp.core.group import Group
from fnddp.core.options import Limit, checked_bool, checked_float, checked_int, checked_str, one_of

CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "int": checked_int,
    "float": checked_float,
    "bool": checked_bool,
    "str": checked_str,
    "Literal": lambda what, value: value if isinstance(value, str) else checked_int(what, value),
}
"""Functions that check a field's value and return it in plain Python, by the name of the field's type."""


class Expression:
    """A frozen dataclass; its fields are hyperparameters and the expressions that it wraps.

    It compares and hashes as dataclasses do, checks its fields by their types, and prints as the call that built it.
    """

    named: ClassVar[frozenset[str]] = frozenset()
    """Fields without a default that are printed with their names; they must be the last ones."""
    tables: ClassVar[frozenset[str]] = frozenset()
    """Fields that hold a dict as a tuple of pairs, so that it hashes; they are printed as the dict."""
    limits: ClassVar[Mapping[str, Limit]] = {}
    """The values that fields may have, if not None; others raise a ValueError. Those of each `Literal` are added."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        literals = {name: kind for name, kind in get_annotations(cls).items() if get_origin(kind) is Literal}
        cls.limits = {name: one_of(*get_args(kind)) for name, kind in literals.items()} | dict(cls.limits)

    def __post_init__(self) -> None:
        for field in fields(self):  # pyright: ignore[reportArgumentType]
            # A string in modules that postpone annotations.
            kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
            check = CHECKS.get(kind.removesuffix(" | None").partition("[")[0].rpartition(".")[2])
            value = getattr(self, field.name, None)
            if field.init and check is not None and not (value is None and kind.endswith(" | None")):
                object.__setattr__(self, field.name, check(f"{type(self).__name__}: {field.name}", value))
        for name, limit in self.limits.items():
            value = getattr(self, name)
            if value is not None and not limit.holds(value):
                raise ValueError(f"{type(self).__name__}: {name} must be {limit.text}, got {value!r}")

    def over(self, group: Group, *, unnamed_only: bool = False) -> Any:
        """Return the same expression on another process group: see `Sync.over`."""
        return self._map_children(lambda child: child.over(group, unnamed_only=unnamed_only))

    def _children(self) -> Iterator[Any]:
        for field in fields(self):  # pyright: ignore[reportArgumentType]
            yield from _expressions_in(getattr(self, field.name))

    def _map_children(self, fn: Callable[[Any], Any]) -> Self:
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.init}  # pyright: ignore[reportArgumentType]
        changed = {name: _mapped(fn, value) for name, value in values.items() if any(_expressions_in(value))}
        return replace(self, **changed)  # pyright: ignore[reportArgumentType, reportReturnType]

    def __repr__(self) -> str:
        arguments: list[str] = []
        for field in fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, field.name)
            value = dict(value) if field.name in self.tables else value
            if field.init and field.default is MISSING and field.name not in self.named:
                arguments.append(_show(value))
            elif field.init and value != field.default:
                arguments.append(f"{field.name}={_show(value)}")
        return f"{type(self).__name__}({', '.join(arguments)})"


def _expressions_in(value: Any) -> Iterator[Expression]:
    if isinstance(value, Expression):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _expressions_in(part)


def _mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Expression):
        return fn(value)
    if isinstance(value, tuple):
        return tuple(_mapped(fn, part) for part in value)
    return value


def _show(value: Any) -> str:
    return repr(str(value).removeprefix("torch.")) if isinstance(value, torch.dtype) else repr(value)
