"""Compares predicted with measured all_reduce times on shaped links, and prints docs/cost.md's table. Needs root.

python docs/validate_cost.py [rate ...]        # 200mbit 1gbit
"""

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fnddp
from fnddp.cli.launch import run_ranks
from fnddp.cli.network import shaped_hosts
from fnddp.cost.estimate import estimate

MB = 10**6
FLOAT32, FLOAT16 = torch.float32, torch.float16
BURST = 256 * 1024 * 1448 / 1514  # the token bucket of shaped_hosts, less the headers of TCP over Ethernet
# Payloads of collectives that are issued together, as a plan does.
PLANS = {
    **{f"{size} MB": [(size * MB, FLOAT32)] for size in (1, 2, 4, 8, 16)},
    **{f"{size} MB float16": [(size * MB, FLOAT16)] for size in (1, 2, 4, 8, 16)},
    "4 + 2 + 1 MB, 64 kB, 4 kB": [(n, FLOAT32) for n in (4 * MB, 2 * MB, MB, 64_000, 4_000)],
    "20 x 100 kB": [(100_000, FLOAT32)] * 20,
    "10 x 500 kB float16": [(500_000, FLOAT16)] * 10,
    "8 MB, 8 MB float16": [(8 * MB, FLOAT32), (8 * MB, FLOAT16)],
}
PAUSE = 0.2  # seconds: between training steps, backward lets the token bucket fill up
CALLS = 5


def main(rates: list[str]) -> None:
    errors: list[float] = []
    for rate in rates:
        with shaped_hosts(2, rate) as hosts:
            for event in run_ranks(2, compare, hosts=hosts):
                if isinstance(event, str):
                    print(f"\n{rate}: {event}\n")
                    print("| collectives | in a row, ms | predicted | error | after a pause, ms | predicted | error |")
                    print("|---|--:|--:|--:|--:|--:|--:|")
                    continue
                name, *pairs = event
                cells: list[str] = []
                for measured, predicted in pairs:
                    errors.append(predicted / measured - 1)
                    cells.append(f"{measured * 1e3:.1f} | {predicted * 1e3:.1f} | {errors[-1]:+.1%}")
                print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"\nlargest error: {max(map(abs, errors)):.1%}")


def compare() -> Iterator[Any]:
    """On every rank: yields a text about the link, then the name of each plan and two pairs of seconds.

    The pairs are measured and predicted ones, back to back and after a pause.
    """
    torch.set_num_threads(1)
    begin = time.perf_counter()
    link = fnddp.measure_link()
    yield f"measure_link took {time.perf_counter() - begin:.1f} s and gave {link}"
    for name, payloads in PLANS.items():
        buffers = [torch.zeros(nbytes // dtype.itemsize, dtype=dtype) for nbytes, dtype in payloads]
        issued = [
            SimpleNamespace(kind="all_reduce", wire_bytes=nbytes, world_size=2, group=None, slot=0, depth=0)
            for nbytes, _ in payloads
        ]
        run(buffers)
        in_a_row = statistics.median(run(buffers) for _ in range(CALLS))
        paused: list[float] = []
        for _ in range(CALLS):
            time.sleep(PAUSE)
            dist.barrier()
            paused.append(run(buffers))
        yield (
            name,
            (in_a_row, estimate(issued, link).communication_seconds),
            (statistics.median(paused), estimate(issued, replace(link, burst=BURST)).communication_seconds),
        )


def run(buffers: list[Tensor]) -> float:
    begin = time.perf_counter()
    for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
        work.wait()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main(sys.argv[1:] or ["200mbit", "1gbit"])
