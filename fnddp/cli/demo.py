"""`fnddp demo`: check what was asked for, train on all ranks, report on one."""

from pathlib import Path
from typing import Annotated

import typer

from fnddp.cli.options import DEFAULT_PIPELINES, Device, Imports, Model, Out, Pipelines, PipelinesOption, Ranks, Seed


def demo(
    more: Pipelines = None,
    pipelines: PipelinesOption = None,
    ranks: Ranks = None,
    model: Model = "digits",
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="training steps with each pipeline")] = 400,
    device: Device = "cpu",
    out: Out = Path("fnddp-demo"),
    seed: Seed = 0,
    imports: Imports = None,
) -> int:
    """Train with several pipelines and compare them.

    Trains a small network on scikit-learn's handwritten digits, or another model, once with each pipeline, and
    compares bytes, accuracy and time. Starts its own ranks on this machine, or uses those of torchrun. Writes
    curves.png and results.json.
    """
    import torch

    from fnddp.cli import checks, launch, picture, report, terminal
    from fnddp.cli.models import BATCH_SIZE
    from fnddp.cli.train import train

    at = launch.rank_info()
    count = launch.check_ranks(ranks, at)
    imported = checks.check_imports(imports)
    parameters = checks.check_model(model)
    on = launch.check_device(device, count, at)
    texts = [*(pipelines or ()), *(more or ())] or DEFAULT_PIPELINES
    syncs = [checks.check_pipeline(text, parameters) for text in texts]
    if launch.reports(at):
        checks.check_writable(out, "--out", is_folder=True)
        terminal.echo(f"{report.title(model)}; ranks: {count}, steps with each pipeline: {steps}, seed: {seed}\n")
    results = launch.run_on(at, count, train, syncs, model, steps, seed, on, device=on, imports=imported)
    if launch.reports(at):
        found = {
            "model": model,
            "data": "scikit-learn digits" if model == "digits" else "the model's own batch",
            "torch": torch.__version__,
            "ranks": count,
            "seed": seed,
            "steps": steps,
            "batch_size_per_rank": BATCH_SIZE if model == "digits" else None,
            "parameters": sum(p.numel() for p in parameters.values()),
            "pipelines": results,
        }
        report.show(results)
        picture.write(out, report.CURVES, lambda: report.curves(found), found)
    return 0
