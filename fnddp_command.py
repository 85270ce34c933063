"""The `fnddp` command: help, its version and completion do without what `import fnddp` brings, torch above all."""

import os
import sys
from pathlib import Path
from types import ModuleType


def main() -> int:
    """Run the command line and return its exit code."""
    asks = {"--help", "--version"} & set(sys.argv) and "--" not in sys.argv
    if asks or "_FNDDP_COMPLETE" in os.environ:  # nothing is run: what lists commands imports nothing of fnddp but itself
        bare = ModuleType("fnddp")
        bare.__path__ = [str(Path(__file__).parent / "fnddp")]
        sys.modules["fnddp"] = bare
    from fnddp.cli.main import main

    return main()
