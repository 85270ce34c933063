"""What one rank does in the demo: train the same network with one pipeline after another, and measure."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from fnddp.adapters.functional import value_and_grad
from fnddp.agreement import agree, verify
from fnddp.cli.lessons import Params, lesson
from fnddp.sync import Sync
from fnddp.wire.counter import WireCounter

LEARNING_RATE = 0.1  # falls linearly to zero
MOMENTUM = 0.9
TIMED_STEPS = 50


@dataclass(frozen=True)
class Progress:
    """So many steps with the pipeline at `index` are done; `loss` is this rank's last."""

    index: int
    steps: int
    loss: float


@dataclass(frozen=True)
class Result:
    """What training with one pipeline gave.

    Attributes:
        index: Which pipeline.
        parameters: Elements in the network.
        losses: Training loss of each step, the mean over ranks.
        sent: Wire bytes that one rank had sent after each step, counted.
        accuracy: On the test set, after the last step; None where there is none.
        step_seconds: Median time of a step on this rank.
    """

    index: int
    parameters: int
    losses: list[float]
    sent: list[int]
    accuracy: float | None
    step_seconds: float

    @property
    def step_bytes(self) -> int:
        """What the last step sent: schedules have come to their final phase."""
        return self.sent[-1] - (self.sent[-2] if len(self.sent) > 1 else 0)

    @property
    def reduction(self) -> float | None:
        """How many times less that is than 4 bytes per parameter; None if nothing was sent."""
        return 4 * self.parameters / self.step_bytes if self.step_bytes else None


Event = Progress | Result


def train(pipelines: Sequence[Sync], model: str, steps: int, seed: int) -> Iterator[Event]:
    """Trains `model` once with each pipeline, from the same parameters and on the same batches.

    Every rank of the default process group must run it, to its end.

    Raises:
        RankMismatchError: On all ranks: the final parameters are not equal to the bit on all of them.
    """
    torch.set_num_threads(1)  # ranks share a machine
    rank, world_size = dist.get_rank(), dist.get_world_size()
    learnt = lesson(model, seed=seed, rank=rank, world_size=world_size)
    initial = learnt.initial

    for index, sync in enumerate(pipelines):
        params, velocity, state = (
            initial,
            {name: torch.zeros_like(p) for name, p in initial.items()},
            sync.init(initial),
        )
        verify(sync, params, state)
        step = value_and_grad(learnt.loss, sync)
        generator = torch.Generator().manual_seed(seed * world_size + rank)
        losses: list[Tensor] = []
        sent: list[int] = []
        batch = learnt.batch(generator)
        for done in range(steps):
            batch = learnt.batch(generator)
            with WireCounter() as counter:
                loss, grads, state = step(params, state, *batch)
            params, velocity = sgd(params, grads, velocity, LEARNING_RATE * (1 - done / steps))
            losses.append(loss)
            sent.append(counter.wire_bytes)
            if done % 10 == 9:
                yield Progress(index, done + 1, loss.item())
        check_equal(params, f"the final parameters of {sync!r}")

        seconds: list[float] = []
        # The counter slows a step down. A step is pure, so it can be timed apart, and its results thrown away.
        for _ in range(min(steps, TIMED_STEPS)):
            start = time.perf_counter()
            _, grads, _ = step(params, state, *batch)
            sgd(params, grads, velocity, 0.0)
            seconds.append(time.perf_counter() - start)
        yield Result(
            index=index,
            parameters=sum(p.numel() for p in params.values()),
            losses=mean_over_ranks(torch.stack(losses)).tolist(),
            sent=list(accumulate(sent)),
            accuracy=None if learnt.accuracy is None else learnt.accuracy(params),
            step_seconds=median(seconds),
        )


def sgd(params: Params, grads: Params, velocity: Params, learning_rate: float) -> tuple[Params, Params]:
    """One step of gradient descent with momentum."""
    velocity = {name: MOMENTUM * v + grads[name] for name, v in velocity.items()}
    return {name: p - learning_rate * velocity[name] for name, p in params.items()}, velocity


def check_equal(params: Params, about: str) -> None:
    """Raises on all ranks unless `params` has the same bits on all."""
    digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in params.values())).hexdigest()
    agree(lambda: {about: f"digest {digest[:16]}"}, group=None)


def mean_over_ranks(values: Tensor) -> Tensor:
    """The mean of `values` over ranks."""
    total = values.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
