"""`fnddp bench`."""

import argparse
from pathlib import Path
from typing import Any

from fnddp.cli.arguments.values import Defaults, add_imports, natural, positive


def add(commands: Any) -> None:
    """Adds the command."""
    bench = commands.add_parser(
        "bench",
        help="time training steps with pipelines against torch's own DDP",
        description="Runs real training steps (forward, loss, backward with synchronization), one arm after the other "
        "in each round, on ranks that it starts on this machine (or on those of torchrun, SLURM or MPI): each "
        "pipeline, and each peer. Compares within rounds. With --link every rank gets a network of its own, joined by "
        "links of that rate (Linux, root).",
        formatter_class=Defaults,
    )
    bench.add_argument("pipelines", nargs="*", metavar="PIPELINE", help="for example 'fp16(allreduce)'")
    bench.add_argument(
        "--codecs", action="store_true", help="instead, time encoding and decoding of the pipelines, or of all codecs"
    )
    bench.add_argument("--ranks", type=positive, metavar="N", help="number of ranks (default: 2, or the launcher's)")
    bench.add_argument(
        "--link",
        default="loopback",
        metavar="RATE[:LATENCY]",
        help="of each rank's link, such as 200mbit or 1gbit:1ms",
    )
    bench.add_argument(
        "--against",
        default="ddp,fp16_hook,none",
        metavar="PEER,...",
        help="ddp: torch's; fp16_hook, bf16_hook, powersgd_hook: the same with a hook; none: no synchronization",
    )
    bench.add_argument(
        "--model", default="transformer", metavar="NAME", help="transformer, deep, gpt2, resnet18, or FILE.py:fn"
    )
    bench.add_argument("--pairs", type=positive, default=30, metavar="N", help="timed rounds")
    bench.add_argument(
        "--engine",
        choices=("ddp", "register", "value_and_grad"),
        default="ddp",
        help="how pipelines run: fnddp's DistributedDataParallel, in torch's, or in functional steps",
    )
    bench.add_argument(
        "--compile", action="store_true", help="compile all steps; pipelines then run in functional ones, whole"
    )
    bench.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="gloo, or NCCL")
    bench.add_argument(
        "--out", type=Path, default=Path("fnddp-bench"), metavar="DIR", help="where ratios.png and results.json go"
    )
    bench.add_argument("--seed", type=natural, default=0, metavar="N", help="of the parameters and the arms' order")
    bench.add_argument("--profile", action="store_true", help="also say where the host's time goes in a step")
    bench.add_argument(
        "--backend", choices=("inductor", "cudagraphs"), help="who runs what plans compute; Python by default"
    )
    add_imports(bench)
    bench.set_defaults(command="bench", run=_run, parser=bench)


def _run(arguments: argparse.Namespace) -> int:
    from fnddp.cli import bench, bench_codecs
    from fnddp.cli.failures import WRONG_ARGUMENTS, stop

    if arguments.codecs:
        taken = {"codecs", "pipelines", "imports", "command", "run", "parser", "whole"}
        given = [name for name, value in vars(arguments).items() if value != arguments.parser.get_default(name)]
        if others := [f"--{name}" for name in given if name not in taken]:
            said = f"--codecs times one rank without a link or a model: leave {' and '.join(others)} out"
            return stop("bench", WRONG_ARGUMENTS, said)
        return bench_codecs.run(arguments.pipelines, imports=arguments.imports)
    if not arguments.pipelines:
        return stop("bench", WRONG_ARGUMENTS, "name a pipeline, such as 'fp16(allreduce)', or ask for --codecs")
    return bench.run(
        arguments.pipelines,
        ranks=arguments.ranks,
        link=None if arguments.link == "loopback" else arguments.link,
        against=arguments.against,
        model=arguments.model,
        pairs=arguments.pairs,
        engine=arguments.engine,
        compiled=arguments.compile,
        device=arguments.device,
        out=arguments.out,
        seed=arguments.seed,
        is_profiled=arguments.profile,
        backend=arguments.backend,
        imports=arguments.imports,
    )
