"""The `fnddp` command: help, errors and completion come without what `import fnddp` brings, torch above all."""

import sys
from pathlib import Path
from types import ModuleType


def main() -> int:
    """Run the command line and return its exit code."""
    bare = ModuleType("fnddp")  # until a command is run: see `whole` in fnddp/cli/main.py
    bare.__path__ = [str(Path(__file__).parent / "fnddp")]
    sys.modules["fnddp"] = bare
    from fnddp.cli.main import main

    return main()
