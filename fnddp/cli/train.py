"""The ranks' part of the demo: train the same network with one pipeline after another, and measure."""

import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import accumulate
from statistics import median
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp import device as devices
from fnddp.adapters.functional import value_and_grad
from fnddp.cli.launch import Stage
from fnddp.cli.models import Params, load
from fnddp.core.agreement import agree, digest_of, verify
from fnddp.core.sync import Sync
from fnddp.simulation.tune import standing_for, trained
from fnddp.wire.counter import WireCounter

LEARNING_RATE = 0.1  # falls linearly to zero
MOMENTUM = 0.9
TIMED_STEPS = 50


class Result(TypedDict):
    """Training with one pipeline, in the form of results.json."""

    pipeline: str  # its expression
    bytes_per_step: int  # of the last step: schedules have reached their final phase
    reduction: float | None  # 4 bytes for each parameter divided by that; None if it is 0
    bytes_total: int
    test_accuracy: float | None  # after the last step; None without a test set
    step_seconds_median: float  # on this rank
    loss_by_step: list[float]  # in training, the mean over ranks
    bytes_sent_by_step: list[int]  # by one rank until the end of each step, counted


def train(pipelines: Sequence[Sync], model: str, steps: int, seed: int, kind: str) -> Iterator[Stage | Result]:
    """Train `model` once with each pipeline, from the same parameters and on the same batches, on devices of a `kind`.

    Every rank of the default process group must run it, to its end.
    """
    torch.set_num_threads(1)  # ranks share a machine
    rank, world_size = dist.get_rank(), dist.get_world_size()
    problem = load(model)
    device = devices.current(kind)
    network = problem.make(seed).to(device)
    initial, loss_fn = trained(network), problem.loss_of(network)

    for index, sync in enumerate(pipelines):
        place = index * steps, len(pipelines) * steps
        yield Stage(f"training {sync!r}", *place)
        params, state = initial, sync.init(initial)
        velocity = {path: torch.zeros_like(p) for path, p in initial.items()}
        verify(sync, params, state)
        step = value_and_grad(loss_fn, sync)
        generator = torch.Generator().manual_seed(seed * world_size + rank)
        losses: list[Tensor] = []
        sent: list[int] = []
        batch = problem.batch(rank, world_size, generator)
        for done in range(steps):
            batch = tuple(part.to(device) for part in problem.batch(rank, world_size, generator))
            with WireCounter() as counter:
                loss, grads, state = step(params, state, *batch)
            params, velocity = sgd(params, grads, velocity, LEARNING_RATE * (1 - done / steps))
            losses.append(loss)
            sent.append(counter.wire_bytes)
            if done % 10 == 9:
                yield Stage(f"training {sync!r}", place[0] + done + 1, place[1])
        final = f"digest {digest_of(params.values())}"
        agree(partial(dict[str, str], {f"the final parameters of {sync!r}": final}), group=None)

        seconds: list[float] = []
        # The counter slows a step down. A step is pure, so it can be timed separately and its results dropped.
        for _ in range(min(steps, TIMED_STEPS)):
            start = time.perf_counter()
            _, grads, _ = step(params, state, *batch)
            sgd(params, grads, velocity, 0.0)
            seconds.append(time.perf_counter() - start)
        mean = torch.stack(losses)
        dist.all_reduce(mean)
        elements = sum(p.numel() for p in params.values())
        on_cpu = {path: p.cpu() for path, p in params.items()}  # test data are on the CPU
        yield Result(
            pipeline=repr(sync),
            bytes_per_step=sent[-1],
            reduction=4 * elements / sent[-1] if sent[-1] else None,
            bytes_total=sum(sent),
            test_accuracy=problem.accuracy and problem.accuracy(standing_for(deepcopy(network).cpu(), on_cpu)),
            step_seconds_median=median(seconds),
            loss_by_step=(mean / world_size).tolist(),
            bytes_sent_by_step=list(accumulate(sent)),
        )


def sgd(params: Params, grads: Params, velocity: Params, learning_rate: float) -> tuple[Params, Params]:
    """Return parameters and velocity after one step of gradient descent with momentum."""
    velocity = {name: MOMENTUM * v + grads[name] for name, v in velocity.items()}
    return {name: p - learning_rate * velocity[name] for name, p in params.items()}, velocity
