"""The commands: their options, and their calls, in order. Nothing here imports torch before it is called."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from fnddp.cli import options
from fnddp.cli.failures import FAILED, WrongArgument, wrong_if


def demo(
    pipelines: options.Pipelines = None,
    ranks: options.Ranks = None,
    model: options.Model = "digits",
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="training steps with each pipeline")] = 400,
    device: options.Device = "cpu",
    out: options.Out = Path("fnddp-demo"),
    seed: options.Seed = 0,
    imports: options.Imports = None,
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

    here = launch.check_ranks(ranks, device, imports=imports)
    parameters = checks.check_model(model)
    texts = pipelines or options.DEFAULT_PIPELINES
    syncs = checks.check_pipelines(texts, parameters)
    if here.report:
        checks.check_writable(out, "--out", is_folder=True)
        terminal.echo(f"{report.title(model)}; ranks: {here.count}, steps with each pipeline: {steps}, seed: {seed}\n")
    results = here.run(train, syncs, model, steps, seed, here.device)
    if here.report:
        found = {
            "model": model,
            "data": "scikit-learn digits" if model == "digits" else "the model's own batch",
            "torch": torch.__version__,
            "ranks": here.count,
            "seed": seed,
            "steps": steps,
            "batch_size_per_rank": BATCH_SIZE if model == "digits" else None,
            "parameters": sum(p.numel() for p in parameters.values()),
            "pipelines": results,
        }
        report.show(results)
        picture.write(out, report.CURVES, lambda: report.curves(found), found)
    return 0


def plan(
    context: typer.Context,
    pipelines: options.Pipelines = None,
    model: options.Model = "transformer",
    ranks: Annotated[
        str, typer.Option(metavar="N", help="number of ranks, or those of each group, such as node=8,across=128")
    ] = "8",
    link: Annotated[
        list[str] | None,
        typer.Option(metavar="RATE[:LATENCY]...", help="25gbit:20us, or node=9GB/s,across=1gbit; default: 1gbit"),
    ] = None,
    shards: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="plan a model that FSDP2 shards over N ranks instead")
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, metavar="N", help="with --shards, the number of replicas of the sharded model")
    ] = 1,
    gradients: Annotated[
        str | None,
        typer.Option(metavar="PIPELINE", help="with --shards, the pipeline of gradients: 'quantize(two_shot)'"),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="PIPELINE", help="with --shards, the pipeline of weights: 'quantize(allgather)'"),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="plan step number N instead of a step after all warm-ups"),
    ] = None,
    backward: Annotated[
        float | None,
        typer.Option(
            callback=options.positive, metavar="SECONDS", help="time of backward, to compute the time of a step"
        ),
    ] = None,
    bucket_cap_mb: Annotated[
        float,
        typer.Option(callback=options.positive, metavar="MB", help="MiB of gradients that are sent together"),
    ] = 25.0,
    show: Annotated[bool, typer.Option("--show", help="also print each plan in full")] = False,
    as_json: options.Json = False,
    imports: options.Imports = None,
) -> int:
    """Compute what pipelines would send and take on a cluster.

    Lowers each pipeline for a model and any number of ranks, and compares bytes, collectives, memory and the time of
    communication, computed for each link (latency and bandwidth of a ring). Nothing is run, and no cluster is needed.
    The pipeline "auto" is the choice of sync="auto" there, shown with the plain mean.
    """
    from fnddp.cli import checks, models, plan_report, terminal
    from fnddp.reducers.all_reduce import allreduce
    from fnddp.run.choose import AUTO, choice
    from fnddp.wire.groups import World, within

    links = link or ["1gbit"]
    if shards is not None or gradients or weights or replicas > 1:
        axes = ("shards", "replicas", "gradients", "weights")
        unfit = options.unfit(context, *axes, "pipelines", "model", "link", "as_json", "imports")
        if shards is None or unfit:
            fix = f"remove {', '.join(unfit)}" if unfit else "give --shards N, or --shards 1"
            raise WrongArgument(f"--shards, --replicas, --gradients and --weights plan a model's axes: {fix}")
        checks.check_imports(imports)
        plan_report.show_axes(model, pipelines or [], links, as_json, shards, replicas, gradients, weights)
        return 0
    texts = pipelines or options.DEFAULT_PIPELINES
    if show and as_json:
        raise WrongArgument("--json prints only JSON: remove --show")
    checks.check_imports(imports)
    sizes, by_text = checks.check_sizes(ranks), {text: checks.check_links(text) for text in links}
    parameters = checks.check_model(model, trains=False)
    n = sizes if isinstance(sizes, int) else None
    if AUTO in texts and n is None:
        raise WrongArgument(f"auto needs the ranks of one group, got --ranks {ranks}; name a pipeline")
    with wrong_if(ValueError, option="auto: "):  # a link for other groups
        choices = {name: choice(parameters, on, world_size=n) for name, on in by_text.items() if AUTO in texts}
    taken = {name: each.taken for name, each in choices.items()}
    if choices:
        named = [each for text in texts for each in (taken.values() if text == AUTO else [text])]
        texts = list(dict.fromkeys([*named, repr(allreduce)]))  # compared with the plain mean
    with terminal.progress(f"running {model} without values"):
        arrival = models.arrival(model)
    setting = plan_report.Setting(model, parameters, sizes, by_text, step, backward, bucket_cap_mb, arrival)
    with within(World(size=sizes)):
        syncs = checks.check_pipelines(texts, parameters, runs=False)
    for option, text, given in (("--ranks", ranks, sizes), *(("--link", *each) for each in by_text.items())):
        checks.check_groups(option, text, given, syncs)
    planned = terminal.each("lowering", lambda sync: plan_report.planned(sync, setting), syncs)
    plans, costs = [each for each, _ in planned], [each for _, each in planned]
    if as_json:
        print(json.dumps(plan_report.as_json(setting, costs) | ({"auto": taken} if taken else {}), indent=1))
    else:
        plan_report.show(setting, costs)
        for name, each in choices.items():
            over = f"; {each.compared}. Codecs are taken to be as fast as in the study" if each.costs else ""
            terminal.echo(f'sync="auto" takes {each.taken} on a link of {name}{over}')
        print("".join(f"{each}\n\n" for of_pipeline in plans for each in of_pipeline if show), end="")
    return 0


def bench(
    context: typer.Context,
    pipelines: options.Pipelines = None,
    codecs: Annotated[
        bool,
        typer.Option("--codecs", help="time only encoding and decoding, of the pipelines or of all codecs"),
    ] = False,
    ranks: options.Ranks = None,
    link: options.Link = "loopback",
    against: Annotated[
        str,
        typer.Option(
            metavar="PEER,...",
            help="of ddp, allreduce_hook, fp16_hook, bf16_hook, powersgd_hook, none (nothing is sent)",
        ),
    ] = "ddp,fp16_hook,none",
    model: options.Model = "transformer",
    pairs: Annotated[int, typer.Option(min=1, metavar="N", help="timed rounds")] = 30,
    engine: Annotated[
        Literal["ddp", "register", "value_and_grad"],
        typer.Option(help="how pipelines run: fnddp's DistributedDataParallel, in torch's, or in functional steps"),
    ] = "ddp",
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="compile all steps; pipelines then run in functional ones, whole"),
    ] = False,
    device: options.Device = "cpu",
    out: options.Out = Path("fnddp-bench"),
    seed: options.Seed = 0,
    imports: options.Imports = None,
) -> int:
    """Time training steps with pipelines against torch's own DDP.

    Runs real training steps (forward, loss, backward with synchronization), one arm after the other in each round, on
    ranks that it starts on this machine (or on those of torchrun, SLURM or MPI): each pipeline, and each peer. Compares
    within rounds. The pipeline "auto" is the choice of sync="auto" there. With --link every rank gets a network of its
    own, joined by links of that rate (Linux, root). Writes ratios.png and results.json.
    """
    from fnddp.cli import bench_codecs, bench_rank, bench_report, checks, launch, picture
    from fnddp.core.sync import Sync
    from fnddp.run.choose import AUTO, Auto

    if codecs:
        if left_out := " and ".join(options.unfit(context, "codecs", "pipelines", "device", "imports")):
            raise WrongArgument(f"--codecs times one rank, without a link or a model: remove {left_out}")
        here = launch.check_ranks(None, device, imports=imports, is_shared=True)
        if here.at is not None and here.count > 1:
            raise WrongArgument(f"--codecs times one rank, but {here.at.launcher} has started {here.count}")
        return bench_codecs.run(pipelines or (), here.device)
    here = launch.check_ranks(ranks, device, link, imports, is_shared=True)
    peers, left_out = bench_rank.check_peers(against, here)
    if not pipelines:
        raise WrongArgument("name a pipeline, such as 'fp16(allreduce)', or pass --codecs")
    if here.device != "cpu" and here.link is not None:
        raise WrongArgument(f"--link shapes the traffic of gloo; remove it with --device {here.device}")
    parameters = checks.check_model(model)
    known = iter(checks.check_pipelines([text for text in pipelines if text != AUTO], parameters))
    syncs: list[Sync | Auto] = [AUTO if text == AUTO else next(known) for text in pipelines]
    if AUTO in syncs and (compiled or engine == "value_and_grad"):
        raise WrongArgument("auto works for modules, not for functional steps: choose their pipeline with fnddp.choose")
    if here.report:
        checks.check_writable(out, "--out", is_folder=True)
        print("".join(f"{name} is left out: {reason}\n" for name, reason in left_out.items()), end="", flush=True)
    elements = sum(p.numel() for p in parameters.values())
    setup = bench_rank.Setup(model, syncs, peers, here, elements, engine, compiled, pairs, seed)
    found = here.run(bench_rank.measure, setup)
    if here.report:
        (run,) = found
        bench_report.show(run)
        picture.write(out, bench_report.RATIOS, lambda: bench_report.draw(run), bench_report.as_json(run))
    return 0


def run(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.py", help="a training script, as for torchrun")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENT", show_default=False, help="arguments of the script")
    ] = None,
    link: options.Link = "1gbit",
    ranks: Annotated[int, typer.Option(min=1, metavar="N", help="number of ranks, each on a host of its own")] = 2,
) -> int:
    """Run a training script of your own over a slow link.

    Starts the script once for each rank, with the variables of torchrun. Each rank has a network of its own on this
    machine, with a link of that rate to the others (Linux, root). Prints at the end the time, with that of
    starting processes, and the bytes that each rank has sent over its link.
    """
    import sys
    from time import perf_counter

    from fnddp.cli import launch, network, terminal
    from fnddp.cli import script as of_user
    from fnddp.show.text import count

    if not script.is_file():
        raise WrongArgument(f"there is no script {script}")
    if link == "loopback":
        raise WrongArgument("--link loopback: use torchrun if no slow link is needed, or give one, such as 200mbit")
    launch.check_ranks(ranks, link=link)
    with network.shaped_hosts(ranks, link) as hosts:
        print(f"... starting {count(ranks, 'rank')} over links of {link}", file=sys.stderr, flush=True)
        begin = perf_counter()
        of_user.run(script, arguments or (), hosts)
        seconds = perf_counter() - begin
        each = ", ".join(f"{of_user.sent(host) / 1e6:,.1f} MB by rank {rank}" for rank, host in enumerate(hosts))
    terminal.echo(f"\n{seconds:.1f} s over links of {link}; sent with headers: {each}")
    return 0


def tune(
    pipelines: options.Pipelines = None,
    model: options.Model = "digits",
    data: Annotated[
        Literal["digits", "text", "own"] | None,
        typer.Option(help="scikit-learn's images, Python's help texts, or the model's own batches (the default)"),
    ] = None,
    link: options.Link = "1gbit",
    ranks: Annotated[int, typer.Option(min=1, metavar="N", help="number of virtual ranks")] = 8,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="training steps of each run")] = 150,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="training runs with each pipeline")] = 3,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="samples of a rank in a step, of digits or text; default: 8")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(callback=options.positive, metavar="R", help="learning rate at the start; it falls linearly"),
    ] = None,
    within: Annotated[
        str,
        typer.Option(metavar="P", help="largest acceptable loss above the plain mean's: 0.01, or 1% of it"),
    ] = "0.01",
    own: Annotated[
        bool, typer.Option("--own", help="compare both hops of fnddp.own: a PIPELINE is then 'GRADIENTS, WEIGHTS'")
    ] = False,
    out: options.Out = Path("fnddp-tune"),
    imports: options.Imports = None,
) -> int:
    """Find the fastest pipeline that trains as well as the mean.

    Trains with each pipeline on virtual ranks in this process, predicts a step of each on the link from measured
    encoding and backward, and prints bytes, time and final loss. Always includes the plain mean, 16-bit wires and the
    choice of sync="auto"; pipelines that you name replace the others. Writes results.json and pareto.svg.
    """
    from fnddp.cli import checks, picture, terminal, tune_report
    from fnddp.cli.models import has_one_batch, to_tune
    from fnddp.ir.program import LoweringError
    from fnddp.run.choose import candidates
    from fnddp.simulation import tune as simulated

    parsed = checks.check_link(link)
    with wrong_if(ValueError, option="--"):
        simulated.most_of(within)
    checks.check_writable(out, "--out", is_folder=True)
    checks.check_imports(imports)
    parameters = checks.check_model(model, trains=False)
    texts = pipelines or (simulated.CANDIDATES_OF_HOPS if own else simulated.CANDIDATES)
    is_nobodys = model in options.MODELS and not pipelines  # these models' losses are not a user's
    safe = {simulated.OWNERS.plain, *simulated.OWNERS.halves} if own else candidates("none")
    if own:
        with wrong_if(TypeError, ValueError):
            checked = [simulated.text_of(simulated.way_of(text, own=True)) for text in texts]
    else:
        checked = [*map(repr, checks.check_pipelines(texts, parameters))]
    on = ("digits" if model == "digits" else "its own batches") if data in (None, "own") else data
    size = None if on == "its own batches" else batch or 8
    if batch and size is None:
        raise WrongArgument(f"--batch {batch}: {model} has batches of its own; change their size there, or give --data")
    setting = {"model": model, "data": on, "link": link, "ranks": ranks, "steps": steps, "seeds": seeds, "batch": size}
    setting["own"] = own

    def keep(tuned: simulated.Tuned, trained: int) -> None:
        picture.write_results(out, tune_report.as_json(tuned, {**setting, "seeds": trained}))

    with terminal.progress(f"loading {model} and its data") as show:
        asked = to_tune(model, data, batch=size or 0, ranks=ranks, steps=steps, rate=rate)
        setting["one_batch"] = has_one_batch(asked)
        with wrong_if(ValueError, LoweringError):
            tuned = simulated.tune(
                asked,
                checked,
                own=own,
                link=parsed,
                ranks=ranks,
                steps=steps,
                seeds=range(seeds),
                within=within,
                among=safe if is_nobodys else None,
                tell=show,
                found=keep,
            )
    tune_report.show(tuned, setting)
    found = tune_report.as_json(tuned, setting)
    picture.write(out, tune_report.PLOT, lambda: tune_report.plot(tuned, setting), found)
    return 0


def trace(
    pipeline: Annotated[str, typer.Argument(metavar="PIPELINE", help="for example 'fp16(allreduce)'")],
    model: options.Model = "transformer",
    ranks: options.Ranks = None,
    link: options.Link = "loopback",
    out: options.Out = Path("fnddp-step.json"),
    seed: options.Seed = 0,
    imports: options.Imports = None,
) -> int:
    """Record a step and predict it, for ui.perfetto.dev.

    Trains on ranks that it starts on this machine (or on those of torchrun, SLURM or MPI), records one step of the
    first rank with torch's profiler, and predicts the same step from its plan, with the link, backward, encoding and
    decoding measured just before. Both are in one file, from the same moment on.
    """
    from fnddp.cli import checks, examination, launch

    here = launch.check_ranks(ranks, link=link, imports=imports)
    (sync,) = checks.check_pipelines([pipeline], checks.check_model(model))
    checks.check_writable(out, "--out")
    found = here.run(examination.record, sync, model, seed)
    if here.report:
        timelines, table = found[0]
        out.write_text(timelines)
        table.show()
        print(f"Wrote {out}: open it at https://ui.perfetto.dev")
    return 0


def doctor(
    ranks: options.Ranks = None,
    model: options.Model = "transformer",
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> int:
    """Check what is installed, ranks and their links.

    Checks versions, starts ranks on this machine (or uses those of torchrun, SLURM or MPI), compares versions and the
    bits of means between them, measures their links, and predicts a step of the model with several pipelines. Prints
    whether compression can pay here, and exits with 1 if ranks disagree.
    """
    from fnddp.cli import checks, examination, launch, terminal

    here = launch.check_ranks(ranks, device)
    checks.check_model(model)
    if here.report and not as_json:
        terminal.echo("\n".join(examination.installed()))
    try:
        found = here.run(examination.examine, model, here.device)[0]
    except launch.RankError:
        raise
    except (OSError, RuntimeError) as error:
        raise launch.RankError(f"{error}\n{launch.HINT}") from error
    if here.report and as_json:
        print(json.dumps(examination.as_json(found, here.device), indent=1))
    elif here.report:
        examination.show(found, here, model)
    return 0 if found.is_sound else FAILED
