"""A griffe extension for the API pages: signatures of transforms, and doctests as code.

Griffe reads sources, so it does not know that `@fnddp.transform` makes dataclasses; and it takes a doctest for code
only under the heading "Examples:".
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import griffe

_DOCTEST = re.compile(r"(?:^|(?<=\n\n))(>>> .*?)(?=\n\n|\Z)", re.DOTALL)


class FnddpDocs(griffe.Extension):
    """Gives every class decorated with `transform` or `outer` its `__init__`, and fences doctests."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for member in _members(pkg):
            if member.docstring:
                member.docstring.value = _DOCTEST.sub(r"```pycon\n\1\n```", inspect.cleandoc(member.docstring.value))
            decorators = {str(each.value) for each in getattr(member, "decorators", ())}
            if isinstance(member, griffe.Class) and decorators & {"transform", "outer"}:
                _add_init(member)


def _members(parent: griffe.Module | griffe.Class) -> Iterator[griffe.Object]:
    for member in list(parent.members.values()):
        if isinstance(member, griffe.Object):
            yield member
        if isinstance(member, griffe.Module | griffe.Class):
            yield from _members(member)


def _add_init(cls: griffe.Class) -> None:
    made = getattr(importlib.import_module(cls.module.path), cls.name)
    shown = [_parameter(cls, parameter) for parameter in inspect.signature(made).parameters.values()]
    this = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    cls.set_member("__init__", griffe.Function("__init__", parent=cls, parameters=griffe.Parameters(this, *shown)))


def _parameter(cls: griffe.Class, parameter: inspect.Parameter) -> griffe.Parameter:
    field = next(base.members[parameter.name] for base in [cls, *cls.mro()] if parameter.name in base.members)
    default = None if parameter.default is inspect.Parameter.empty else repr(parameter.default)
    kind = griffe.ParameterKind.positional_or_keyword
    return griffe.Parameter(parameter.name, annotation=field.annotation, kind=kind, default=default)
