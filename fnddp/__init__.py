"""Gradient synchronization as composable pure transforms on gradient pytrees.

The first use of a public name, or of a module other than `fnddp.cli`, imports everything, torch included. Until then
nothing imports torch: neither shell completion nor `fnddp --version` waits for it.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fnddp.version import __version__ as __version__

if TYPE_CHECKING:
    from fnddp import outer as outer
    from fnddp.api import *  # noqa: F403

_MIN_TORCH = (2, 11)


class _Package(ModuleType):
    """Module that imports `fnddp.api` on first use, and takes over its public names."""

    def __setattr__(self, name: str, value: Any) -> None:  # called by import, for each submodule of the package
        super().__setattr__(name, value)
        if name == "api":  # last, so that `fnddp.simulate` is the function and not the subpackage
            vars(self).update({key: each for key, each in vars(value).items() if not key.startswith("_")})
        elif isinstance(value, ModuleType) and name != "cli":
            _import_all()

    def __getattr__(self, name: str) -> Any:
        if name == "outer":  # imported on first access: most scripts only synchronize gradients
            return import_module("fnddp.outer")
        if name.startswith("__") and name != "__all__":  # looking for a dunder must not import torch
            raise AttributeError(f"module 'fnddp' has no attribute {name!r}")
        _import_all()
        public = sorted(["__version__", "outer", *(key for key in vars(sys.modules["fnddp.api"]) if key[0] != "_")])
        if name == "__all__":
            return public
        if name in vars(self):
            return vars(self)[name]
        from fnddp.core.options import did_you_mean

        raise AttributeError(f"module 'fnddp' has no attribute {name!r}{did_you_mean(name, public)}")

    def __dir__(self) -> list[str]:
        return self.__all__


def _import_all() -> None:
    found = str(import_module("torch").__version__)
    if tuple(map(int, found.split(".")[:2])) < _MIN_TORCH:
        least = ".".join(map(str, _MIN_TORCH))
        raise ImportError(f"fnddp needs torch {least} or later; found {found}", name="torch")
    import_module("fnddp.api")


sys.modules[__name__].__class__ = _Package  # a module-level __getattr__ alone cannot see assignments
