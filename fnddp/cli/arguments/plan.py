"""`fnddp plan`."""

import argparse
from pathlib import Path
from typing import Any

from fnddp.cli.arguments.values import DEFAULT_PIPELINES, add_imports, natural, positive_float


def add(commands: Any) -> None:
    """Adds the command."""
    plan = commands.add_parser(
        "plan",
        help="compute what pipelines would send and take on a cluster, without one",
        description="Lowers each pipeline for a model and any number of ranks, and compares bytes, collectives, memory "
        "and the time of communication, computed for each link (latency and bandwidth of a ring). Nothing is run.",
    )
    plan.add_argument(
        "pipelines", nargs="*", default=DEFAULT_PIPELINES, metavar="PIPELINE", help="for example 'fp16(allreduce)'"
    )
    plan.add_argument(
        "--model",
        default="transformer",
        metavar="NAME",
        help="transformer, deep, gpt2, resnet18, or FILE.py:fn: a module, or what makes one (default: %(default)s)",
    )
    plan.add_argument(
        "--ranks",
        default="8",
        metavar="N",
        help="number of ranks, thousands too; for pipelines over several groups that of each, such as "
        "node=8,across=128, and one without a name of the default group (default: %(default)s)",
    )
    plan.add_argument(
        "--link",
        action="append",
        metavar="RATE[:LATENCY]",
        help="of each rank, such as 200mbit, 25gbit:20us or 100GB/s; or of each group, node=100GB/s,across=25gbit; "
        "once for each link to compare; no latency unless given (default: 1gbit)",
    )
    plan.add_argument(
        "--step",
        type=natural,
        metavar="N",
        help="plan the step at which every step counter in the pipelines' states is N: 0 looks at the start of a "
        "warm-up (default: after all warm-ups)",
    )
    plan.add_argument(
        "--backward",
        type=positive_float,
        metavar="SECONDS",
        help="that backward takes, to compute the step, and what of communication is exposed (default: none is hidden)",
    )
    plan.add_argument(
        "--bucket-cap-mb",
        type=positive_float,
        default=25.0,
        metavar="MB",
        help="MiB of gradients whose payloads travel together (default: 25)",
    )
    printed = plan.add_mutually_exclusive_group()
    printed.add_argument("--show", action="store_true", help="print each plan in full, too")
    printed.add_argument("--json", action="store_true", help="print JSON instead")
    plan.add_argument("--svg", type=Path, metavar="FILE", help="write the timeline of the plan of one pipeline")
    plan.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the predicted step of one pipeline, for ui.perfetto.dev, as a measured trace of torch's profiler",
    )
    add_imports(plan)
    plan.set_defaults(command="plan", run=_run, parser=plan)


def _run(arguments: argparse.Namespace) -> int:
    from fnddp.cli import plan

    return plan.run(
        arguments.pipelines,
        model=arguments.model,
        ranks=arguments.ranks,
        links=arguments.link or ["1gbit"],
        step=arguments.step,
        backward=arguments.backward,
        bucket_cap_mb=arguments.bucket_cap_mb,
        show=arguments.show,
        json=arguments.json,
        svg=arguments.svg,
        trace=arguments.trace,
        imports=arguments.imports,
    )
