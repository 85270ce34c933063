"""`fnddp trace`."""

import argparse
from pathlib import Path
from typing import Any

from fnddp.cli.arguments.values import Defaults, add_imports, natural, positive


def add(commands: Any) -> None:
    """Adds the command."""
    trace = commands.add_parser(
        "trace",
        help="run a step, and write its timeline beside the predicted one, for ui.perfetto.dev",
        description="Trains on ranks that it starts on this machine (or on those of torchrun, SLURM or MPI), records "
        "one step of the first rank with torch's profiler, and predicts the same step from its plan, with the link, "
        "backward, encoding and decoding measured just before. Both are in one file, from the same moment on.",
        formatter_class=Defaults,
    )
    trace.add_argument("pipeline", metavar="PIPELINE", help="for example 'fp16(allreduce)'")
    trace.add_argument(
        "--model",
        default="transformer",
        metavar="NAME",
        help="digits, transformer, deep, gpt2, resnet18, or FILE.py:fn, whose fn() returns (module, inputs, loss_fn)",
    )
    trace.add_argument("--ranks", type=positive, metavar="N", help="number of ranks (default: 2, or the launcher's)")
    trace.add_argument(
        "--link",
        metavar="RATE[:LATENCY]",
        help="of each rank, such as 200mbit: needs Linux and root (default: loopback)",
    )
    trace.add_argument("--out", type=Path, default=Path("fnddp-step.json"), metavar="FILE", help="where it goes")
    trace.add_argument("--seed", type=natural, default=0, metavar="N", help="of the parameters and the batches")
    add_imports(trace)
    trace.set_defaults(command="trace", run=_run, parser=trace)


def _run(arguments: argparse.Namespace) -> int:
    from fnddp.cli import trace

    return trace.run(
        arguments.pipeline,
        model=arguments.model,
        ranks=arguments.ranks,
        link=arguments.link,
        out=arguments.out,
        seed=arguments.seed,
        imports=arguments.imports,
    )
