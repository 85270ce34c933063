"""`fnddp doctor`: what is here, whether ranks agree, how fast their links are, and what can pay."""

import json

from fnddp.cli.failures import FAILED
from fnddp.cli.options import Device, Json, Model, Ranks


def doctor(
    ranks: Ranks = None,
    model: Model = "transformer",
    device: Device = "auto",
    as_json: Json = False,
) -> int:
    """Check what is installed, ranks and their links.

    Looks at versions, starts ranks on this machine (or uses those of torchrun, SLURM or MPI), compares what they have,
    checks that they compute the same means to the bit, measures the links between them, and predicts a step of the
    model with several pipelines. Prints what can pay here, and exits with 1 if ranks disagree.
    """
    from fnddp.cli import checks, examination, launch, terminal
    from fnddp.cli.launch import RankError

    at = launch.rank_info()
    checks.check_model(model)
    count = launch.check_ranks(ranks, at)
    on = launch.check_device(device, count, at)
    if launch.reports(at) and not as_json:
        terminal.echo("\n".join(examination.installed()))
    try:
        found = launch.run_on(at, count, examination.examine, model, on, device=on)[0]
    except RankError:
        raise
    except (OSError, RuntimeError) as error:
        raise RankError(f"{error}\n{launch.HINT}") from error
    if launch.reports(at) and as_json:
        print(json.dumps(examination.as_json(found, on), indent=1))
    elif launch.reports(at):
        examination.show(found, at, model, on)
    return 0 if found.is_sound else FAILED
