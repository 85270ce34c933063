"""Find the tensors in the output of a module, of any type."""

from collections import deque
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn

_MOST = 1000  # objects to search at most: an output may refer to many other objects


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in mappings, sequences, sets and attributes of objects, but not of modules and classes."""
    waiting, seen, looks = deque([output]), {id(output): output}, _MOST
    while waiting:
        item = waiting.popleft()
        if isinstance(item, Tensor):
            yield item
        parts: Any = ()
        if isinstance(item, Mapping):
            parts = item.values()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        elif isinstance(item, list | tuple | set):
            parts = item  # pyright: ignore[reportUnknownVariableType]
        elif looks > 1 and not isinstance(item, Tensor | type | ModuleType | nn.Module):  # not made by forward
            looks -= 1
            parts = _attributes(item)
        for part in parts:
            if id(part) not in seen and not isinstance(part, int | float | str | bytes | None):
                seen[id(part)] = part  # kept alive, so that its id stays unique
                waiting.append(part)


def _attributes(item: Any) -> list[Any]:
    slots = [slot for kind in type(item).__mro__ for slot in _names(vars(kind).get("__slots__", ()))]
    return [*getattr(item, "__dict__", {}).values(), *(getattr(item, slot, None) for slot in slots)]


def _names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else [name for name in slots if name not in ("__dict__", "__weakref__")]
