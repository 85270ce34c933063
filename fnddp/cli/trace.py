"""`fnddp trace`: one step as it was, beside the same step as its plan predicts it."""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import fnddp
from fnddp.cli import launcher, lessons, terminal
from fnddp.cli.checks import check_folder, check_imports, check_link, check_pipeline
from fnddp.cli.examination import Stage
from fnddp.cli.launcher import Place, check_ranks, on_ranks
from fnddp.cli.network import shaped_hosts
from fnddp.columns import columns
from fnddp.cost.compute import measure_backward, measure_segments
from fnddp.cost.link import Link, duration
from fnddp.cost.measure import measure_link
from fnddp.cost.step import Step
from fnddp.run.stats import SyncStats
from fnddp.show.beside import STEP, beside
from fnddp.sync import Sync

WARM_UP = 3  # steps: the first one learns the order of gradients, the second one follows it


@dataclass(frozen=True)
class Recorded:
    """A step, measured and predicted.

    Attributes:
        trace: Both timelines, as JSON.
        seconds: What the step took with torch's profiler watching.
        stats: What its synchronization took of that.
        link: As measured; None in a world of one.
        predicted: The step on that link.
    """

    trace: str
    seconds: float
    stats: SyncStats
    link: Link | None
    predicted: Step


def run(
    pipeline: str,
    *,
    model: str,
    ranks: int | None,
    link: str | None,
    out: Path,
    seed: int,
    imports: Sequence[str],
) -> int:
    """Records a step with `pipeline`, and writes it to `out` beside the predicted one.

    Args:
        pipeline: As `fnddp.parse` reads it.
        model: As `fnddp.cli.lessons.lesson` takes it.
        ranks: Number of processes to start; None for 2, or for those that a launcher has started.
        link: Each rank's link, as `Link.parse` reads it; None for the network as it is.
        out: Where the trace goes.
        seed: Of initial parameters and batches.
        imports: Modules that register transforms.

    Returns:
        The exit code of the command.
    """

    def work(at: Place | None) -> int:
        count = check_ranks(ranks, at)
        if link is not None:
            check_link(link)
            launcher.check_no_link(at)
        check_imports(imports)
        sync = check_pipeline(pipeline, lessons.parameters(model))
        check_folder(out.parent)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13 says that a profile starts, and ends
        with ExitStack() as stack:
            hosts = stack.enter_context(shaped_hosts(count, link)) if link else []
            events = on_ranks(at, count, record, sync, model, seed, hosts=hosts, imports=imports)
            recorded = _last(stack.enter_context(closing(events)))
        if launcher.reports(at):
            assert recorded is not None
            out.write_text(recorded.trace)
            print(_told(recorded))
            print(f"Wrote {out}: open it at https://ui.perfetto.dev")
        return 0

    return launcher.at_place("trace", work)


def record(sync: Sync, name: str, seed: int) -> Iterator[Stage | Recorded]:
    """Trains a few steps of the lesson `name`, and records one. All ranks must do so.

    Raises:
        TypeError: `sync` has no plan.
    """
    torch.set_num_threads(1)  # ranks share a machine
    rank, world_size = dist.get_rank(), dist.get_world_size()
    learnt = lessons.lesson(name, seed=seed, rank=rank, world_size=world_size)
    leaves = learnt.initial
    generator = torch.Generator().manual_seed(seed * world_size + rank)
    yield Stage("measuring the link")
    link = measure_link() if world_size > 1 else None
    yield Stage("timing backward")
    compute = measure_backward(learnt.loss, leaves, *learnt.batch(generator))
    model = fnddp.DistributedDataParallel(learnt.model, sync=sync)
    model.sync_stats()  # from now on it measures

    def step() -> None:
        learnt.objective(model, learnt.batch(generator)).backward()
        model.zero_grad()

    yield Stage("warming up")
    for _ in range(WARM_UP):
        step()
    if model.plan is None:
        raise TypeError(f"{sync!r} reads values or runs foreign code, so it has no plan to predict a step from")
    compute = replace(compute, segments=measure_segments(model.plan, model.sync_state))
    yield Stage("recording")
    dist.barrier()
    measured, seconds = _profiled(step)
    on = link or Link(math.inf)
    trace = beside(measured, model.plan.to_trace(on, compute))
    yield Recorded(trace, seconds, model.sync_stats(), link, model.plan.predict(on, compute))


def _profiled(step: Callable[[], None]) -> tuple[str, float]:
    """What torch's profiler has recorded of `step`, and how long it took."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(STEP):
        begin = time.perf_counter()
        step()
        seconds = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "step.json")
        profiler.export_chrome_trace(str(file))
        return file.read_text(), seconds


def _last(events: Iterator[Stage | Recorded]) -> Recorded | None:
    recorded: Recorded | None = None
    with terminal.status() as status:
        for event in events:
            if isinstance(event, Stage):
                status.show(event.text)
            else:
                recorded = event
    return recorded


def _told(recorded: Recorded) -> str:
    stats, step = recorded.stats, recorded.predicted
    pairs = {
        "step": (recorded.seconds, step.seconds),
        "encode": (stats["encode_seconds"], step.encode_seconds),
        "decode": (stats["decode_seconds"], step.decode_seconds),
        "exposed": (stats["exposed_seconds"], step.exposed_seconds),
    }
    rows = [(name, duration(measured or 0.0), duration(predicted)) for name, (measured, predicted) in pairs.items()]
    link = "one rank" if recorded.link is None else f"link {recorded.link}"
    predicted = "predicted: from what all ranks have measured at once, before that step"
    return f"{columns([('', 'measured', 'predicted'), *rows])}\n{predicted}\n{link}; wire {stats['wire_bytes']:,} B"
