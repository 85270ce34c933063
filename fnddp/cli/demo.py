"""`fnddp demo`: check what was asked for, train on all ranks, report on one."""

from pathlib import Path
from typing import Annotated

import typer

from fnddp.cli.options import DEFAULT_PIPELINES, Imports, Model, Out, Pipelines, PipelinesOption, Ranks, Seed


def demo(
    more: Pipelines = None,
    pipelines: PipelinesOption = None,
    ranks: Ranks = None,
    model: Model = "digits",
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="training steps with each pipeline")] = 400,
    out: Out = Path("fnddp-demo"),
    seed: Seed = 0,
    imports: Imports = None,
) -> int:
    """Train with several pipelines and compare them.

    Trains a small network on scikit-learn's handwritten digits, or another model, once with each pipeline, and
    compares bytes, accuracy and time. Starts its own ranks on this machine, or uses those of torchrun. Writes
    curves.png and results.json.
    """
    from fnddp.cli import checks, launcher, report, terminal
    from fnddp.cli.train import train

    at = launcher.rank_info()
    count = launcher.check_ranks(ranks, at)
    imported = checks.check_imports(imports)
    parameters = checks.check_model(model)
    texts = [*(pipelines or ()), *(more or ())] or DEFAULT_PIPELINES
    syncs = [checks.check_pipeline(text, parameters) for text in texts]
    setting = report.Setting(model, count, steps, seed)
    if launcher.reports(at):
        checks.check_writable(out, "--out", is_folder=True)
        terminal.say(f"{setting}\n")
    results = launcher.run_on(at, count, train, syncs, model, steps, seed, imports=imported)
    if launcher.reports(at):
        report.show(results)
        report.write(out, results, setting)
        print(f"Wrote {out / report.CURVES} and {out / report.RESULTS}")
    return 0
