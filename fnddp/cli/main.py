"""The `fnddp` command."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Annotated, Literal

import typer
from typer.completion import get_completion_script
from typer.exceptions import TyperException

from fnddp.cli.bench import bench
from fnddp.cli.demo import demo
from fnddp.cli.doctor import doctor
from fnddp.cli.failures import BROKEN_PIPE, EXTRA, FAILED, INTERRUPTED, WRONG_ARGUMENTS, Failure, stop
from fnddp.cli.plan import plan
from fnddp.cli.trace import trace
from fnddp.cli.tune import tune
from fnddp.version import __version__


def _version(asked: bool) -> None:
    if asked:
        print(f"fnddp {__version__}")
        raise typer.Exit


def fnddp(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Gradient synchronization as composable pure transforms."""


def completion(shell: Literal["bash", "zsh", "fish"]) -> int:
    """Print a script with which a shell completes this command.

    bash: source <(fnddp completion bash). zsh: the same with zsh, after compinit. fish: fnddp completion fish | source.
    """
    print(get_completion_script(prog_name="fnddp", complete_var="_FNDDP_COMPLETE", shell=shell))
    return 0


def reported(command: Callable[..., int]) -> Callable[..., int]:
    """Return `command` with its errors reported as a line on standard error and an exit code."""

    @wraps(command)
    def run(*arguments: object, **options: object) -> int:
        try:
            try:
                import_module("fnddp.core")  # and so all of it: torch may be too old
                return command(*arguments, **options)
            finally:
                sys.stdout.flush()  # here, and not at exit, where nothing could catch the error
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        except KeyboardInterrupt:
            code, message = INTERRUPTED, "interrupted; all ranks are ended"
        except (Failure, OSError) as error:
            code, message = getattr(error, "code", FAILED), error
        except ImportError as error:
            missing = (error.name or "").partition(".")[0]
            if missing == "torch":
                return stop(f"fnddp {command.__name__}", FAILED, error)
            if missing not in EXTRA:
                raise
            code, message = FAILED, f"needs {error.name}, which is not installed: pip install 'fnddp[demo]'"
        from fnddp.cli.launch import stopped  # imports torch, which completion and --version need not wait for

        return stopped(f"fnddp {command.__name__}", code, message)

    return run


settings = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(callback=fnddp, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=settings)
for command in (demo, plan, bench, tune, trace, doctor):
    app.command()(reported(command))
app.command()(completion)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0; 1 (failed), 2 (wrong arguments), 130 (Ctrl-C), or 141: its output is no longer read, as after `head`.
    """
    try:
        return app(argv, prog_name="fnddp", standalone_mode=False) or 0
    except TyperException as error:
        context = getattr(error, "ctx", None)
        return stop(context.command_path if context else "fnddp", WRONG_ARGUMENTS, error.format_message())
