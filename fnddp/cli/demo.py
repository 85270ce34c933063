"""`fnddp demo`: check what was asked for, train on all ranks, report on one."""

import os
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from fnddp.cli import digits, report
from fnddp.cli.checks import check_folder, check_pipeline
from fnddp.cli.failures import FAILED, INTERRUPTED, WRONG_ARGUMENTS, WrongArgument, stop
from fnddp.cli.launch import RankError, run_ranks
from fnddp.cli.train import Event, Result, train
from fnddp.sync import Sync

DEFAULT_RANKS = 2


def run(pipelines: Sequence[str], ranks: int | None, steps: int, out: Path, seed: int) -> int:
    """Trains once with each of `pipelines`, prints a table, writes `curves.png` and `results.json`.

    Under torchrun every rank calls this, and rank 0 reports.

    Args:
        pipelines: As `fnddp.parse` reads them.
        ranks: Number of processes to start; None for 2, or under torchrun its own.
        steps: Training steps with each pipeline.
        out: Folder for the files, made if need be.
        seed: Of initial parameters and batches.

    Returns:
        The exit code of the command.
    """
    reports = not dist.is_torchelastic_launched() or os.environ["RANK"] == "0"
    try:
        parameters = dict(digits.make_model(seed=0).named_parameters())
        syncs = [check_pipeline(text, parameters) for text in pipelines]
        world_size = check_ranks(ranks)
        if reports:
            check_folder(out)
        return _train_and_report(syncs, world_size, steps, out, seed, quiet=not reports)
    except WrongArgument as error:
        return _stop(WRONG_ARGUMENTS, error, reports)
    except (RankError, OSError) as error:
        return _stop(FAILED, error, reports)
    except KeyboardInterrupt:
        return _stop(INTERRUPTED, "interrupted; all ranks are ended", reports)


def check_ranks(ranks: int | None) -> int:
    """The number of ranks to run on.

    Raises:
        WrongArgument: A launcher has started another number of ranks.
    """
    if not dist.is_torchelastic_launched():
        return ranks or DEFAULT_RANKS
    launched = int(os.environ["WORLD_SIZE"])
    if ranks not in (None, launched):
        raise WrongArgument(f"--ranks {ranks}, but the launcher has started {launched}; leave --ranks out")
    return launched


def _train_and_report(syncs: list[Sync], world_size: int, steps: int, out: Path, seed: int, quiet: bool) -> int:
    # A file or pipe has no width of its own: take one in which the default pipelines fit on a line.
    console = Console(quiet=quiet, width=None if sys.stdout.isatty() else 130)
    console.print(f"Handwritten digits; ranks: {world_size}, steps with each pipeline: {steps}, seed: {seed}")
    names = [repr(sync) for sync in syncs]
    with closing(_events(syncs, world_size, steps, seed)) as events:
        results = list(_show_progress(events, names, steps, console))
    if not quiet:
        console.print(report.table(names, results))
        console.print("With each pipeline the final parameters are the same on all ranks, to the bit.")
        report.write(out, names, results, ranks=world_size, seed=seed)
        console.print(f"Wrote {out / report.CURVES} and {out / report.RESULTS}", soft_wrap=True)
    return 0


def _show_progress(events: Iterable[Event], names: list[str], steps: int, console: Console) -> Iterator[Result]:
    columns = (
        BarColumn(bar_width=16),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
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


def _events(syncs: list[Sync], world_size: int, steps: int, seed: int) -> Generator[Event]:
    if not dist.is_torchelastic_launched():
        yield from run_ranks(world_size, train, syncs, steps, seed)
        return
    dist.init_process_group("gloo")
    try:
        yield from train(syncs, steps, seed)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _stop(code: int, message: object, reports: bool) -> int:
    return stop("demo", code, message) if reports else code
