"""`fnddp plan`: what pipelines would send and take, from their plans alone. Nothing is run, and nothing is sent."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fnddp.cli.failures import WrongArgument
from fnddp.cli.options import DEFAULT_PIPELINES, Imports, Json, Model, Pipelines, positive


def plan(
    pipelines: Pipelines = None,
    model: Model = "transformer",
    ranks: Annotated[
        str,
        typer.Option(
            metavar="N",
            help="number of ranks, also thousands; for pipelines over several groups the number of each, such as "
            "node=8,across=128 (the default group's has no name)",
        ),
    ] = "8",
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RATE[:LATENCY]",
            help="of each rank, such as 200mbit, 25gbit:20us or 100GB/s; or of each group, node=100GB/s,across=25gbit; "
            "once for each link to compare; no latency unless given (default: 1gbit)",
        ),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="plan a model sharded by FSDP2 over N ranks instead: its axes, and PIPELINE between its replicas; "
            "--link shards=100GB/s,replicas=25gbit gives each a link",
        ),
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, metavar="N", help="with --shards, the number of replicas of the sharded model")
    ] = 1,
    gradients: Annotated[
        str | None,
        typer.Option(metavar="PIPELINE", help="with --shards, of gradients between them, such as 'quantize(two_shot)'"),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="PIPELINE", help="with --shards, of weights between them, such as 'quantize(allgather)'"),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="plan the step at which every step counter in the pipelines' states is N: 0 looks at the start of a "
            "warm-up (default: after all warm-ups)",
        ),
    ] = None,
    backward: Annotated[
        float | None,
        typer.Option(
            callback=positive,
            metavar="SECONDS",
            help="time of backward, to compute the step and its exposed communication (default: none is hidden)",
        ),
    ] = None,
    bucket_cap_mb: Annotated[
        float, typer.Option(callback=positive, metavar="MB", help="MiB of gradients whose payloads travel together")
    ] = 25.0,
    show: Annotated[bool, typer.Option("--show", help="print each plan in full, too")] = False,
    as_json: Json = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the timeline of the plan of one pipeline")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="write the predicted step of one pipeline, for ui.perfetto.dev, as a trace of torch's profiler",
        ),
    ] = None,
    imports: Imports = None,
) -> int:
    """Compute what pipelines would send and take on a cluster.

    Lowers each pipeline for a model and any number of ranks, and compares bytes, collectives, memory and the time of
    communication, computed for each link (latency and bandwidth of a ring). Nothing is run, and no cluster is needed.
    """
    from fnddp.cli import checks, plan_report, terminal
    from fnddp.cost.step import Compute
    from fnddp.wire.groups import World, within

    if shards is not None or gradients or weights or replicas > 1:
        others = {"--ranks": ranks != "8", "--step": step is not None, "--backward": backward, "--show": show}
        others |= {"--svg": svg, "--trace": trace, "--bucket-cap-mb": bucket_cap_mb != 25}
        unfit = [option for option, given in others.items() if given]
        if shards is None or unfit:
            fix = f"leave {', '.join(unfit)} out" if unfit else "give --shards N, or --shards 1"
            raise WrongArgument(f"the plan of a model's axes is for --shards and --replicas: {fix}")
        from fnddp.cli import plan_axes  # with FSDP2, which takes a second to import

        checks.check_imports(imports)
        plan_axes.show(model, (shards, replicas), (gradients, weights), pipelines or [], link or ["1gbit"], as_json)
        return 0
    texts, links = pipelines or DEFAULT_PIPELINES, link or ["1gbit"]
    files = {option: file for option, file in (("--svg", svg), ("--trace", trace)) if file is not None}
    if show and as_json:
        raise WrongArgument("--json prints nothing else: leave --show out")
    if files and max(len(texts), len(links)) > 1:
        draw = "draws" if len(files) == 1 else "draw"
        raise WrongArgument(f"{' and '.join(files)} {draw} the plan of one pipeline on one link: give one of each")
    for option, file in files.items():
        checks.check_writable(file, option)
    checks.check_imports(imports)
    sizes, by_text = checks.check_sizes(ranks), {text: checks.check_links(text) for text in links}
    parameters = checks.check_model(model, trains=False)
    setting = plan_report.Setting(model, parameters, sizes, by_text, step, backward, bucket_cap_mb)
    with within(World(size=sizes)):
        syncs = [checks.check_pipeline(text, parameters) for text in texts]
    for option, text, given in (("--ranks", ranks, sizes), *(("--link", *each) for each in by_text.items())):
        checks.check_groups(option, text, given, syncs)
    planned: list[plan_report.Planned] = []
    with terminal.progress() as show_progress:
        for i, sync in enumerate(syncs):
            show_progress(f"{i + 1} of {len(syncs)}: {sync!r}", i, len(syncs))  # seconds each, for a large model
            planned.append(plan_report.planned(sync, setting))
    busiest, on = planned[0].busiest, by_text[links[0]]
    if svg is not None:
        svg.write_text(busiest.to_svg(on))
    if trace is not None:
        trace.write_text(busiest.to_trace(on, Compute(backward_seconds=backward or 0.0)))
    if as_json:
        print(json.dumps(plan_report.as_json(setting, planned), indent=1))
    else:
        plan_report.show(setting, planned, in_full=show)
    return 0
