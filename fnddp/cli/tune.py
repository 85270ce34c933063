"""`fnddp tune`: which pipeline ends near the plain mean's loss, in the shortest step on a link."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fnddp.cli.failures import WrongArgument
from fnddp.cli.options import Imports, Link, Model, Out, Pipelines, PipelinesOption, positive


def tune(
    more: Pipelines = None,
    pipelines: PipelinesOption = None,
    model: Model = "digits",
    data: Annotated[
        Literal["digits", "text", "own"] | None,
        typer.Option(
            help="scikit-learn's images, Python's help texts by character, or the model's own batches (the default)"
        ),
    ] = None,
    link: Link = "1gbit",
    ranks: Annotated[int, typer.Option(min=1, metavar="N", help="number of virtual ranks")] = 8,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="of each training")] = 150,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="trainings with each pipeline")] = 3,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="samples of a rank in a step")] = 8,
    rate: Annotated[
        float | None,
        typer.Option(callback=positive, metavar="R", help="the first learning rate; it falls linearly"),
    ] = None,
    within: Annotated[
        str, typer.Option(metavar="P", help="how much worse than the plain mean's a loss may be: 1%, 0.01, or 0")
    ] = "1%",
    out: Out = Path("fnddp-tune"),
    imports: Imports = None,
) -> int:
    """Find the fastest pipeline that trains as well as the mean.

    Trains with each pipeline on virtual ranks in this process, costs a step of each on the link, and prints bytes, time
    and final loss. Encoding, decoding and backward are measured here. The plain mean and 16-bit wires are always among
    them; name others in the place of the usual ones. Writes pareto.svg and results.json.
    """
    from fnddp.cli import checks, picture, terminal, tune_report
    from fnddp.cli.models import to_tune
    from fnddp.ir.program import LoweringError
    from fnddp.simulate.tune import CANDIDATES
    from fnddp.simulate.tune import tune as search

    share, parsed = checks.check_share(within), checks.check_link(link)
    checks.check_writable(out, "--out", is_folder=True)
    checks.check_imports(imports)
    asked = to_tune(model, data, batch=batch, ranks=ranks, steps=steps, rate=rate)
    parameters = checks.check_model(model, trains=False)
    texts = [*(pipelines or ()), *(more or ())] or CANDIDATES
    syncs = [repr(checks.check_pipeline(text, parameters)) for text in texts]
    on = ("digits" if model == "digits" else "its own batches") if data in (None, "own") else data
    setting = {"model": model, "data": on, "link": link, "ranks": ranks, "steps": steps, "seeds": seeds, "batch": batch}
    try:
        with terminal.progress() as show:
            show("training")
            tuned = search(
                asked,
                syncs,
                link=parsed,
                within=share,
                ranks=ranks,
                steps=steps,
                seeds=range(seeds),
                tell=lambda done, of: show("training", done, of),
            )
    except (ValueError, LoweringError) as error:
        raise WrongArgument.of(error) from error
    tune_report.show(tuned, setting)
    found = tune_report.as_json(tuned, setting)
    picture.write(out, tune_report.PLOT, lambda: tune_report.plot(tuned, setting), found)
    return 0
