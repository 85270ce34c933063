"""What a step under torchft costs: the quorum, forward and backward, and the commit, on two replicas of the digits MLP.

python -m tests.soak.cost
"""

import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fnddp
from fnddp.cli import digits
from tests.replica import Training, new_manager
from tests.replicas import Job
from tests.soak.kills import wrap_torchft

STEPS, WARM_UP, BATCH = 300, 20, 32
PIPELINES = ("allreduce", "error_feedback(powersgd(fp16(allreduce), rank=2))")
PARTS = ("quorum", "forward and backward", "commit")


def time_steps(name: str, address: str, folder: Path, options: Mapping[str, Any]) -> None:
    from torchft import Optimizer

    from fnddp.integrations.torchft import DistributedDataParallel

    training = Training(0)
    training.net = net = digits.make_model(seed=0)  # pyright: ignore[reportAttributeAccessIssue]
    training.optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    manager = new_manager(name, address, training, **options.get("manager", {}))
    wrap = options.get("wrap")
    model = wrap(manager, net, {}) if wrap else DistributedDataParallel(manager, net, sync=fnddp.parse(options["sync"]))
    optimizer = Optimizer(manager, training.optimizer)
    x, y = digits.load()[0].batch(BATCH, torch.Generator().manual_seed(0))
    (folder / f"{name}.ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)
    took: dict[str, list[float]] = {part: [] for part in PARTS}
    while manager.current_step() < STEPS:
        times = [time.perf_counter()]
        optimizer.zero_grad()
        times.append(time.perf_counter())
        nn.functional.cross_entropy(model(x), y).backward()
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        for part, begun, ended in zip(PARTS, times, times[1:], strict=False):
            took[part].append(ended - begun)
    medians = {part: 1000 * statistics.median(each[WARM_UP:]) for part, each in took.items()}
    (folder / f"{name}.json").write_text(json.dumps(medians))
    manager.shutdown(wait=False)


def measured(**options: Any) -> dict[str, float]:
    """Milliseconds, the median of a replica's steps."""
    with Job(2, run=time_steps, **options) as job:
        job.begin({})
        job.wait_for(lambda: all(p.exitcode is not None for p in job.processes.values()), "to be timed")
        job.require_none_failed()
        return json.loads((job.path / "r0.json").read_text())


def main() -> None:
    arms = {"torchft's own class, allreduce": {"wrap": wrap_torchft}, **{sync: {"sync": sync} for sync in PIPELINES}}
    for repeat in range(2):
        for name, options in arms.items():
            said = ", ".join(f"{part} {ms:.2f} ms" for part, ms in measured(**options).items())
            print(f"{repeat}: {name}: {said}", flush=True)


if __name__ == "__main__":
    main()
