"""`fnddp doctor`: what is here, whether ranks agree, how fast their links are, and what can pay."""

import json
from typing import Annotated, Literal

import typer

from fnddp.cli.failures import FAILED
from fnddp.cli.options import Json, Model, Ranks


def doctor(
    ranks: Ranks = None,
    model: Model = "transformer",
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="gloo, or NCCL; auto: NCCL with enough GPUs")
    ] = "auto",
    as_json: Json = False,
) -> int:
    """Check what is installed, ranks and their links.

    Looks at versions, starts ranks on this machine (or uses those of torchrun, SLURM or MPI), compares what they have,
    checks that they compute the same means to the bit, measures the links between them, and predicts a step of the
    model with several pipelines. Prints what can pay here, and exits with 1 if ranks disagree.
    """
    from fnddp.cli import checks, diagnosis, launcher, terminal
    from fnddp.cli.examination import examine
    from fnddp.cli.launch import RankError

    at = launcher.rank_info()
    checks.check_model(model)
    count = launcher.check_ranks(ranks, at)
    on = launcher.check_device(device, count, at)
    if launcher.reports(at) and not as_json:
        terminal.echo("\n".join(diagnosis.installed()))
    try:
        found = launcher.run_on(at, count, examine, model, on, backend="nccl" if on == "cuda" else "gloo")[0]
    except RankError:
        raise
    except (OSError, RuntimeError) as error:
        raise RankError(f"{error}\n{launcher.HINT}") from error
    if launcher.reports(at) and as_json:
        print(json.dumps(diagnosis.as_json(found, on), indent=1))
    elif launcher.reports(at):
        diagnosis.show(found, at, model, on)
    return 0 if found.is_sound else FAILED
