"""The `fnddp` command."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from fnddp.cli.arguments import bench, completion, demo, doctor, plan, trace, tune
from fnddp.cli.failures import BROKEN_PIPE
from fnddp.options import did_you_mean
from fnddp.version import __version__

DEMO_EXTRA = {"rich", "matplotlib", "sklearn"}

_WRONG = r"(?:argument .*: invalid choice: '|unrecognized arguments: )([^\s']+)(.*)"  # what argparse says


class Parser(argparse.ArgumentParser):
    """Says what was perhaps meant."""

    def error(self, message: str) -> NoReturn:
        """Ends with exit code 2."""
        wrong = re.match(_WRONG, message, re.DOTALL)
        if wrong is not None:
            name, choices = wrong.groups()
            known = re.findall(r"[\w-]+", choices.partition("choose from")[2]) or _options(self)
            message += did_you_mean(name, known)
        super().error(message)


def parser() -> Parser:
    """All commands and their options."""
    made = Parser(prog="fnddp", description="Gradient synchronization as composable pure transforms.")
    made.add_argument("--version", action="version", version=f"fnddp {__version__}")
    made.set_defaults(whole=made)
    commands = made.add_subparsers(title="commands", metavar="command", required=True)
    for command in (demo, plan, bench, tune, trace, doctor, completion):
        command.add(commands)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    0; 1 (failed), 2 (wrong arguments), 130 (Ctrl-C), or 141: whoever read its output has gone, as `head` does.
    """
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # here, and not at exit, where nobody could answer for it
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _run(argv: Sequence[str]) -> int:
    whole = parser()
    arguments, unknown = whole.parse_known_args(argv)
    if unknown:
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return arguments.run(arguments)  # imports its own command: what that needs is an optional extra
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in DEMO_EXTRA:
            raise
        needs = f"needs {error.name}, which is not installed: pip install 'fnddp[demo]'"
        print(f"fnddp {arguments.command}: {needs}", file=sys.stderr)
        return 1


def _options(of: argparse.ArgumentParser) -> list[str]:
    return re.findall(r"--[\w-]+", of.format_help())
