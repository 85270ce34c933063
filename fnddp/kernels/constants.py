"""Constants, and tables of constants that operators read on a device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fnddp.device import device_of

INT8_BLOCK = 128  # the most elements of a residual in int8 that share a scale
MOST_TABLES = 256
_tables: dict[Any, Tensor] = {}
_captured: dict[Any, Tensor] = {}  # tables that graphs read, which are never dropped


def on_device(key: Any, numbers: Callable[[], Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a table of constants on a device: for each `key` and stream, the host sends it once."""
    of = device_of(device)
    key = key, dtype, device, of.current()
    made = _tables.get(key, _captured.get(key))
    if made is not None and of.is_capturing():
        _captured[key] = made
    if made is None:
        made = of.of_host(numbers(), dtype)
        if not of.is_capturing():  # else it has no values before the graph is replayed
            _tables[key] = made
            if len(_tables) > MOST_TABLES:
                del _tables[next(iter(_tables))]
    return made
