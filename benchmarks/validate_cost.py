"""Compares predicted with measured times on shaped links, and prints cost-accuracy.md's tables. Needs root.

python benchmarks/validate_cost.py [rate ...]                  # 200mbit 1gbit: all_reduces of two hosts, as plans issue
python benchmarks/validate_cost.py --hosts 2 4 8 -- [rate ...] # 100mbit 200mbit 1gbit: kinds, on so many hosts
    --tcp reno                                                    # with that congestion control, not the machine's own
"""

import argparse
import statistics
import subprocess
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
from fnddp import Link
from fnddp.cli.launch import run_ranks
from fnddp.cli.network import Host, shaped_hosts
from fnddp.cost.estimate import estimate
from fnddp.wire.c10d import C10D
from fnddp.wire.kinds import Kind, named, waited

MB = 10**6
FLOAT32, FLOAT16 = torch.float32, torch.float16
SHARE = 1448 / 1514  # of a packet is payload, the rest headers of TCP over Ethernet
BURST = 256 * 1024 * SHARE  # the token bucket of shaped_hosts
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


KINDS = ("all_reduce", "all_gather", "all_to_all")


def kinds(rates: list[str], hosts: list[int], sizes: list[int], tcp: str | None) -> None:
    """One row for each number of hosts, kind and size; measured, predicted and error at each rate."""
    found: dict[tuple[int, str, int], list[str]] = {}
    errors: list[float] = []
    for n in hosts:
        for rate in rates:
            with shaped_hosts(n, rate) as namespaces:
                if tcp is not None:
                    control_congestion(namespaces, tcp)
                for event in run_ranks(n, compare_kinds, sizes, rate, hosts=namespaces):
                    kind, size, measured, predicted = event
                    errors.append(predicted / measured - 1)
                    cell = f"{measured * 1e3:.1f} | {predicted * 1e3:.1f} | {errors[-1]:+.1%}"
                    found.setdefault((n, kind, size), []).append(cell)
                    print(f"{n} hosts, {rate}, {kind}, {size} MB: {cell}", file=sys.stderr, flush=True)
    print(f"| hosts | kind | MB | {' | '.join(f'{rate}, ms | predicted | error' for rate in rates)} |")
    print(f"|--:|---|--:|{'--:|' * 3 * len(rates)}")
    for (n, kind, size), cells in found.items():
        print(f"| {n} | {kind} | {size} | {' | '.join(cells)} |")
    close = sum(abs(error) <= 0.05 for error in errors)
    print(f"\nlargest error: {max(map(abs, errors)):.1%}; {close} of {len(errors)} within 5 %")


def control_congestion(hosts: list[Host], how: str) -> None:
    for host in hosts:
        write = f"echo {how} > /proc/sys/net/ipv4/tcp_congestion_control"
        subprocess.run(["ip", "netns", "exec", host.namespace, "sh", "-c", write], check=True)


def compare_kinds(sizes: list[int], rate: str) -> Iterator[Any]:
    """On every rank: yields kind, MB, and measured and predicted seconds.

    MB are of the result: an all_gather's payload is 1/n of that. The slowest rank's median counts. Nothing is fitted:
    the link is the rate, less headers.
    """
    torch.set_num_threads(1)
    n = dist.get_world_size()
    link = Link(Link.parse(rate).bandwidth * SHARE)
    for kind in map(named, KINDS):
        for size in sizes:
            width = size * MB // 4 // n
            send = torch.zeros((width,) if kind.name == "all_gather" else (n, width))
            receive = send if kind.is_in_place else torch.zeros(n, width)
            seconds = [timed(kind, send, receive) for _ in range(CALLS + 1)][1:]  # the first one drains the bucket
            medians: list[Any] = [None] * n
            dist.all_gather_object(medians, statistics.median(seconds))
            yield kind.name, size, max(medians), link.seconds(kind, send.nbytes, n)


def timed(kind: Kind, send: Tensor, receive: Tensor) -> float:
    begin = time.perf_counter()
    waited(C10D.start(kind, send, receive, "sum" if kind.computes else None, None))
    return time.perf_counter() - begin


def plans(rates: list[str]) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rates", nargs="*")
    parser.add_argument("--hosts", nargs="+", type=int)
    parser.add_argument("--mb", nargs="+", type=int, default=[1, 4, 10])
    parser.add_argument(
        "--tcp", help="congestion control of the hosts, of /proc/sys/net/ipv4/tcp_allowed_congestion_control"
    )
    arguments = parser.parse_args()
    if arguments.hosts:
        kinds(arguments.rates or ["100mbit", "200mbit", "1gbit"], arguments.hosts, arguments.mb, arguments.tcp)
    else:
        plans(arguments.rates or ["200mbit", "1gbit"])


if __name__ == "__main__":
    main()
