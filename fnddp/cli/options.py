"""Options of several commands. This file and the commands do not import torch: completion runs them at each key."""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

MODELS = {
    "digits": "fnddp.cli.digits:problem",
    **{name: f"fnddp.cli.models:{name}" for name in ("transformer", "deep", "gpt2", "resnet18")},
}
"""Functions that return problems, by the names that `--model` accepts."""

DEFAULT_PIPELINES = (
    "allreduce",
    "bf16(allreduce)",
    "bucketize(quantize(two_shot))",
    "warmup(error_feedback(powersgd(bf16(allreduce), rank=2)), steps=30)",
)


def positive(value: float | None) -> float | None:
    """Return `value` if it is None or a finite number above 0."""
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"must be a positive number, got {value}")
    return value


def unfit(context: typer.Context, *fit: str) -> list[str]:
    """Return the flags on the command line that set none of the parameters `fit`."""
    others = [each for each in context.command.params if each.name not in fit]
    return [
        each.opts[0] for each in others if str(context.get_parameter_source(str(each.name))).endswith("COMMANDLINE")
    ]


def _models(context: typer.Context, incomplete: str) -> list[str]:
    refused = {"resnet18"} if context.info_name == "tune" else set[str]()  # it changes buffers: see `to_tune`
    refused |= set() if find_spec("sklearn") else {"digits"}
    return [name for name in MODELS if name not in refused and name.startswith(incomplete)]


Pipelines: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="PIPELINE", help="for example 'fp16(allreduce)'", show_default=False)
]
Model: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        autocompletion=_models,
        help=f"{', '.join(MODELS)}, or FILE.py:fn or module:fn, whose fn() returns (module, inputs, loss_fn); for "
        "plan a module is enough",
    ),
]
Ranks: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="number of ranks: 2 by default, or the launcher's", show_default=False),
]
Link: TypeAlias = Annotated[
    str, typer.Option(metavar="RATE[:LATENCY]", help="rate of each rank's link, such as 200mbit or 1gbit:1ms")
]
Out: TypeAlias = Annotated[Path, typer.Option(metavar="PATH", help="folder for the files that it writes")]
Seed: TypeAlias = Annotated[int, typer.Option(min=0, metavar="N", help="seed of initial parameters, batches and order")]
Imports: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--import", metavar="MODULE", help="module with transforms of your own, imported first: a name, or FILE.py"
    ),
]
Device: TypeAlias = Annotated[
    str,
    typer.Option(metavar="KIND", help="cpu, or an accelerator such as cuda; auto: the accelerator if all have one"),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="print JSON instead")]
