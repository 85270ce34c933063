"""Measure what the first steps of a training cost, in CPU seconds of one rank, a process for each arm.

    python benchmarks/first_steps.py torch allreduce "error_feedback(powersgd(bf16(allreduce), rank=4))"

The model has the 604 leaves of a DenseNet-201; `--model deep` has the 384 of `fnddp bench --model deep`. To compare two
states of the library, call it for both in turn, with PYTHONPATH.
"""

import argparse
import subprocess
import sys
import tempfile
from itertools import pairwise
from time import process_time

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Layer(nn.Sequential):
    def __init__(self, channels: int) -> None:
        before, after = nn.Conv2d(channels, 128, 1, bias=False), nn.Conv2d(128, 32, 3, padding=1, bias=False)
        super().__init__(nn.BatchNorm2d(channels), nn.ReLU(), before, nn.BatchNorm2d(128), nn.ReLU(), after)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(x)], 1)


def dense() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels = 64
    for block, n in enumerate((6, 12, 48, 32)):
        if block:
            layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False)]
            layers.append(nn.AvgPool2d(2))
            channels //= 2
        layers += [Layer(channels + 32 * i) for i in range(n)]
        channels += 32 * n
    layers += [nn.BatchNorm2d(channels), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return nn.Sequential(*layers), torch.randn(2, 3, 32, 32)


def deep() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0, batch_first=True)
    return nn.TransformerEncoder(layer, 32, enable_nested_tensor=False), torch.randn(1, 4, 128)


def measure(model: str, arm: str) -> None:
    net, x = {"dense": dense, "deep": deep}[model]()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        times = [process_time()]
        if arm == "torch":
            times.append(process_time())
            wrapped: nn.Module = nn.parallel.DistributedDataParallel(net)
        else:
            import fnddp

            sync = fnddp.parse(arm)
            times.append(process_time())
            wrapped = fnddp.DistributedDataParallel(net, sync=sync)
        times.append(process_time())
        for _ in range(4):
            wrapped(x).square().mean().backward()
            wrapped.zero_grad()
            times.append(process_time())
        print(*(f"{after - before:6.2f}" for before, after in pairwise(times)), f" {arm}", flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+")
    parser.add_argument("--model", choices=["dense", "deep"], default="dense")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        torch.set_num_threads(1)
        measure(options.model, options.arms[0])
    else:
        print("import   wrap step 1 step 2 step 3 step 4  arm")
        for arm in options.arms:
            subprocess.run([sys.executable, __file__, "--here", "--model", options.model, arm], check=True)
