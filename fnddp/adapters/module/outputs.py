"""The tensors in the output of a module, whatever it is made of."""

from collections import deque
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn

_MOST = 1000  # objects whose attributes are read: an output may refer to much else


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in mappings, sequences, sets and attributes of objects, but not of modules and classes."""
    waiting, seen, looks = deque([output]), {id(output): output}, _MOST
    while waiting:
        item = waiting.popleft()
        if isinstance(item, Tensor):
            yield item
            continue
        parts = _items(item)
        if parts is None:
            looks -= 1
            parts = _attributes(item) if looks > 0 else []
        for part in parts:
            if id(part) not in seen and not isinstance(part, int | float | str | bytes | None):
                seen[id(part)] = part  # kept, so that its id stays its own
                waiting.append(part)


def _items(item: Any) -> list[Any] | None:
    if isinstance(item, Mapping):
        return list(item.values())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType, reportUnknownMemberType]
    if isinstance(item, list | tuple | set):
        return list(item)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return None


def _attributes(item: Any) -> list[Any]:
    if isinstance(item, type | ModuleType | nn.Module):  # which no forward has made
        return []
    slots = [name for kind in type(item).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    own: dict[str, Any] = getattr(item, "__dict__", {})
    return [*own.values(), *(getattr(item, name, None) for name in slots)]


def _names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else [name for name in slots if name not in ("__dict__", "__weakref__")]
