"""Gradient synchronization as composable pure transforms on gradient pytrees.

Everything is imported with the first name, or module apart from the command's, that is asked for: completion and
`fnddp --version` import no torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fnddp.version import __version__ as __version__

if TYPE_CHECKING:
    from fnddp import outer as outer
    from fnddp.api import *  # noqa: F403

_LEAST = (2, 11)  # of torch


class _Package(ModuleType):
    """A module that `fnddp.api` fills, before any other part of the package runs."""

    def __setattr__(self, name: str, value: Any) -> None:  # import does so with each module of the package
        super().__setattr__(name, value)
        if name == "api":  # `simulate` is a function, and not the folder
            vars(self).update({key: each for key, each in vars(value).items() if not key.startswith("_")})
        elif isinstance(value, ModuleType) and name != "cli":
            _import_all()

    def __getattr__(self, name: str) -> Any:
        if name == "outer":  # imported when first asked for: most scripts synchronize gradients only
            return import_module("fnddp.outer")
        if name.startswith("__") and name != "__all__":
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
    if tuple(map(int, found.split(".")[:2])) < _LEAST:
        least = ".".join(map(str, _LEAST))
        raise ImportError(f"fnddp needs torch {least} or later; found {found}", name="torch")
    import_module("fnddp.api")


sys.modules[__name__].__class__ = _Package
