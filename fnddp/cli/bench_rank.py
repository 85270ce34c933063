"""What one rank does in a benchmark: run all arms in turn, round after round, and time every step."""

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fnddp.cli.bench_arms import Arm, Setup, make_arms
from fnddp.cli.bench_profile import profiled
from fnddp.cli.network import sent_bytes

# DDP rebuilds its buckets after the first step, and torch's PowerSGD starts in the third.
WARM_UP = 4


@dataclass(frozen=True)
class Round:
    """So many rounds are done, the untimed ones too."""

    done: int


@dataclass(frozen=True)
class Times:
    """What one arm took.

    Attributes:
        seconds: Of each timed step (inner) on each rank (outer).
        wire_bytes: What rank 0 handed to its collectives in one more step, counted.
        link_bytes: Of each timed step: what left through the network interface of rank 0.
        profile: Where the time of a step of rank 0 goes, in steps of their own; None if nobody asked.
    """

    seconds: list[list[float]]
    wire_bytes: int
    link_bytes: list[int]
    profile: dict[str, float] | None = None

    @property
    def steps(self) -> list[float]:
        """Seconds of each timed step, until the last rank was done."""
        return [max(ranks) for ranks in zip(*self.seconds, strict=True)]


Event = Round | list[Times]


def measure(setup: Setup) -> Iterator[Event]:
    """Times every arm of `setup` once in each round, all ranks together.

    The order within a round is drawn anew each time, the same on all ranks: none profits from its neighbours. Yields
    a `Round` after each, and what each arm took at the end.
    """
    torch.set_num_threads(1)  # ranks share a machine
    device = set_up_device(setup.device)
    arms = make_arms(setup, dist.get_rank(), device)
    seconds: list[list[float]] = [[] for _ in arms]
    link_bytes: list[list[int]] = [[] for _ in arms]
    order = list(range(len(arms)))
    shuffle = random.Random(setup.seed).shuffle
    for number in range(-WARM_UP, setup.pairs):
        shuffle(order)
        for index in order:
            taken, sent = timed(arms[index], device)
            if number >= 0:
                seconds[index].append(taken)
                link_bytes[index].append(sent)
        yield Round(number + WARM_UP + 1)
    wire_bytes = [arm.wire_bytes() for arm in arms]
    profiles = [profiled(arm) if setup.is_profiled else None for arm in arms]
    gathered: list[list[list[float]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, seconds)
    yield [Times([rank[i] for rank in gathered], wire_bytes[i], link_bytes[i], profiles[i]) for i in range(len(arms))]


def timed(arm: Arm, device: torch.device) -> tuple[float, int]:
    """Seconds of one step of `arm`, which all ranks begin together, and the bytes that left this host meanwhile."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    arm.clear()
    synchronize(device)
    before = sent_bytes(interface)
    barrier(device)
    start = time.perf_counter()
    arm.step()
    synchronize(device)
    taken = time.perf_counter() - start
    barrier(device)  # on loopback the others' bytes count too: let them end
    return taken, sent_bytes(interface) - before


def barrier(device: torch.device) -> None:
    """Waits for all ranks."""
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def set_up_device(kind: str) -> torch.device:
    """This rank's device. More ranks than GPUs share them: NCCL must then take ranks for different hosts."""
    if kind == "cpu":
        return torch.device("cpu")
    rank, gpus = dist.get_rank(), torch.cuda.device_count()
    if dist.get_world_size() > gpus:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        os.environ["NCCL_HOSTID"] = f"fnddp-{rank}"
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    return device


def synchronize(device: torch.device) -> None:
    """Waits until `device` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
