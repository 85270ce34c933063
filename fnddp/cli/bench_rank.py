"""The ranks' part of a benchmark: run all arms in turn, round after round, and time every step."""

import os
import random
import socket
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from fnddp.cli.bench_arms import Arm, Setup, make_arms
from fnddp.cli.bench_profile import profiled
from fnddp.cli.bench_run import WARM_UP, Run, Times
from fnddp.cli.launch import Stage
from fnddp.cli.launcher import RankInfo, share_cores
from fnddp.cli.network import loopback_device, sent_bytes
from fnddp.wire import control


def measure(setup: Setup, at: RankInfo | None) -> Iterator[Stage | Run]:
    """Time every arm of `setup` once in each round, all ranks together; yield the run at the end.

    The order within a round is drawn anew each time, the same on all ranks: none profits from its neighbours. `at` is
    this rank, if a launcher has started it.
    """
    device = set_up_device(setup.device, at)
    yield Stage(f"preparing {len(setup.names)} arms")
    hosts: list[str] = control.all_gather_object(socket.gethostname(), None)
    if at is None:
        torch.set_num_threads(1)  # ranks share a machine
    else:
        share_cores(hosts)
    interfaces = counted(hosts, at)
    arms = make_arms(setup, device)
    seconds: list[list[float]] = [[] for _ in arms]
    link_bytes: list[list[int]] = [[] for _ in arms]
    order = list(range(len(arms)))
    shuffle = random.Random(setup.seed).shuffle
    for number in range(-WARM_UP, setup.pairs):
        yield Stage("rounds", number + WARM_UP, WARM_UP + setup.pairs)
        shuffle(order)
        for index in order:
            taken, sent = timed(arms[index], device, interfaces)
            if number >= 0:
                seconds[index].append(taken)
                link_bytes[index].append(sent)
    yield Stage("counting bytes")
    wire_bytes = [arm.wire_bytes() for arm in arms]
    profiles = [profiled(arm) if setup.is_profiled else None for arm in arms]
    gathered: list[list[list[float]]] = control.all_gather_object(seconds, None)
    times = [Times([rank[i] for rank in gathered], wire_bytes[i], link_bytes[i], profiles[i]) for i in range(len(arms))]
    yield Run(setup, times, hosts, torch.get_num_threads())


def counted(hosts: Sequence[str], at: RankInfo | None) -> list[str]:
    """Return the network devices of this host whose bytes count: those that lead to other ranks."""
    if at is None:
        return [os.environ["GLOO_SOCKET_IFNAME"]]
    loopback = loopback_device()
    if len(set(hosts)) == 1:
        return [loopback]
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return os.environ["GLOO_SOCKET_IFNAME"].split(",")
    return [name for _, name in socket.if_nameindex() if name != loopback]


def timed(arm: Arm, device: torch.device, interfaces: Sequence[str]) -> tuple[float, int]:
    """Return the seconds of one step of `arm`, and the bytes that left this host meanwhile."""
    arm.clear()
    _synchronize(device)
    before = sum(map(sent_bytes, interfaces))
    _barrier(device)
    start = time.perf_counter()
    arm.step()
    _synchronize(device)
    taken = time.perf_counter() - start
    _barrier(device)  # on loopback the others' bytes count too: let them end
    return taken, sum(map(sent_bytes, interfaces)) - before


def set_up_device(kind: str, at: RankInfo | None) -> torch.device:
    """Choose this rank's device. More ranks than GPUs share them: NCCL must then take ranks for different hosts."""
    if kind == "cpu":
        return torch.device("cpu")
    if at is not None:  # it was chosen when the ranks met
        return torch.device("cuda", torch.cuda.current_device())
    rank, gpus = dist.get_rank(), torch.cuda.device_count()
    if dist.get_world_size() > gpus:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        os.environ["NCCL_HOSTID"] = f"fnddp-{rank}"
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    return device


def _barrier(device: torch.device) -> None:
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
