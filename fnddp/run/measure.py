"""Measure a rank's computation: backward with the arrival time of each gradient, and a plan's segments."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.options import checked_int
from fnddp.core.sync import State
from fnddp.core.tree import Tree
from fnddp.cost.estimate import Compute
from fnddp.device import device_of, one_of
from fnddp.plan.plan import Plan
from fnddp.run.program import PlanMemory, Program
from fnddp.run.step import Step
from fnddp.show.trace import Observer
from fnddp.wire.groups import World, within
from fnddp.wire.kinds import Kind
from fnddp.wire.weights import Weight

CALLS = 5
"""Number of timed repetitions. Results are their medians; one untimed run before them allocates and compiles."""


def measure_backward(loss_fn: Callable[..., Tensor], params: Tree, *batch: object, calls: int = CALLS) -> Compute:
    """Time forward and backward on this machine, and the moment in backward when each leaf's gradient is ready.

    It synchronizes nothing and keeps no gradient. The `order` of the result is the one that training would learn: pass
    it to `lower`, as `arrival`. Measure on a machine like those that you will train on, with nothing else running. If
    ranks will share the machine, let all measure at the same time, each with its number of threads
    (`torch.set_num_threads`).

    Args:
        loss_fn: `loss_fn(params, *batch) -> loss`, a scalar.
        params: Any pytree of floating-point tensors.
        batch: The batch of one rank.
        calls: Number of timed repetitions, at least 1.

    Returns:
        Medians, without `segments`: see `measure_segments`. A leaf without a gradient arrives at the end.

    >>> params = {"w": torch.ones(3), "unused": torch.ones(2)}
    >>> compute = measure_backward(lambda params, x: (params["w"] * x).sum(), params, torch.ones(3))
    >>> compute.order, compute.arrivals["unused"] == compute.backward_seconds
    (['w', 'unused'], True)
    """
    leaves, spec = tree.flatten(params)
    variables = {path: leaf.detach().requires_grad_() for path, leaf in leaves.items()}
    ready: dict[str, float] = {}

    def note(path: str, leaf: Tensor) -> None:
        leaf.grad = None
        ready[path] = _now(leaf.device)

    for path, variable in variables.items():
        variable.register_post_accumulate_grad_hook(partial(note, path))
    rows: list[list[float]] = []  # forward, backward, and arrival of each leaf
    device = next((leaf.device for leaf in leaves.values()), torch.device("cpu"))
    for _ in range(_checked(calls) + 1):
        ready.clear()
        begun = _now(device)
        loss = loss_fn(tree.unflatten(spec, variables), *batch)
        turned = _now(device)
        loss.backward()
        ended = _now(device)
        rows.append([turned - begun, ended - turned, *(ready.get(path, ended) - turned for path in leaves)])
    forward, backward, *arrivals = _medians(rows[1:])
    arrived = zip(leaves, arrivals, strict=True)
    return Compute(forward, backward, {path: min(backward, seconds) for path, seconds in arrived})


def measure_segments(plan: Plan, state: State = None, *, calls: int = CALLS) -> tuple[float, ...]:
    """Time the computation of a plan on this machine: encoding and decoding of random gradients, segment by segment.

    Segments run as in a step, on a wire that takes no time, as if all ranks sent the same values as this rank. The
    result is wrong if the time of compression depends on values, and random ones differ from yours. If ranks will share
    cores, caches or a GPU, measure in as many processes at the same time, each with its number of threads.

    Args:
        plan: A plan for any number of ranks. They need not exist. Its leaves must not be on the meta device.
        state: The state before the step; None for the initial state. It is not written over.
        calls: Number of timed repetitions, at least 1.

    Returns:
        Medians, to use as `segments` of `Compute`.

    Raises:
        ValueError: The plan's leaves are on the meta device.

    >>> from fnddp import fp16, allreduce, lower
    >>> plan = lower(fp16(allreduce), {"w": torch.empty(1000)}, world_size=8)
    >>> encode, decode = measure_segments(plan)
    >>> encode > 0 and decode > 0
    True
    """
    if meta := [path for path, leaf in plan.leaves.items() if leaf.device == torch.device("meta")]:
        raise ValueError(f"measure_segments: leaf {meta[0]!r} is on the meta device; lower the plan with real tensors")
    mirror, observer, generator = _Mirror(plan), Observer(measures=True), torch.Generator().manual_seed(0)
    state = mirror.initial_state() if state is None else state
    weight = Weight.of(1) if plan.sync.takes_weight else None
    program = Program(
        plan, mirror, PlanMemory(), device=one_of({path: leaf.device for path, leaf in plan.leaves.items()})
    )
    grads = {
        path: leaf.empty().copy_(torch.randn(leaf.shape, generator=generator, dtype=torch.float32, device="cpu"))
        for path, leaf in plan.leaves.items()
    }
    rows: list[list[float]] = []
    for _ in range(_checked(calls) + 1):
        parts, _ = tree.flatten_any(tree.map_tensors(Tensor.clone, state))
        step = Step(program, parts, lambda _: None, weight=weight, observer=observer)
        for path, grad in grads.items():
            step.feed(path, grad.clone())
        step.finish()
        rows.append([*chain(*observer.taken(len(plan.collectives)).segments)])
    return _medians(rows[1:])


class _Mirror:
    """A wire that takes no time and behaves as if every rank sent the same values as this rank."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.sizes: dict[str | None, int] = {each.group: each.world_size for each in plan.collectives}

    def initial_state(self) -> State:
        leaves = {path: leaf.empty().zero_() for path, leaf in self._plan.leaves.items()}
        with within(World(self)):
            return self._plan.sync.init(leaves)

    def size(self, group: str | None) -> int:
        return self.sizes.get(group, 1)

    def rank(self, group: str | None) -> int:
        return 0

    def start(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: str | None) -> "_Mirror":
        n = self.size(group)
        receive.copy_(kind.together(send.expand(n, *send.shape), op)[0])
        return self

    def vote(self, flags: Tensor, group: str | None) -> "tuple[Tensor, _Mirror]":
        return flags.expand(self.size(group), *flags.shape), self

    # It is also the `Work` of its collectives. They are complete at once.
    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


def _medians(rows: list[list[float]]) -> tuple[float, ...]:
    return tuple(map(statistics.median, zip(*rows, strict=True)))


def _now(device: torch.device) -> float:
    device_of(device).synchronize()
    return time.perf_counter()


def _checked(calls: int) -> int:
    if checked_int("calls", calls) < 1:
        raise ValueError(f"calls must be at least 1, got {calls}")
    return calls
