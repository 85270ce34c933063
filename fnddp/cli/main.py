"""The `fnddp` command."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEMO_EXTRA = {"rich", "matplotlib", "sklearn"}
DEFAULT_PIPELINES = (
    "allreduce",
    "fp16(allreduce)",
    "error_feedback(powersgd(fp16(allreduce), rank=2))",
    "warmup(error_feedback(powersgd(fp16(allreduce), rank=2)), steps=30)",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0, 1 (failed), 2 (wrong arguments) or 130 (Ctrl-C)."""
    parser = argparse.ArgumentParser(
        prog="fnddp", description="Gradient synchronization as composable pure transforms."
    )
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    _add_demo(commands)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="train on real digits with several pipelines and compare them",
        description="Trains a small network on scikit-learn's handwritten digits, once with each pipeline, and "
        "compares bytes, accuracy and time. Starts its own ranks on this machine, or uses those of torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--ranks", type=_positive, metavar="N", help="number of ranks (default: 2, or torchrun's)")
    demo.add_argument(
        "--pipelines", nargs="+", default=DEFAULT_PIPELINES, metavar="PIPELINE", help="for example 'fp16(allreduce)'"
    )
    demo.add_argument("--steps", type=_positive, default=400, metavar="N", help="training steps with each pipeline")
    demo.add_argument(
        "--out", type=Path, default=Path("fnddp-demo"), metavar="DIR", help="where curves.png and results.json go"
    )
    demo.add_argument("--seed", type=_natural, default=0, metavar="N", help="of the initial parameters and the batches")
    demo.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    try:
        from fnddp.cli import demo  # what it needs is an optional extra
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in DEMO_EXTRA:
            raise
        print(f"fnddp demo: needs {error.name}, which is not installed: pip install 'fnddp[demo]'", file=sys.stderr)
        return 1
    return demo.run(
        pipelines=arguments.pipelines,
        ranks=arguments.ranks,
        steps=arguments.steps,
        out=arguments.out,
        seed=arguments.seed,
    )


def _positive(text: str) -> int:
    return _at_least(1, text)


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    number = int(text) if text.lstrip("-").isdecimal() else None
    if number is None or number < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return number
