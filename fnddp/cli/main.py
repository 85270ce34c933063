"""The `fnddp` command."""

import argparse
import math
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
    _add_plan(commands)
    _add_bench(commands)
    _add_tune(commands)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)  # imports its own command: what that needs is an optional extra
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in DEMO_EXTRA:
            raise
        needs = f"needs {error.name}, which is not installed: pip install 'fnddp[demo]'"
        print(f"fnddp {arguments.command}: {needs}", file=sys.stderr)
        return 1


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
    demo.set_defaults(command="demo", run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from fnddp.cli import demo

    return demo.run(
        pipelines=arguments.pipelines,
        ranks=arguments.ranks,
        steps=arguments.steps,
        out=arguments.out,
        seed=arguments.seed,
    )


def _add_plan(commands: Any) -> None:
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
        help="transformer, deep, gpt2, resnet18, or FILE.py:fn, where fn() returns a module (default: %(default)s)",
    )
    plan.add_argument(
        "--ranks", type=_positive, default=8, metavar="N", help="number of ranks, thousands too (default: %(default)s)"
    )
    plan.add_argument(
        "--link",
        action="append",
        metavar="RATE[:LATENCY]",
        help="of each rank, such as 200mbit, 25gbit:20us or 100GB/s; once for each link to compare; no "
        "latency unless given (default: 1gbit)",
    )
    plan.add_argument(
        "--step",
        type=_natural,
        metavar="N",
        help="plan the step at which every step counter in the pipelines' states is N: 0 looks at the start of a "
        "warm-up (default: after all warm-ups)",
    )
    plan.add_argument(
        "--backward",
        type=_positive_float,
        metavar="SECONDS",
        help="that backward takes, to compute the step, and what of communication is exposed (default: none is hidden)",
    )
    plan.add_argument(
        "--bucket-cap-mb",
        type=_positive_float,
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
    plan.set_defaults(command="plan", run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
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
    )


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="time training steps with pipelines against torch's own DDP",
        description="Runs real training steps (forward, loss, backward with synchronization), one arm after the other "
        "in each round, on ranks that it starts on this machine: each pipeline, and each peer. Compares within "
        "rounds. With --link every rank gets a network of its own, joined by links of that rate (Linux, root).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    bench.add_argument("pipelines", nargs="*", metavar="PIPELINE", help="for example 'fp16(allreduce)'")
    bench.add_argument(
        "--codecs", action="store_true", help="instead, time encoding and decoding of the pipelines, or of all codecs"
    )
    bench.add_argument("--ranks", type=_positive, default=2, metavar="N", help="number of ranks")
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
    bench.add_argument("--pairs", type=_positive, default=30, metavar="N", help="timed rounds")
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
    bench.add_argument("--seed", type=_natural, default=0, metavar="N", help="of the parameters and the arms' order")
    bench.add_argument("--profile", action="store_true", help="also say where the host's time goes in a step")
    bench.add_argument(
        "--backend", choices=("inductor", "cudagraphs"), help="who runs what plans compute; Python by default"
    )
    bench.set_defaults(command="bench", run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    from fnddp.cli import bench, bench_codecs
    from fnddp.cli.failures import WRONG_ARGUMENTS, stop

    if arguments.codecs:
        return bench_codecs.run(arguments.pipelines)
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
    )


def _add_tune(commands: Any) -> None:
    tune = commands.add_parser(
        "tune",
        help="find the pipeline that trains as well as the plain mean, in the shortest step on a link",
        description="Trains with each pipeline on virtual ranks in this process, costs a step of each on the link, and "
        "prints bytes, time and final loss. Encoding, decoding and backward are measured here. The plain mean and "
        "16-bit wires are always among them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
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
    tune.add_argument("--ranks", type=_positive, default=8, metavar="N", help="number of virtual ranks")
    tune.add_argument(
        "--pipelines", nargs="+", metavar="PIPELINE", help="instead of the usual ones: for example 'sign(two_shot)'"
    )
    tune.add_argument("--steps", type=_positive, default=150, metavar="N", help="of each training")
    tune.add_argument("--seeds", type=_positive, default=3, metavar="N", help="trainings with each pipeline")
    tune.add_argument("--batch", type=_positive, default=8, metavar="N", help="samples of a rank in a step")
    tune.add_argument("--rate", type=_positive_float, metavar="R", help="the first learning rate; it falls linearly")
    tune.add_argument(
        "--within", type=_share, default=0.01, metavar="P", help="how much worse than the plain mean's a loss may be"
    )
    tune.add_argument(
        "--out", type=Path, default=Path("fnddp-tune"), metavar="DIR", help="where pareto.png and results.json go"
    )
    tune.set_defaults(command="tune", run=_tune)


def _tune(arguments: argparse.Namespace) -> int:
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


def _positive_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return number


def _share(text: str) -> float:
    """ "1%", or 0.01."""
    number = _positive_float(text.removesuffix("%"))
    return number / 100 if text.endswith("%") else number
