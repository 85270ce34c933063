"""A benchmark: its configuration, the work of ranks (run all arms in turn and time every step), and its results."""

import os
import platform
import random
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import fnddp
from fnddp import device as devices
from fnddp.cli.failures import WrongArgument
from fnddp.cli.launch import RankInfo, Ranks, Stage, share_cores
from fnddp.cli.models import Params, load
from fnddp.cli.network import loopback_device, sent_bytes
from fnddp.core.options import did_you_mean
from fnddp.core.sync import Sync
from fnddp.run.choose import AUTO, Auto
from fnddp.simulation.tune import Batch, Loss, standing_for, trained
from fnddp.wire import control
from fnddp.wire.counter import WireCounter

WARM_UP = 4  # rounds: DDP rebuilds its buckets after the first, and torch's PowerSGD starts in the third
HOOKS: dict[str, Any] = {
    "allreduce_hook": allreduce_hook,
    "fp16_hook": fp16_compress_hook,
    "bf16_hook": bf16_compress_hook,
}
PEERS = ("ddp", *HOOKS, "powersgd_hook", "none")


@dataclass(frozen=True)
class Setup:
    model: str  # as `fnddp.cli.models.load` takes it
    pipelines: list[Sync | Auto]  # ours
    peers: list[str]  # to compare with, of `PEERS`
    ranks: Ranks
    parameters: int  # elements that are trained
    engine: str = "ddp"  # how a pipeline is run: "ddp", "register" or "value_and_grad"
    compiled: bool = False  # compile the step. Ours are then functional for any engine
    pairs: int = 30  # timed rounds; each runs every arm once
    seed: int = 0  # for the parameters and the order of arms in a round
    load: float = field(default_factory=lambda: os.getloadavg()[0])  # processes that ran here in the last minute

    @property
    def names(self) -> list[str]:
        """The arms, in order: ours, then the peers. Repeated names are numbered."""
        texts = [*map(str, self.pipelines), *self.peers]
        return [f"{text} #{n}" if (n := texts[: i + 1].count(text)) > 1 else text for i, text in enumerate(texts)]


@dataclass(frozen=True)
class Times:
    seconds: list[list[float]]  # of each timed step (inner) on each rank (outer)
    wire_bytes: int  # that rank 0 passed to its collectives in one more step, counted
    link_bytes: list[int]  # of each timed step: sent through the network interface of rank 0

    @property
    def steps(self) -> list[float]:
        """Seconds of each timed step, until the last rank was done."""
        return [max(ranks) for ranks in zip(*self.seconds, strict=True)]


