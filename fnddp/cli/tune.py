"""`fnddp tune`: which pipeline ends near the plain mean's loss, in the shortest step on a link."""

from collections.abc import Sequence
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from fnddp.cli import terminal, tune_report
from fnddp.cli.bars import progress
from fnddp.cli.checks import check_folder, check_imports, check_link, check_pipeline
from fnddp.cli.failures import FAILED, INTERRUPTED, WRONG_ARGUMENTS, stop
from fnddp.cli.models import ModelError
from fnddp.cli.problems import problem, require_fit
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
    imports: Sequence[str],
) -> int:
    """Simulates and costs each of `pipelines`, prints a table and the winner, writes `pareto.svg`, `results.json`.

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
        imports: Modules that register transforms.

    Returns:
        The exit code of the command.
    """
    try:
        parsed = check_link(link)
        check_folder(out)
        check_imports(imports)
        trained = problem(model, data, batch=batch, steps=steps, rate=rate)
        parameters = trained.parameters()
        syncs = [repr(check_pipeline(text, parameters)) for text in pipelines]
        named = data or ("digits" if model == "digits" else "its own batches")
        require_fit(trained, model, data or "own", ranks)
        setting = Setting(model, named, link, ranks, steps, seeds, batch)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("trainings"), TimeElapsedColumn())
        with progress(*columns) as bars:
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
        print(f"{terminal.folded(str(setting))}\n")
        tune_report.table(tuned).show()
        for line in filter(None, (tuned.verdict, tuned.doubt and f"But {tuned.doubt}.")):
            print(line)
        tune_report.write(out, tuned, setting)
        print(f"Wrote {out / tune_report.PLOT} and {out / tune_report.RESULTS}")
        return 0
    except (ValueError, ModelError, LoweringError) as error:
        return stop("tune", WRONG_ARGUMENTS, error)
    except OSError as error:
        return stop("tune", FAILED, error)
    except KeyboardInterrupt:
        return stop("tune", INTERRUPTED, "interrupted")
