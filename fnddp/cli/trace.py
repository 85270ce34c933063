"""`fnddp trace`: one step as it was, and the same step as its plan predicts it."""

from pathlib import Path
from typing import Annotated

import typer

from fnddp.cli.options import Imports, Link, Model, Out, Ranks, Seed


def trace(
    pipeline: Annotated[str, typer.Argument(metavar="PIPELINE", help="for example 'fp16(allreduce)'")],
    model: Model = "transformer",
    ranks: Ranks = None,
    link: Link = "loopback",
    out: Out = Path("fnddp-step.json"),
    seed: Seed = 0,
    imports: Imports = None,
) -> int:
    """Record a step and predict it, for ui.perfetto.dev.

    Trains on ranks that it starts on this machine (or on those of torchrun, SLURM or MPI), records one step of the
    first rank with torch's profiler, and predicts the same step from its plan, with the link, backward, encoding and
    decoding measured just before. Both are in one file, from the same moment on.
    """
    from fnddp.cli import checks, launch, recording

    at, shaped = launch.rank_info(), checks.check_shaped(link)
    count = launch.check_ranks(ranks, at, shaped)
    imported = checks.check_imports(imports)
    sync = checks.check_pipeline(pipeline, checks.check_model(model))
    checks.check_writable(out, "--out")
    found = launch.run_on(at, count, recording.record, sync, model, seed, link=shaped, imports=imported)
    if launch.reports(at):
        timelines, table = found[0]
        out.write_text(timelines)
        table.show()
        print(f"Wrote {out}: open it at https://ui.perfetto.dev")
    return 0
