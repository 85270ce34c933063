"""`fnddp plan`: what pipelines would send and take, from their plans alone. Nothing is run, and nothing is sent."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from fnddp.cli import plan_report, terminal
from fnddp.cli.checks import check_file, check_groups, check_imports, check_links, check_pipeline, check_sizes
from fnddp.cli.failures import FAILED, INTERRUPTED, WRONG_ARGUMENTS, WrongArgument, stop
from fnddp.cli.models import ModelError, load
from fnddp.cli.plan_report import Planned, Setting
from fnddp.cost.step import Compute
from fnddp.plan.lower import lower
from fnddp.plan.period import period
from fnddp.plan.plan import Plan
from fnddp.plan.world import planned_world
from fnddp.state import at_step
from fnddp.sync import Sync
from fnddp.wire.groups import World, within


def run(
    pipelines: Sequence[str],
    *,
    model: str,
    ranks: str,
    links: Sequence[str],
    step: int | None,
    backward: float | None,
    bucket_cap_mb: float,
    show: bool,
    json: bool,
    svg: Path | None,
    trace: Path | None,
    imports: Sequence[str],
) -> int:
    """Lowers each of `pipelines` for ranks that need not exist, and prints what they would send and take.

    Args:
        pipelines: As `fnddp.parse` reads them.
        model: As `fnddp.cli.models.load` takes it.
        ranks: Number of ranks to plan for: see `check_sizes`.
        links: See `check_links`.
        step: What the counters of the state are set to; None for what is repeated after all warm-ups.
        backward: Seconds that backward takes, for collectives to hide behind; None to hide nothing.
        bucket_cap_mb: Gradients in a bucket, MiB.
        show: Print each plan in full, too.
        json: Print JSON, and nothing else.
        svg: Where to write the timeline of the plan, of which there is one, on one link; where steps are not alike,
            of those that send most.
        trace: Where to write the predicted step of that plan, for Perfetto.
        imports: Modules that register transforms.

    Returns:
        The exit code of the command.
    """
    try:
        files = {option: file for option, file in (("--svg", svg), ("--trace", trace)) if file is not None}
        if files and max(len(pipelines), len(links)) > 1:
            draw = "draws" if len(files) == 1 else "draw"
            raise WrongArgument(f"{' and '.join(files)} {draw} the plan of one pipeline on one link: give one of each")
        for option, file in files.items():
            check_file(option, file)
        check_imports(imports)
        sizes, by_text = check_sizes(ranks), {text: check_links(text) for text in links}
        setting = Setting(model, check_model(model), sizes, by_text, step, backward, bucket_cap_mb)
        with within(World(size=sizes)):
            syncs = [check_pipeline(text, setting.parameters) for text in pipelines]
        for option, text, given in (("--ranks", ranks, sizes), *(("--link", *each) for each in by_text.items())):
            check_groups(option, text, given, syncs)
        planned = [Planned.of(plans, setting) for plans in _plans(syncs, setting)]
        link, compute = setting.links[links[0]], Compute(backward_seconds=backward or 0.0)
        plan = planned[0].busiest
        drawn = {"--svg": plan.to_svg(link) if svg else "", "--trace": plan.to_trace(link, compute) if trace else ""}
        for option, file in files.items():
            file.write_text(drawn[option])
        if json:
            print(plan_report.as_json(setting, planned))
        else:
            plan_report.show(setting, planned, in_full=show)
        return 0
    except (WrongArgument, ModelError) as error:
        return stop("plan", WRONG_ARGUMENTS, error)
    except OSError as error:
        return stop("plan", FAILED, error)
    except KeyboardInterrupt:
        return stop("plan", INTERRUPTED, "interrupted")


def check_model(name: str) -> dict[str, Tensor]:
    """The parameters of the model `name`, without values.

    Raises:
        ModelError: There is no such model.
        WrongArgument: Nothing in it is trained.
    """
    parameters = load(name).parameters()
    if not parameters:
        raise WrongArgument(f"{name} has no parameters that require gradients: there is nothing to synchronize")
    return parameters


def _plans(syncs: Sequence[Sync], setting: Setting) -> Iterator[list[tuple[Plan, int]]]:
    with terminal.status() as status:
        for i, sync in enumerate(syncs, start=1):
            status.show(f"plan {i} of {len(syncs)}")  # seconds each, for a large model
            yield _plan(sync, setting)


def _plan(sync: Sync, setting: Setting) -> list[tuple[Plan, int]]:
    ranks, cap = World(size=setting.ranks).size_of(sync.groups), setting.bucket_cap_mb
    try:
        if setting.step is None:
            recurring = period(sync, setting.parameters, world_size=ranks, bucket_cap_mb=cap)
            return [(each.plan, each.steps) for each in recurring]
        with within(planned_world(sync, sync.groups, ranks)):
            state = at_step(setting.step, sync.init(setting.parameters))
        return [(lower(sync, setting.parameters, state=state, world_size=ranks, bucket_cap_mb=cap), 1)]
    except (TypeError, ValueError) as error:  # a LoweringError is a TypeError
        raise WrongArgument.of(error) from error
