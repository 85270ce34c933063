"""The ranks' part of `fnddp trace`: run a step, record it, and predict the same step from its plan."""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import fnddp
from fnddp.cli.launch import Stage
from fnddp.cli.models import load
from fnddp.cli.terminal import Table
from fnddp.core.sync import Sync
from fnddp.cost.link import Link, duration
from fnddp.cost.measure import measure_link
from fnddp.run.measure import measure_backward, measure_segments
from fnddp.show.beside import STEP, beside
from fnddp.simulate.tune import trained

WARM_UP = 3  # steps: the first one learns the order of gradients, the second one follows it


def record(sync: Sync, name: str, seed: int) -> Iterator[Stage | tuple[str, Table]]:
    """Train a few steps of the problem `name`, and yield one, measured and predicted, as JSON and as a table."""
    torch.set_num_threads(1)  # ranks share a machine
    rank, world_size = dist.get_rank(), dist.get_world_size()
    problem = load(name)
    network = problem.make(seed)
    generator = torch.Generator().manual_seed(seed * world_size + rank)
    yield Stage("measuring the link")
    link = measure_link() if world_size > 1 else None
    yield Stage("timing backward")
    batch = problem.batch(rank, world_size, generator)
    compute = measure_backward(problem.loss_of(network), trained(network), *batch)
    model = fnddp.DistributedDataParallel(network, sync=sync)
    model.sync_stats()  # from now on it measures

    def step() -> None:
        problem.loss(model, problem.batch(rank, world_size, generator)).backward()
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
    stats, predicted = model.sync_stats(), model.plan.predict(on, compute)
    pairs = {
        "step": (seconds, predicted.seconds),
        "encode": (stats["encode_seconds"], predicted.encode_seconds),
        "decode": (stats["decode_seconds"], predicted.decode_seconds),
        "exposed": (stats["exposed_seconds"], predicted.exposed_seconds),
    }
    rows = [(name, *(duration(each or 0.0) for each in pair)) for name, pair in pairs.items()]
    legend = {"predicted": "from what all ranks have measured at once, before that step"}
    note = f"{f'link {link}' if link else 'one rank'}; wire {stats['wire_bytes']:,} B"
    table = Table("part", {"measured": 2, "predicted": 1}, rows, legend, note)
    yield beside(measured, model.plan.to_trace(on, compute)), table


def _profiled(step: Callable[[], None]) -> tuple[str, float]:
    """Return the trace that torch's profiler makes of `step`, and the seconds that it took."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13 prints that a profile starts, and ends
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(STEP):
        begin = time.perf_counter()
        step()
        seconds = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "step.json")
        profiler.export_chrome_trace(str(file))
        return file.read_text(), seconds
