"""`fnddp tune`: which pipeline trains as well as the plain mean, in the shortest step on a link."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fnddp.cli import tune_report
from fnddp.cli.checks import check_folder, check_link, check_pipeline
from fnddp.cli.failures import FAILED, INTERRUPTED, WRONG_ARGUMENTS, WrongArgument, stop
from fnddp.cli.models import ModelError
from fnddp.cli.problems import problem
from fnddp.cli.tune_report import Setting
from fnddp.plan.ir import LoweringError
from fnddp.tune import tune


def run(
    pipelines: Sequence[str],
    *,
    model: str,
    data: str | None,
    link: str,
    ranks: int,
    steps: int,
    seeds: int,
    batch: int,
    rate: float | None,
    within: float,
    out: Path,
) -> int:
    """Simulates and costs each of `pipelines`, prints a table and the winner, writes `pareto.png`, `results.json`.

    Args:
        pipelines: As `fnddp.parse` reads them.
        model, data: See `fnddp.cli.problems.problem`.
        link: As `Link.parse` reads it.
        ranks: Number of virtual ranks.
        steps: Of each training.
        seeds: Trainings with each pipeline.
        batch: Samples of a rank in a step.
        rate: The first learning rate; None for what suits the data.
        within: How much worse than the plain mean's a loss may be, relative to it.
        out: Folder for the files, made if need be.

    Returns:
        The exit code of the command.
    """
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        parsed = check_link(link)
        check_folder(out)
        trained = problem(model, data, batch=batch, steps=steps, rate=rate)
        syncs = [repr(check_pipeline(text, trained.parameters())) for text in pipelines]
        named = data or ("digits" if model == "digits" else "its own batches")
        setting = Setting(model, named, link, ranks, steps, seeds, batch)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("trainings"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
            task = bars.add_task("", total=None)
            tuned = tune(
                trained,
                syncs,
                link=parsed,
                ranks=ranks,
                steps=steps,
                seeds=range(seeds),
                within=within,
                tell=lambda at: bars.update(task, completed=at.done, total=at.of),
            )
        console.print(str(setting), markup=False, soft_wrap=True)
        console.print(tune_report.table(tuned))
        for line in filter(None, (tuned.verdict, tuned.doubt and f"But {tuned.doubt}.")):
            console.print(line, markup=False, soft_wrap=True)
        tune_report.write(out, tuned, setting)
        console.print(f"Wrote {out / tune_report.PLOT} and {out / tune_report.RESULTS}", soft_wrap=True)
        return 0
    except (WrongArgument, ModelError, LoweringError) as error:
        return stop("tune", WRONG_ARGUMENTS, error)
    except OSError as error:
        return stop("tune", FAILED, error)
    except KeyboardInterrupt:
        return stop("tune", INTERRUPTED, "interrupted")
