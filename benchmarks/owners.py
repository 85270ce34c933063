"""Sharded optimizers against the whole optimizer on every rank: seconds of a step, state and memory of a rank, bytes.

python benchmarks/owners.py --ranks 1 2 4 --width 512 --layers 6 --steps 8

Ranks are processes of one thread each, on gloo, on this machine: with more ranks than cores, a step's time says little.
"""

import argparse
import resource
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import fnddp

FEW_BITS = "error_feedback(quantize(two_shot, bits=4))", "ef21(quantize(allgather, bits=4))"
MODES = {"everywhere": None, "owners": ("two_shot", "allgather"), "owners, 4 bits": FEW_BITS}


def net(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    block = [nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)]
    return nn.Sequential(*[type(each)(*_arguments(each)) for _ in range(layers) for each in block])


def _arguments(layer: Any) -> tuple[Any, ...]:
    return (layer.in_features, layer.out_features, False) if isinstance(layer, nn.Linear) else ()


def measure(rank: int, n: int, port: int, optimizer: str, mode: str, args: Any, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n)
    module = net(args.width, args.layers)
    made = getattr(torch.optim, optimizer)(module.parameters(), lr=1e-3)
    hops = MODES[mode]
    model: Any = nn.parallel.DistributedDataParallel(module) if hops is None else fnddp.own(module, made, *hops)
    steps: list[float] = []
    of_optimizer: list[float] = []
    for step in range(args.steps + 2):
        x = torch.randn(args.batch, args.width, generator=torch.Generator().manual_seed(100 * rank + step))
        dist.barrier()
        begin = time.perf_counter()
        model(x).square().mean().backward()
        between = time.perf_counter()
        made.step()
        made.zero_grad()
        end = time.perf_counter()
        if step > 1:  # the first ones lower plans
            steps.append(end - begin)
            of_optimizer.append(end - between)
    state = sum(v.numel() * v.element_size() for s in made.state.values() for v in s.values() if torch.is_tensor(v))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    plans = [model.plan, *model.weight_plans] if hops is not None else []
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    sent = sum(plan.link_bytes for plan in plans if plan is not None) if hops else 2 * (n - 1) / n * size
    results.put((rank, statistics.median(steps), statistics.median(of_optimizer), state / 2**20, peak, sent / 2**20))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--optimizers", nargs="+", default=["Muon", "AdamW"])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    count = sum(p.numel() for p in net(args.width, args.layers).parameters())
    print(f"{count:,} parameters, torch {torch.__version__}")
    print(
        "| optimizer | ranks | | ms a step | ms of optimizer.step | MiB of state, largest | peak RSS, MiB | MiB sent |"
    )
    print("|---|--:|---|--:|--:|--:|--:|--:|")
    context = mp.get_context("spawn")
    for optimizer in args.optimizers:
        for n in args.ranks:
            for mode in MODES:
                results = context.Queue()
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                port = store.port
                del store
                mp.spawn(measure, (n, port, optimizer, mode, args, results), n)
                rows = [results.get() for _ in range(n)]
                worst = [max(row[i] for row in rows) for i in range(1, 6)]
                times = " | ".join(f"{1e3 * seconds:.0f}" for seconds in worst[:2])
                sizes = " | ".join(f"{size:.1f}" for size in worst[2:])
                print(f"| {optimizer} | {n} | {mode} | {times} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
