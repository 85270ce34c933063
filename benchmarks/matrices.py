"""Seconds of Muon's step on FSDP2's shards: one message of all matrices against several, of which some are under way.

    python benchmarks/matrices.py --ranks 2 --caps 1e9 0.06 1e9    # MiB; the last one shows the noise

Steps are interleaved, and each is compared with that of the first cap beside it. Ranks are processes of one thread
each, on gloo, on this machine.
"""

import argparse
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fnddp.integrations.fsdp import own_matrices

WIDTHS = [128, 64, 192, 64, 32, 192, 64, 128, 64, 128, 64, 128, 64, 128]  # several shapes, most of them twice


def measure(rank: int, n: int, port: int, args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n)
    mesh = init_device_mesh("cpu", (n,))
    made: list[tuple[nn.Module, torch.optim.Optimizer]] = []
    for cap in args.caps:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS)])
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        muon = torch.optim.Muon(model.parameters(), lr=0.02)
        own_matrices(model, muon, bucket_cap_mb=cap)
        made.append((model, muon))
    times: list[list[float]] = [[] for _ in made]
    for step in range(args.steps + 2):
        for (model, muon), of in zip(made, times, strict=True):
            model(torch.randn(4, WIDTHS[0])).square().mean().backward()
            dist.barrier()
            begin = time.perf_counter()
            muon.step()
            dist.barrier()
            if step > 1:
                of.append(time.perf_counter() - begin)
            muon.zero_grad()
    for cap, of in zip(args.caps, times, strict=True) if rank == 0 else ():
        ratio = statistics.median(one / first for one, first in zip(of, times[0], strict=True))
        print(f"{n} ranks, {cap:g} MiB: {1e3 * statistics.median(of):.1f} ms, {ratio:.3f} of the first", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--caps", type=float, nargs="+", default=[1e9, 0.06, 1e9])
    parser.add_argument("--steps", type=int, default=28)
    args = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    mp.spawn(measure, (args.ranks, port, args), args.ranks)


if __name__ == "__main__":
    main()
