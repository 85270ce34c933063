"""The `fnddp` command."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from typing import Annotated, Any, Literal

import typer
from typer.completion import get_completion_script
from typer.exceptions import TyperException

from fnddp.cli.commands import bench, demo, doctor, plan, run, trace, tune
from fnddp.cli.failures import (
    BROKEN_PIPE,
    EXTRA,
    FAILED,
    INTERRUPTED,
    WRONG_ARGUMENTS,
    Failure,
    WrongArgument,
    print_error,
    wrong_if,
)
from fnddp.version import __version__


def _print_version(asked: bool) -> None:
    if asked:
        print(f"fnddp {__version__}")
        raise typer.Exit


def fnddp(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Train with PyTorch over slow networks: compress the gradients that ranks exchange."""


def completion(shell: Literal["bash", "zsh", "fish"]) -> int:
    """Print the script for tab completion in a shell.

    bash: source <(fnddp completion bash). zsh, after compinit: source <(fnddp completion zsh).
    fish: fnddp completion fish | source.
    """
    print(get_completion_script(prog_name="fnddp", complete_var="_FNDDP_COMPLETE", shell=shell))
    return 0


def reporting_errors(command: Callable[..., int]) -> Callable[..., int]:
    """Wrap `command` to report expected errors in one line on standard error, with an exit code; raise others."""

    @wraps(command)
    def run(*arguments: object, **options: object) -> int:
        from fnddp.cli.terminal import is_first_rank, progress  # imports rich; completion does not need it

        name = f"fnddp {command.__name__}"
        try:
            _check_syntax(options)
        except WrongArgument as error:
            return print_error(name, error.code, error) if is_first_rank() else error.code
        try:
            try:
                with progress("importing torch"):
                    import_module("fnddp.torch_private")  # fails here if torch is missing or too old
                    import_module("fnddp.api")
                return command(*arguments, **options)
            finally:
                sys.stdout.flush()  # a broken pipe is caught here; at exit nothing could catch it
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit raises again
            return BROKEN_PIPE
        except KeyboardInterrupt:
            code, message = INTERRUPTED, "interrupted; all ranks have been stopped"
        except (Failure, OSError) as error:
            code, message = getattr(error, "code", FAILED), error
        except ImportError as error:
            missing = (error.name or "").partition(".")[0]
            if missing == "torch":
                return print_error(name, FAILED, error)
            if missing not in EXTRA:
                raise
            code, message = FAILED, f"needs {error.name}, which is not installed: pip install 'fnddp[demo]'"
        from fnddp.cli.launch import print_error_once  # imports torch; completion and --version do not need it

        return print_error_once(name, code, message)

    return run


def _check_syntax(options: Mapping[str, object]) -> None:
    """Raise a WrongArgument for a text that is not a pipeline, before torch is imported (seconds)."""
    from fnddp.core.syntax import expression_of

    for name in ("pipeline", "pipelines", "gradients", "weights"):
        given: Any = options.get(name) or []
        for text in given if isinstance(given, list) else [given]:
            with wrong_if(ValueError):
                expression_of(text)


settings = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(callback=fnddp, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=settings)
for command in (demo, plan, bench, tune, trace, doctor):
    app.command()(reporting_errors(command))
# Arguments after the script's name are for the script.
app.command(context_settings={"allow_interspersed_args": False})(reporting_errors(run))
app.command()(completion)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, or `--help` if it is empty, and return its exit code: 0, or one of `failures`."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        return app(arguments, prog_name="fnddp", standalone_mode=False) or 0
    except TyperException as error:
        context = getattr(error, "ctx", None)
        return print_error(context.command_path if context else "fnddp", WRONG_ARGUMENTS, error.format_message())