class Ratio(NamedTuple):
    """Quartiles of the ratio of two arms' times, taken round by round."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Run:
    setup: Setup
    times: list[Times]  # of each arm
    hosts: list[str]  # of each rank
    threads: int  # of each rank on the CPU
    taken: str | None = None  # the choice of "auto", if "auto" is an arm

    def ratio(self, arm: int, peer: int) -> Ratio:
        """Return the time of `arm` over that of `peer`."""
        pairs = zip(self.times[arm].steps, self.times[peer].steps, strict=True)
        return Ratio(*map(float, np.percentile([ours / theirs for ours, theirs in pairs], (25, 50, 75))))

    def link_bytes(self, arm: int) -> float:
        """Return the median bytes that a rank sends in a step through its interface, or through its share of one."""
        sharing = 1 if self.setup.ranks.link else self.hosts.count(self.hosts[0])
        return median(self.times[arm].link_bytes) / sharing

    @property
    def peers(self) -> list[int]:
        return list(range(len(self.setup.pipelines), len(self.setup.names)))

    @property
    def conditions(self) -> dict[str, object]:
        """The conditions that a reader must know to repeat the benchmark."""
        setup, ranks = self.setup, self.setup.ranks
        device = devices.device_of(torch.device(ranks.device))
        return {
            "command": shlex.join(["fnddp", *sys.argv[1:]]),
            "model": setup.model,
            "parameters": setup.parameters,
            "ranks": ranks.count,
            "hosts": ranks.count if ranks.link else len(set(self.hosts)),
            "started_by": ranks.at.launcher if ranks.at else "fnddp",
            "threads": self.threads,
            "link": ranks.link,
            "engine": "compiled" if setup.compiled else setup.engine,
            "device": device.name,
            "backend": device.backend,
            "pairs": setup.pairs,
            "untimed_rounds": WARM_UP,
            "seed": setup.seed,
            "torch": torch.__version__,
            "machine": f"{platform.system()} {platform.machine()}, {_processor()}",
            "load_at_start": round(setup.load, 1),
            "auto": self.taken,
        }


def _processor() -> str:
    about = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.+)", about.read_text()) if about.exists() else None
    return named[1] if named else platform.processor() or "unknown processor"


@dataclass(frozen=True)
class Arm:
    """A way to run a training step: forward, loss, backward, with or without synchronization."""

    step: Callable[[], None]  # runs one step
    clear: Callable[[], None]  # drops the gradients of the last step
    sends: Callable[[], object]  # passes the bytes of a step to its collectives, to count them
    pipeline: str | None = None  # the pipeline that it runs in a module


def check_peers(against: str, on: Ranks) -> tuple[list[str], dict[str, str]]:
    """Return the peers in `against` that can run `on` these ranks, and the reasons why others cannot."""
    names = [name.strip() for name in against.split(",")]
    if unknown := [name for name in names if name not in PEERS]:
        hint = did_you_mean(unknown[0], PEERS) or f"; known ones are {', '.join(PEERS)}"
        raise WrongArgument(f"--against: unknown peer {unknown[0]!r}{hint}")
    impossible = {"bf16_hook": "torch registers its bf16 hook with NCCL on CUDA only; compare with fp16_hook"}
    if on.count > 1:
        impossible["powersgd_hook"] = "torch's PowerSGD hook waits inside future callbacks, which aborts on gloo"
    left_out = {name: impossible[name] for name in names if on.device == "cpu" and name in impossible}
    peers = [name for name in names if name not in left_out]
    if not peers:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in left_out.items())
        raise WrongArgument(f"--against {against}: no peer is left to compare with; add ddp to --against{reasons}")
    return peers, left_out


def _arm(each: Sync | str, setup: Setup, module: nn.Module, loss: Loss, batch: Batch) -> Arm:
    """Return the arm of a pipeline, or of one of `PEERS`."""
    sync = None if each in PEERS else each
    if (setup.compiled or setup.engine == "value_and_grad") and (each == "none" or sync is not None):
        assert not isinstance(sync, str)  # "auto" is for modules
        return _functional(setup, module, loss, batch, sync)
    if sync is not None and setup.engine == "ddp":
        ours = fnddp.DistributedDataParallel(module, sync=sync)
        return _module(ours, loss, batch, str(ours.sync))
    if setup.compiled:
        module.compile()
    if each == "none":
        return _module(module, loss, batch)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    if sync is not None:
        return _module(model, loss, batch, str(fnddp.register(model, sync).sync))
    if each == "powersgd_hook":  # from the first possible step
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)
    elif each != "ddp":
        model.register_comm_hook(None, HOOKS[str(each)])
    return _module(model, loss, batch)


def _module(module: nn.Module, loss: Loss, batch: Batch, pipeline: str | None = None) -> Arm:
    def step() -> None:
        loss(module, batch).backward()

    return Arm(step, module.zero_grad, step, pipeline)


def _functional(setup: Setup, module: nn.Module, loss: Loss, batch: Batch, sync: Sync | None) -> Arm:
    params = trained(module)
    buffers = dict(module.named_buffers())

    def loss_fn(params: Params, *batch: Tensor) -> Tensor:
        # torch.func lets a step change only buffers that are its own.
        own = {name: buffer.clone() for name, buffer in buffers.items()}
        return loss(standing_for(module, (params, own)), batch)

    def train_step(params: Params, state: Any, *batch: Tensor) -> tuple[Tensor, Params, Any]:
        grads, value = torch.func.grad_and_value(loss_fn)(params, *batch)
        if sync is not None:
            grads, state = sync(grads, state)
        return value, grads, state

    run = train_step if sync is None or setup.compiled else fnddp.value_and_grad(loss_fn, sync)
    if setup.compiled:
        run = torch.compile(run, fullgraph=True)
    # The next step's state, and the last one's gradients, so that their memory is as in training.
    state, grads = None if sync is None else sync.init(params), None

    def step() -> None:
        nonlocal state, grads
        _, grads, state = run(params, state, *batch)

    def clear() -> None:
        nonlocal grads
        grads = None

    # A compiled step hides its collectives. The same pipeline on the same tree passes the same bytes to them.
    return Arm(step, clear, sends=(lambda: sync and sync(params, state)) if setup.compiled else step)


def measure(setup: Setup) -> Iterator[Stage | Run]:
    """Time every arm of `setup` once in each round, all ranks together; yield the run at the end.

    The order within a round is drawn anew each time, the same on all ranks, so that no arm profits from its neighbours.
    """
    device, at, names = devices.current(setup.ranks.device), setup.ranks.at, setup.names
    problem, rank, generator = load(setup.model), dist.get_rank(), torch.Generator()
    yield Stage("comparing ranks")
    hosts: list[str] = control.all_gather_object(socket.gethostname(), None)
    if at is None:
        torch.set_num_threads(1)  # ranks share a machine
    else:
        share_cores(hosts)
    interfaces = counted(hosts, at)
    batch = tuple(part.to(device) for part in problem.batch(rank, len(hosts), generator.manual_seed(rank)))
    arms: list[Arm] = []
    for i, each in enumerate([*setup.pipelines, *setup.peers]):
        yield Stage(f"preparing {names[i]}", i, len(names))
        arms.append(_arm(each, setup, problem.make(setup.seed).to(device), problem.loss, batch))
    seconds: list[list[float]] = [[] for _ in arms]
    link_bytes: list[list[int]] = [[] for _ in arms]
    order = list(range(len(arms)))
    shuffle = random.Random(setup.seed).shuffle
    for number in range(-WARM_UP, setup.pairs):
        does, done, of = ("warming up", number + WARM_UP, WARM_UP) if number < 0 else ("timing", number, setup.pairs)
        shuffle(order)
        for i, index in enumerate(order):
            yield Stage(f"{does} {names[index]}", done * len(arms) + i, of * len(arms))
            taken, sent = timed(arms[index], device, interfaces)
            if number >= 0:
                seconds[index].append(taken)
                link_bytes[index].append(sent)
    yield Stage("counting bytes")
    wire_bytes: list[int] = []
    for arm in arms:
        with WireCounter() as counter:
            arm.sends()
        wire_bytes.append(counter.wire_bytes)
    gathered: list[list[list[float]]] = control.all_gather_object(seconds, None)
    times = [Times([rank[i] for rank in gathered], wire_bytes[i], link_bytes[i]) for i in range(len(arms))]
    taken = next((arm.pipeline for arm, given in zip(arms, setup.pipelines, strict=False) if given == AUTO), None)
    yield Run(setup, times, hosts, torch.get_num_threads(), taken)


def counted(hosts: Sequence[str], at: RankInfo | None) -> list[str]:
    """Return the network devices of this host that lead to other ranks: only their bytes count."""
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
    synchronize = devices.device_of(device).synchronize
    barrier = partial(dist.barrier, device_ids=None if device.index is None else [device.index])
    synchronize()
    before = sum(map(sent_bytes, interfaces))
    barrier()
    start = time.perf_counter()
    arm.step()
    synchronize()
    taken = time.perf_counter() - start
    barrier()  # on loopback the others' bytes count too: let them end
    return taken, sum(map(sent_bytes, interfaces)) - before
