"""`fnddp demo`."""

import argparse
from pathlib import Path
from typing import Any

from fnddp.cli.arguments.values import DEFAULT_PIPELINES, Defaults, add_imports, natural, positive


def add(commands: Any) -> None:
    """Adds the command."""
    demo = commands.add_parser(
        "demo",
        help="train with several pipelines and compare them",
        description="Trains a small network on scikit-learn's handwritten digits, or another model, once with each "
        "pipeline, and compares bytes, accuracy and time. Starts its own ranks on this machine, or uses those of "
        "torchrun.",
        formatter_class=Defaults,
    )
    demo.add_argument("--ranks", type=positive, metavar="N", help="number of ranks (default: 2, or torchrun's)")
    demo.add_argument(
        "--pipelines", nargs="+", default=DEFAULT_PIPELINES, metavar="PIPELINE", help="for example 'fp16(allreduce)'"
    )
    demo.add_argument(
        "--model",
        default="digits",
        metavar="NAME",
        help="digits, transformer, deep, gpt2, resnet18, or FILE.py:fn, whose fn() returns (module, inputs, loss_fn)",
    )
    demo.add_argument("--steps", type=positive, default=400, metavar="N", help="training steps with each pipeline")
    demo.add_argument(
        "--out", type=Path, default=Path("fnddp-demo"), metavar="DIR", help="where curves.png and results.json go"
    )
    demo.add_argument("--seed", type=natural, default=0, metavar="N", help="of the initial parameters and the batches")
    add_imports(demo)
    demo.set_defaults(command="demo", run=_run, parser=demo)


def _run(arguments: argparse.Namespace) -> int:
    from fnddp.cli import demo

    return demo.run(
        pipelines=arguments.pipelines,
        ranks=arguments.ranks,
        steps=arguments.steps,
        out=arguments.out,
        seed=arguments.seed,
        model=arguments.model,
        imports=arguments.imports,
    )
