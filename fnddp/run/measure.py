"""How long a rank computes, measured here: backward with the arrival of each gradient, and a plan's segments."""

import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from fnddp.core import tree
from fnddp.core.options import checked_int
from fnddp.core.sync import State
from fnddp.core.tree import Tree
from fnddp.cost.step import Compute
from fnddp.ir.program import LeafSpec, Segment
from fnddp.plan.plan import Plan
from fnddp.run.memory import Memory
from fnddp.run.planned import Planned
from fnddp.show.trace import Ranges
from fnddp.wire.groups import World, within
from fnddp.wire.kinds import Kind

CALLS = 5
"""Timed repetitions, whose medians count; one more goes ahead, which allocates and compiles."""


def measure_backward(loss_fn: Callable[..., Tensor], params: Tree, *batch: object, calls: int = CALLS) -> Compute:
    """Times forward and backward on this machine, and when in backward the gradient of each leaf is ready.

    Nothing is synchronized and no gradient is kept. Give `order` of the result to `lower`, as `arrival`: that is the
    order that engines learn. The wrong number for a machine that is not like the ones to train on, that is busy with
    something else, or that ranks will share, unless all measure at once; set `torch.set_num_threads` to what each rank
    will have.

    Args:
        loss_fn: `loss_fn(params, *batch) -> loss`, a scalar.
        params: Any pytree of floating-point tensors.
        batch: A rank's.
        calls: How often it is timed, at least once.

    Returns:
        Medians; its `segments` are None: see `measure_segments`. A leaf that gets no gradient arrives at the end.

    >>> params = {"w": torch.ones(3), "unused": torch.ones(2)}
    >>> compute = measure_backward(lambda params, x: (params["w"] * x).sum(), params, torch.ones(3))
    >>> compute.order, compute.arrivals["unused"] == compute.backward_seconds
    (['w', 'unused'], True)
    """
    leaves, spec = tree.flatten(params)
    variables = {path: leaf.detach().requires_grad_() for path, leaf in leaves.items()}
    ready: dict[str, float] = {}

    def noting(path: str) -> Callable[[Tensor], None]:
        def note(leaf: Tensor) -> None:
            leaf.grad = None
            ready[path] = _now(leaf.device)

        return note

    for path, variable in variables.items():
        variable.register_post_accumulate_grad_hook(noting(path))
    forward: list[float] = []
    backward: list[float] = []
    arrivals: dict[str, list[float]] = {path: [] for path in leaves}
    device = next((leaf.device for leaf in leaves.values()), torch.device("cpu"))
    for call in range(_checked(calls) + 1):
        ready.clear()
        begun = _now(device)
        loss = loss_fn(tree.unflatten(spec, variables), *batch)
        turned = _now(device)
        loss.backward()
        ended = _now(device)
        if call == 0:
            continue
        forward.append(turned - begun)
        backward.append(ended - turned)
        for path, times in arrivals.items():
            times.append(ready.get(path, ended) - turned)
    end = statistics.median(backward)
    return Compute(
        statistics.median(forward),
        end,
        {path: min(end, statistics.median(times)) for path, times in arrivals.items()},
    )


def measure_segments(plan: Plan, state: State = None, *, calls: int = CALLS) -> tuple[float, ...]:
    """Times what a plan computes on this machine: encoding and decoding, each segment by itself, of random gradients.

    They are run as in a step, with a wire on which all ranks send what this one does, and which takes no time. The
    wrong number where compression depends on the values, beyond what random ones show; and where ranks share cores,
    caches or a GPU, unless as many processes as will share them measure at once, each with its number of threads.

    Args:
        plan: For any number of ranks: they need not be there. Its leaves must not be on the meta device.
        state: Where a step begins; None for the pipeline's first one. It is not written over.
        calls: How often it is timed, at least once.

    Returns:
        Medians, for `Compute`'s `segments`.

    Raises:
        ValueError: The plan's leaves are on the meta device, which computes nothing.

    >>> from fnddp import fp16, allreduce, lower
    >>> plan = lower(fp16(allreduce), {"w": torch.empty(1000)}, world_size=8)
    >>> encode, decode = measure_segments(plan)
    >>> encode > 0 and decode > 0
    True
    """
    if meta := [path for path, leaf in plan.leaves.items() if leaf.device.type == "meta"]:
        raise ValueError(f"measure_segments: leaf {meta[0]!r} is on the meta device; lower the plan for real tensors")
    mirror, watch = _Mirror(plan), _Watch()
    state = mirror.initial_state() if state is None else state
    runner = Planned(plan, mirror, Memory(), observer=watch)
    rows: list[list[float]] = []
    generator = torch.Generator().manual_seed(0)
    grads = {path: _random(leaf, generator) for path, leaf in plan.leaves.items()}
    for _ in range(_checked(calls) + 1):
        parts, _ = tree.flatten_any(tree.map_tensors(Tensor.clone, state))
        runner.start(parts, mirror.sizes)
        for path, grad in grads.items():
            runner.feed(path, grad.clone())
        runner.drain()
        runner.wait()
        runner.commit()
        rows.append(watch.taken())
    return tuple(map(statistics.median, zip(*rows[1:], strict=True)))


class _Watch(Ranges):
    """Times segments."""

    def __init__(self) -> None:
        self._taken: list[float] = []

    @contextmanager
    def computes(self, segment: Segment, stream: torch.cuda.Stream | None) -> Generator[None]:
        """See `Observer`."""
        begun = _synced(stream)
        yield
        self._taken.append(_synced(stream) - begun)

    def taken(self) -> list[float]:
        """The seconds of the segments of a step."""
        taken, self._taken = self._taken, []
        return taken


class _Done:
    """A collective that takes no time."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class _Mirror:
    """A wire on which every rank sends what this one does."""

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

    def start(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: str | None) -> _Done:
        n = self.size(group)
        receive.copy_(kind.together(send.expand(n, *send.shape), op)[0])
        return _Done()

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, _Done]:
        return flags.expand(self.size(group), *flags.shape), _Done()


def _random(leaf: LeafSpec, generator: torch.Generator) -> Tensor:
    return leaf.empty().copy_(torch.randn(leaf.shape, generator=generator))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _synced(stream: torch.cuda.Stream | None) -> float:
    if stream is not None:
        stream.synchronize()
    return time.perf_counter()


def _checked(calls: int) -> int:
    if checked_int("calls", calls) < 1:
        raise ValueError(f"calls must be at least 1, got {calls}")
    return calls
