"""`fnddp bench`: check what was asked for, time real training steps on all ranks, report."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fnddp.cli.failures import WrongArgument
from fnddp.cli.options import Device, Imports, Link, Model, Out, Pipelines, Ranks, Seed


def bench(
    context: typer.Context,
    pipelines: Pipelines = None,
    codecs: Annotated[
        bool,
        typer.Option("--codecs", help="instead, time encoding and decoding of the pipelines, or of all codecs"),
    ] = False,
    ranks: Ranks = None,
    link: Link = "loopback",
    against: Annotated[
        str,
        typer.Option(
            metavar="PEER,...",
            help="ddp: torch's; fp16_hook, bf16_hook, powersgd_hook: the same with a hook; none: no synchronization",
        ),
    ] = "ddp,fp16_hook,none",
    model: Model = "transformer",
    pairs: Annotated[int, typer.Option(min=1, metavar="N", help="timed rounds")] = 30,
    engine: Annotated[
        Literal["ddp", "register", "value_and_grad"],
        typer.Option(help="how pipelines run: fnddp's DistributedDataParallel, in torch's, or in functional steps"),
    ] = "ddp",
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="compile all steps; pipelines then run in functional ones, whole"),
    ] = False,
    device: Device = "cpu",
    out: Out = Path("fnddp-bench"),
    seed: Seed = 0,
    profile: Annotated[bool, typer.Option("--profile", help="also print where the host's time goes in a step")] = False,
    backend: Annotated[
        Literal["inductor"] | None,
        typer.Option(help="what compiles the computation of plans; Python by default"),
    ] = None,
    imports: Imports = None,
) -> int:
    """Time training steps with pipelines against torch's own DDP.

    Runs real training steps (forward, loss, backward with synchronization), one arm after the other in each round, on
    ranks that it starts on this machine (or on those of torchrun, SLURM or MPI): each pipeline, and each peer. Compares
    within rounds. The pipeline "auto" is what sync="auto" takes there. With --link every rank gets a network of
    its own, joined by links of that rate (Linux, root). Writes ratios.png and results.json.
    """
    from fnddp.cli import bench_codecs, bench_rank, bench_report, checks, launch, picture
    from fnddp.cli.bench_run import Setup
    from fnddp.core.sync import Sync
    from fnddp.run.choose import AUTO, Auto

    if codecs:
        flags = {str(each.name): each.opts[0] for each in context.command.params}
        given = [name for name in flags if str(context.get_parameter_source(name)) == "ParameterSource.COMMANDLINE"]
        if others := [flags[name] for name in given if name not in ("codecs", "pipelines", "imports")]:
            left_out = " and ".join(others)
            raise WrongArgument(f"--codecs times one rank without a link or a model: leave {left_out} out")
        checks.check_imports(imports)
        return bench_codecs.run(pipelines or ())
    if not pipelines:
        raise WrongArgument("name a pipeline, such as 'fp16(allreduce)', or ask for --codecs")
    at, shaped = launch.rank_info(), checks.check_shaped(link)
    count = launch.check_ranks(ranks, at, shaped)
    imported = checks.check_imports(imports)
    parameters = checks.check_model(model)
    is_functional = compiled or engine == "value_and_grad"
    syncs: list[Sync | Auto] = [
        AUTO if text == AUTO and not is_functional else checks.check_pipeline(text, parameters) for text in pipelines
    ]
    device = launch.check_device(device, count, at, is_shared=at is None)
    bench_rank.check_machine(device, shaped, backend, compiled)
    peers, left_out = bench_rank.check_peers(against, device, count)
    if launch.reports(at):
        checks.check_writable(out, "--out", is_folder=True)
        print("".join(f"{name} is left out: {reason}\n" for name, reason in left_out.items()), end="", flush=True)
    setup = Setup(
        model=model,
        pipelines=syncs,
        peers=peers,
        ranks=count,
        parameters=sum(p.numel() for p in parameters.values()),
        engine=engine,
        compiled=compiled,
        device=device,
        pairs=pairs,
        seed=seed,
        is_profiled=profile,
        backend=backend,
        link=shaped,
        launcher=at and at.launcher,
    )
    found = launch.run_on(at, count, bench_rank.measure, setup, at, link=shaped, device=device, imports=imported)
    if launch.reports(at):
        (run,) = found
        bench_report.show(run)
        picture.write(out, bench_report.RATIOS, lambda: bench_report.draw(run), bench_report.as_json(run))
    return 0
