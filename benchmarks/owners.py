"""Sharded optimizers against the whole optimizer on every rank: seconds of a step, state and memory of a rank, bytes.

python benchmarks/owners.py --ranks 1 2 4 --width 512 --layers 6 --steps 8
python benchmarks/owners.py --ranks 2 4 --link 200mbit    # over a slow link, as root

Ranks are processes of one thread each, on gloo, on this machine: with more ranks than cores, a step's time says little.
"""

import argparse
import os
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fnddp
from fnddp.cli.launch import run_ranks
from fnddp.cli.network import sent_bytes, shaped_hosts

MIB = 2**20

FEW_BITS = "error_feedback(quantize(two_shot, bits=4))", "ef21(quantize(allgather, bits=4))"
MODES = {"everywhere": None, "owners": ("two_shot", "allgather"), "owners, 4 bits": FEW_BITS}


def net(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    block = [nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)]
    return nn.Sequential(*[type(each)(*_arguments(each)) for _ in range(layers) for each in block])


def _arguments(layer: Any) -> tuple[Any, ...]:
    return (layer.in_features, layer.out_features, False) if isinstance(layer, nn.Linear) else ()


def measure(optimizer: str, mode: str, args: argparse.Namespace) -> Iterator[list[float]]:
    """Yield the most of all ranks: seconds of a step and of the optimizer's, MiB of state, of memory, and sent."""
    torch.set_num_threads(1)
    rank, n, interface = dist.get_rank(), dist.get_world_size(), os.environ["GLOO_SOCKET_IFNAME"]
    module = net(args.width, args.layers)
    made = getattr(torch.optim, optimizer)(module.parameters(), lr=1e-3)
    hops = MODES[mode]
    model: Any = nn.parallel.DistributedDataParallel(module) if hops is None else fnddp.own(module, made, *hops)
    steps: list[float] = []
    of_optimizer: list[float] = []
    sent = 0.0
    for step in range(args.steps + 2):
        x = torch.randn(args.batch, args.width, generator=torch.Generator().manual_seed(100 * rank + step))
        dist.barrier()
        begin, before = time.perf_counter(), sent_bytes(interface)
        model(x).square().mean().backward()
        between = time.perf_counter()
        made.step()
        made.zero_grad()
        end = time.perf_counter()
        if step > 1:  # the first ones lower plans
            steps.append(end - begin)
            of_optimizer.append(end - between)
            dist.barrier()
            sent += sent_bytes(interface) - before
    state = sum(v.numel() * v.element_size() for s in made.state.values() for v in s.values() if torch.is_tensor(v))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    if args.link is None:  # ranks share the loopback device
        sent = sent // n
    of_rank = [
        statistics.median(steps),
        statistics.median(of_optimizer),
        state / MIB,
        peak / MIB,
        sent / MIB / args.steps,
    ]
    every = [torch.empty(len(of_rank), dtype=torch.float64) for _ in range(n)]
    dist.all_gather(every, torch.tensor(of_rank, dtype=torch.float64))
    yield torch.stack(every).amax(0).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--optimizers", nargs="+", default=["Muon", "AdamW"])
    parser.add_argument("--link", help="of each rank, in a network namespace of its own, which needs root: 200mbit")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    count = sum(p.numel() for p in net(args.width, args.layers).parameters())
    print(f"{count:,} parameters, torch {torch.__version__}, link {args.link or 'loopback'}")
    print(
        "| optimizer | ranks | | ms a step | ms of optimizer.step | MiB of state, largest | peak RSS, MiB | MiB sent |"
    )
    print("|---|--:|---|--:|--:|--:|--:|--:|")
    for optimizer in args.optimizers:
        for n in args.ranks:
            with nullcontext(()) if args.link is None else shaped_hosts(n, args.link) as hosts:
                for mode in MODES:
                    (most,) = run_ranks(n, measure, optimizer, mode, args, hosts=hosts)
                    times = " | ".join(f"{1e3 * seconds:.0f}" for seconds in most[:2])
                    sizes = " | ".join(f"{size:.1f}" for size in most[2:])
                    print(f"| {optimizer} | {n} | {mode} | {times} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
