"""`fnddp doctor`."""

import argparse
from typing import Any

from fnddp.cli.arguments.values import Defaults, positive


def add(commands: Any) -> None:
    """Adds the command."""
    doctor = commands.add_parser(
        "doctor",
        help="say what is installed, whether ranks agree, how fast their links are, and what can pay here",
        description="Looks at versions, starts ranks on this machine (or uses those of torchrun, SLURM or MPI), "
        "compares what they have, checks that they compute the same means to the bit, measures the links between "
        "them, and predicts a step with several pipelines.",
        formatter_class=Defaults,
    )
    doctor.add_argument("--ranks", type=positive, metavar="N", help="number of ranks (default: 2, or the launcher's)")
    doctor.add_argument(
        "--model",
        default="transformer",
        metavar="NAME",
        help="whose steps are predicted: digits, transformer, deep, gpt2, resnet18, or FILE.py:fn",
    )
    doctor.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="gloo, or NCCL; auto: NCCL with enough GPUs"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead")
    doctor.set_defaults(command="doctor", run=_run, parser=doctor)


def _run(arguments: argparse.Namespace) -> int:
    from fnddp.cli import doctor

    return doctor.run(ranks=arguments.ranks, model=arguments.model, device=arguments.device, as_json=arguments.json)
