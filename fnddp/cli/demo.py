"""`fnddp demo`: check what was asked for, train on all ranks, report on one."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from fnddp.cli import launcher, lessons, report, terminal
from fnddp.cli.bars import progress
from fnddp.cli.checks import check_folder, check_imports, check_pipeline
from fnddp.cli.launcher import Place, check_ranks, on_ranks
from fnddp.cli.report import Setting
from fnddp.cli.train import Event, Result, train
from fnddp.sync import Sync


def run(
    pipelines: Sequence[str],
    *,
    ranks: int | None,
    steps: int,
    out: Path,
    seed: int,
    model: str,
    imports: Sequence[str],
) -> int:
    """Trains once with each of `pipelines`, prints a table, writes `curves.png` and `results.json`.

    Under torchrun every rank calls this, and rank 0 reports.

    Args:
        pipelines: As `fnddp.parse` reads them.
        ranks: Number of processes to start; None for 2, or under torchrun its own.
        steps: Training steps with each pipeline.
        out: Folder for the files, made if need be.
        seed: Of initial parameters and batches.
        model: As `fnddp.cli.lessons.lesson` takes it.
        imports: Modules that register transforms.

    Returns:
        The exit code of the command.
    """

    def work(at: Place | None) -> int:
        world_size = check_ranks(ranks, at)
        check_imports(imports)
        parameters = lessons.parameters(model)
        syncs = [check_pipeline(text, parameters) for text in pipelines]
        if launcher.reports(at):
            check_folder(out)
        setting = Setting(model, world_size, steps, seed, tuple(imports))
        return _train_and_report(syncs, setting, at, out)

    return launcher.at_place("demo", work)


def _train_and_report(syncs: list[Sync], setting: Setting, at: Place | None, out: Path) -> int:
    quiet = not launcher.reports(at)
    if not quiet:
        print(f"{terminal.folded(str(setting))}\n")
    names = [repr(sync) for sync in syncs]
    what = (syncs, setting.model, setting.steps, setting.seed)
    with closing(on_ranks(at, setting.ranks, train, *what, imports=setting.imports)) as events:
        results = list(_show_progress(events, names, setting.steps, quiet))
    if not quiet:
        report.table(names, results).show()
        print(terminal.folded("With each pipeline the final parameters are the same on all ranks, to the bit."))
        report.write(out, names, results, setting)
        print(f"Wrote {out / report.CURVES} and {out / report.RESULTS}")
    return 0


def _show_progress(events: Iterable[Event], names: list[str], steps: int, quiet: bool) -> Iterator[Result]:
    columns = (
        BarColumn(bar_width=16),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    with progress(*columns, quiet=quiet) as bars:
        tasks = [bars.add_task(name, total=steps, start=False, loss="-----") for name in names]
        for event in events:
            task = tasks[event.index]
            bars.start_task(task)
            if isinstance(event, Result):
                bars.update(task, completed=steps)
                bars.stop_task(task)
                yield event
            else:
                bars.update(task, completed=event.steps, loss=f"{event.loss:.3f}")
