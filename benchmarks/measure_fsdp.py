"""Measures steps of HSDP and of pipelines between its replicas, and prints fsdp-runs.md's table. Needs root.

python benchmarks/measure_fsdp.py [rate ...]  # 200mbit 1gbit: two hosts, two shards on each, one link between them
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fnddp.cli.launch import run_ranks
from fnddp.cli.network import INTERFACE, sent_bytes, shaped_hosts
from fnddp.integrations.fsdp import compress_replicas

NATIVE = "HSDP of torch"
SYNCS = ("allreduce", "bf16(allreduce)", "bf16(two_shot)", "error_feedback(powersgd(bf16(allreduce), rank=4))")
WIDTH, LAYERS, BATCH = 512, 12, 32
WARM_UP, STEPS = 3, 7
HOSTS, SHARDS = 2, 2


def make(sync: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (HOSTS, SHARDS), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    over = mesh if sync == NATIVE else mesh["shard"]
    for layer in layers:
        fully_shard(layer, mesh=over)
    model = fully_shard(nn.Sequential(*layers), mesh=over)
    if sync != NATIVE:
        compress_replicas(model, sync, mesh["replicate"])
    return model


def step(model: nn.Module, x: Tensor) -> tuple[float, int]:
    """Its time, and what this host has sent to the other one."""
    dist.barrier()
    sent, begun = sent_bytes(INTERFACE), time.perf_counter()
    model(x).square().mean().backward()
    dist.barrier()
    took = time.perf_counter() - begun
    model.zero_grad()
    return took, sent_bytes(INTERFACE) - sent


def rank_steps() -> Iterator[tuple[str, float, int]]:
    torch.set_num_threads(1)
    models = {sync: make(sync) for sync in (NATIVE, *SYNCS)}
    x = torch.randn(BATCH, WIDTH)
    for number in range(WARM_UP + STEPS):
        for sync, model in models.items():  # in turn, so that what else runs here meets all alike
            took, sent = step(model, x)
            if number >= WARM_UP:
                yield sync, took, sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rates", nargs="*", default=["200mbit", "1gbit"])
    rates: list[str] = parser.parse_args().rates
    measured: dict[tuple[str, str], list[Any]] = {}
    for rate in rates:
        with shaped_hosts(HOSTS, rate) as hosts:
            each = [host for host in hosts for _ in range(SHARDS)]
            for sync, took, sent in run_ranks(HOSTS * SHARDS, rank_steps, hosts=each):
                measured.setdefault((rate, sync), []).append((took, sent))
    print(f"| between replicas | {' | '.join(f'{r}: ms/step | of HSDP | MB sent' for r in rates)} |")
    print(f"|---|{'--:|' * 3 * len(rates)}")
    for sync in (NATIVE, *SYNCS):
        cells: list[str] = []
        for rate in rates:
            took = statistics.median(t for t, _ in measured[rate, sync])
            ratio = statistics.median(
                t / native for (t, _), (native, _) in zip(measured[rate, sync], measured[rate, NATIVE], strict=True)
            )
            sent = statistics.median(s for _, s in measured[rate, sync])
            cells.append(f"{1000 * took:,.0f} | {ratio:.2f} | {sent / 1e6:.2f}")
        print(f"| `{sync}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
