"""`fnddp tune`."""

import argparse
from pathlib import Path
from typing import Any

from fnddp.cli.arguments.values import Defaults, add_imports, positive, positive_float, share


def add(commands: Any) -> None:
    """Adds the command."""
    tune = commands.add_parser(
        "tune",
        help="find the pipeline that trains as well as the plain mean, in the shortest step on a link",
        description="Trains with each pipeline on virtual ranks in this process, costs a step of each on the link, and "
        "prints bytes, time and final loss. Encoding, decoding and backward are measured here. The plain mean and "
        "16-bit wires are always among them.",
        formatter_class=Defaults,
    )
    tune.add_argument(
        "--model", default="digits", metavar="NAME", help="digits, transformer, deep, gpt2, FILE.py:fn or module:fn"
    )
    tune.add_argument(
        "--data",
        choices=("digits", "text", "own"),
        help="scikit-learn's images, Python's help texts by character, or the model's own batch, always the same "
        "(default: digits for that model, own for others)",
    )
    tune.add_argument("--link", default="1gbit", metavar="RATE[:LATENCY]", help="of each rank, such as 100mbit:50us")
    tune.add_argument("--ranks", type=positive, default=8, metavar="N", help="number of virtual ranks")
    tune.add_argument(
        "--pipelines", nargs="+", metavar="PIPELINE", help="instead of the usual ones: for example 'sign(two_shot)'"
    )
    tune.add_argument("--steps", type=positive, default=150, metavar="N", help="of each training")
    tune.add_argument("--seeds", type=positive, default=3, metavar="N", help="trainings with each pipeline")
    tune.add_argument("--batch", type=positive, default=8, metavar="N", help="samples of a rank in a step")
    tune.add_argument("--rate", type=positive_float, metavar="R", help="the first learning rate; it falls linearly")
    tune.add_argument(
        "--within", type=share, default=0.01, metavar="P", help="how much worse than the plain mean's a loss may be"
    )
    tune.add_argument(
        "--out", type=Path, default=Path("fnddp-tune"), metavar="DIR", help="where pareto.svg and results.json go"
    )
    add_imports(tune)
    tune.set_defaults(command="tune", run=_run, parser=tune)


def _run(arguments: argparse.Namespace) -> int:
    from fnddp.cli import tune
    from fnddp.tune import CANDIDATES

    return tune.run(
        arguments.pipelines or CANDIDATES,
        model=arguments.model,
        data=arguments.data,
        link=arguments.link,
        ranks=arguments.ranks,
        steps=arguments.steps,
        seeds=arguments.seeds,
        batch=arguments.batch,
        rate=arguments.rate,
        within=arguments.within,
        out=arguments.out,
        imports=arguments.imports,
    )
