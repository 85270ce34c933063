"""Gradient synchronization as composable pure transforms on gradient pytrees.

The first use of a public name imports everything, torch included. Until then nothing imports torch: neither shell
completion nor `fnddp --version` waits for it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fnddp.version import __version__ as __version__

if TYPE_CHECKING:
    from fnddp import collectives as collectives
    from fnddp import laws as laws
    from fnddp import options as options
    from fnddp import outer as outer
    from fnddp import random as random
    from fnddp import tree as tree
    from fnddp.api import *  # noqa: F403


def _import_on_first_use(name: str) -> Any:
    if name.startswith("__") and name != "__all__":  # looking for a dunder must not import torch
        raise AttributeError(f"module 'fnddp' has no attribute {name!r}")
    if find_spec(f"fnddp.{name}"):  # `fnddp.outer`; and `from fnddp import device` within the package, in any order
        return import_module(f"fnddp.{name}")
    import_module("fnddp.torch_private")  # raises an ImportError unless torch is new enough
    api = import_module("fnddp.api")
    public = sorted(["__version__", "laws", "outer", *(key for key in vars(api) if not key.startswith("_"))])
    if name == "__all__":
        return public
    if name in public:
        return globals().setdefault(name, getattr(api, name))
    from fnddp.core.options import did_you_mean

    raise AttributeError(f"module 'fnddp' has no attribute {name!r}{did_you_mean(name, public)}")


def __dir__() -> list[str]:
    return _import_on_first_use("__all__")


if not TYPE_CHECKING:  # for a type checker it would make every name a public one
    __getattr__ = _import_on_first_use
