"""Time steps on an accelerator, eager and captured in a graph, of torch's class and of ours, and compare their bits.

Models are leaves without a network, 64 by 64 each, so that a step waits for its host. One rank, or those of torchrun:

    python benchmarks/captured_steps.py [--device cuda] [--leaves 148 384]

`host` is the median time until the call of a step returns, with the device idle at its begin; `step` is the mean of 50
steps in a row, until the device has done them. Variants take turns.
"""

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import device as devices
from fnddp.laws import bits

STEPS = 50
WARMUP = 11  # steps that torch's class times
PIPELINES = ["allreduce", "quantize(two_shot)", "error_feedback(powersgd(bf16(allreduce), rank=4))"]


class Leaves(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.leaves = nn.ParameterList([nn.Parameter(torch.randn(64, 64, generator=generator)) for _ in range(n)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(leaf * x).square().mean() for leaf in self.leaves]).sum()


def made(n: int, device: Any, text: str | None) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return a model, wrapped on a side stream, and its step. Without a pipeline it is of torch's class."""
    net = Leaves(n).to(device)
    with torch.Stream(device):
        model: Any = TorchDDP(net) if text is None else fnddp.DistributedDataParallel(net, sync=text)
    torch.accelerator.synchronize()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return net, step


def batches(device: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(64, 64, generator=generator).to(device) for _ in range(WARMUP + STEPS)]


def is_equal(n: int, device: Any, text: str) -> bool:
    """Return whether 50 captured steps give the bits of 50 eager ones."""
    ends: list[Any] = []
    for captures in (False, True):
        net, step = made(n, device, text)
        run: Any = fnddp.make_graphed_callable(step, WARMUP) if captures else step
        losses = [run(x) for x in batches(device)]
        ends.append(bits([losses, dict(net.named_parameters())]))
        if captures:
            run.release()
    return ends[0] == ends[1]


def times(n: int, device: Any) -> None:
    x, runs = batches(device)[0], dict[str, Any]()
    for name, text in (("torch DDP", None), ("fnddp", "allreduce")):
        runs[name] = made(n, device, text)[1]
        runs[f"{name}, captured"] = fnddp.make_graphed_callable(made(n, device, text)[1], WARMUP)
    for run in runs.values():
        for _ in range(WARMUP + 2):
            run(x)
    hosts: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(25):
        for name, run in runs.items():
            torch.accelerator.synchronize()
            begun = time.perf_counter()
            run(x)
            hosts[name].append(time.perf_counter() - begun)
    for name, run in runs.items():
        torch.accelerator.synchronize()
        begun = time.perf_counter()
        for _ in range(STEPS):
            run(x)
        torch.accelerator.synchronize()
        whole = (time.perf_counter() - begun) / STEPS
        if dist.get_rank() == 0:
            print(f"| {n} | {name} | {median(hosts[name]) * 1e3:.2f} | {whole * 1e3:.2f} |")
    for run in runs.values():
        if isinstance(run, fnddp.make_graphed_callable):
            run.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--leaves", type=int, nargs="+", default=[148, 384])
    options = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    devices.select(options.device, rank, ranks)
    device = devices.current(options.device)
    store = None if "RANK" in os.environ else dist.HashStore()
    dist.init_process_group(devices.device_of(device).backend, rank=rank, world_size=ranks, store=store)
    failed = False
    for text in PIPELINES:
        is_same = is_equal(min(options.leaves), device, text)
        failed |= not is_same
        if rank == 0:
            print(f"{text}: {STEPS} captured steps {'have' if is_same else 'DO NOT have'} the bits of eager ones")
    if rank == 0:
        print("\n| leaves | | ms of host | ms of a step |\n|--:|---|--:|--:|")
    for n in options.leaves:
        times(n, device)
    dist.destroy_process_group()
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
