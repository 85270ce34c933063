"""Modules by name or file, for models and for transforms of one's own."""

import importlib
import importlib.util
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType

from fnddp.cli.failures import WrongArgument

# Files that users have not written: fnddp's, Python's, and what is installed.
_NOT_OWN = (str(Path(__file__).parent.parent), "<frozen", *sysconfig.get_paths().values())


def load(name: str) -> ModuleType:
    """Import and return the module `name`: an installed one, one of this folder ("package.module"), or "FILE.py".

    Raises:
        WrongArgument: There is none, or it raised, or ended the program, as scripts do.
    """
    try:
        if name.endswith(".py"):
            return _of_file(Path(name))
        _add_path(Path.cwd())  # a console script, unlike `python -m`, does not
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise WrongArgument(f"cannot import {name}: {described(error)}") from error


def described(error: BaseException) -> str:
    """Return the type and text of an error, and the line of a user's module that raised it, if one did."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    own = [at for at in traceback.extract_tb(error.__traceback__) if not at.filename.startswith(_NOT_OWN)]
    return f"{text} (at {own[-1].filename}:{own[-1].lineno})" if own else text


def _of_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    name = f"fnddp_file_{file.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(file.absolute()):
        return sys.modules[name]  # transforms are registered once
    spec = importlib.util.spec_from_file_location(name, file.absolute())
    assert spec is not None  # its name ends with .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    _add_path(file.absolute().parent)  # as if Python ran the file: it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _add_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
