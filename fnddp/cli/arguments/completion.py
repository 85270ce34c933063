"""`fnddp completion`."""

import argparse
from typing import Any


def add(commands: Any) -> None:
    """Adds the command."""
    completion = commands.add_parser(
        "completion",
        help="print what makes a shell complete this command",
        description="Prints a script. bash: source <(fnddp completion bash). zsh: the same with zsh, after compinit. "
        "fish: fnddp completion fish | source.",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.set_defaults(command="completion", run=_run, parser=completion)


def _run(arguments: argparse.Namespace) -> int:
    from fnddp.cli import completion

    print(completion.script(arguments.shell, arguments.whole))
    return 0
