"""The contract of all ways in where a step fails: it ends on all ranks alike, and leaves no trace.

Rank 1 fails at each point of a step, and the other ranks learn of it; or its collectives fail, and all ranks refuse.
Replicas of torchft discard such a step, and go on.
"""

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import StepFailedError, outer
from fnddp.adapters.module.steps import Steps
from fnddp.integrations.fsdp import compress, compress_replicas, compress_shards
from fnddp.integrations.fsdp.reductions import Reduction
from fnddp.integrations.fsdp.unit import Unit
from fnddp.laws import bits
from fnddp.reducers import halves
from fnddp.run.step import Step
from fnddp.run.vote import Vote
from fnddp.wire.c10d import C10d
from fnddp.wire.protocol import CollectiveError
from tests.replicas import new_manager, on_processes

LOSSY = "error_feedback(fp16(allreduce))"
SHARDS = "error_feedback(quantize(two_shot, bits=4, block=16))"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def sharded(mesh: Any) -> nn.Module:
    model = network()
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Training:
    def __init__(self, way: str) -> None:
        optimizer: Any = None
        if way == "module":
            self.model: Any = fnddp.DistributedDataParallel(network(), sync=fnddp.parse(LOSSY), bucket_cap_mb=1e-4)
            self.state: Callable[[], Any] = lambda: self.model.sync_state
        elif way == "register":
            self.model = TorchDDP(network(), bucket_cap_mb=1e-4)
            handle: Any = fnddp.register(self.model, LOSSY)
            self.state = lambda: handle.sync_state
        elif way == "shards":
            self.model = sharded(init_device_mesh("cpu", (2,)))
            handle = compress_shards(self.model, gradients=SHARDS)
            self.state = lambda: handle.sync_state
        elif way == "replicas":
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
            self.model = sharded(mesh["shard"])
            handle = compress_replicas(self.model, LOSSY, mesh["replicate"])
            self.state = lambda: handle.sync_state
        elif way == "shards and replicas":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            self.model = sharded(mesh["shard"])
            handle = compress(self.model, mesh, gradients=SHARDS, replicas=LOSSY)
            self.state = lambda: handle.sync_state
        else:
            self.model = network()
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            attached = outer.attach(self.model, optimizer, outer.diloco(fnddp.parse(LOSSY), every=1))
            self.state = lambda: attached.state
        self.optimizer = optimizer or torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, rank: int, step: int) -> None:
        self.optimizer.zero_grad()
        y = self.model(torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank)))
        y.square().mean().backward()
        self.optimizer.step()

    @property
    def all(self) -> Any:
        return bits([p.to_local() if hasattr(p, "to_local") else p for p in self.model.parameters()]), bits(
            self.state()
        )


class Trap(Exception):
    pass


@contextmanager
def patched(owner: Any, name: str, run: Any) -> Generator[None]:
    original = getattr(owner, name)
    setattr(owner, name, run)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def before(owner: Any, name: str, at: int, act: Callable[..., object]) -> Generator[list[int]]:
    """Run `act` before call number `at` of a method; yield the list of calls."""
    calls: list[int] = []
    original = getattr(owner, name)

    def run(*given: Any, **options: Any) -> Any:
        calls.append(len(calls))
        if calls[-1] == at:
            act(*given, **options)
        return original(*given, **options)

    with patched(owner, name, run):
        yield calls


def failing(owner: Any, name: str, at: int = 0, error: Exception | None = None) -> Any:
    """Let call number `at` of a method raise, once; yield the list of calls."""

    def act(*_: Any, **__: Any) -> None:
        raise error or Trap(f"at {name}")

    return before(owner, name, at, act)


class Interrupt(KeyboardInterrupt):
    """Ctrl-C, as it may come between any two operations."""


def interrupted(owner: Any, name: str, at: int = 0) -> Any:
    """Let an interrupt come as call number `at` of a method returns."""
    calls: list[int] = []
    original = getattr(owner, name)

    def run(*given: Any, **options: Any) -> Any:
        result = original(*given, **options)
        calls.append(len(calls))
        if calls[-1] == at:
            raise Interrupt("at an interrupt")
        return result

    return patched(owner, name, run)


@contextmanager
def broken_off() -> Generator[None]:
    """An error of the user's in backward, when the parameters of the last layer have their gradients."""

    def trap(_: Tensor) -> None:
        raise Trap("at a tensor of the user's")

    def between(module: nn.Module, _: Any, output: Tensor) -> None:
        if isinstance(module, nn.Tanh):
            output.register_hook(trap)

    hook = register_module_forward_hook(between)
    try:
        yield
    finally:
        hook.remove()


POINTS: dict[str, Callable[[int], Any]] = {  # given the number of collectives in a step
    "in the first collective": lambda _: failing(C10d, "start"),
    "in the last collective": lambda count: failing(C10d, "start", count - 1),
    "in a segment": lambda _: failing(Step, "_run"),
    "behind the first collective": lambda _: interrupted(C10d, "start"),
    "behind the last collective": lambda count: interrupted(C10d, "start", count - 1),
    "behind a segment": lambda _: interrupted(Step, "_run"),
    "in the first codec": lambda _: failing(Unit, "reduce"),
    "in the last codec": lambda _: failing(Unit, "reduce", 1),
    "in the first decode": lambda _: failing(halves, "added_up"),
    "in the last decode": lambda _: failing(halves, "added_up", 1),
    "behind the last gradient": lambda _: failing(Vote, "cast"),
}
BY_LEAF = ["in a segment", "in the first collective", "in the last collective", "behind the last gradient"]
BY_LEAF += ["behind the first collective", "behind the last collective", "behind a segment"]
BY_BUFFER = ["in the first codec", "in the last codec", "in the first decode", "in the last decode"]
BY_BUFFER += ["behind the first collective", "behind the last collective"]
WAYS = {  # the number of ranks, and where a rank can fail by itself
    "module": (2, BY_LEAF),
    "register": (2, BY_LEAF),
    "replicas": (2, BY_LEAF),
    "shards": (2, BY_BUFFER),
    "shards and replicas": (
        4,
        ["in the first codec", "in the last codec", "in the last collective", "behind the last gradient"],
    ),
    "attach": (2, BY_LEAF),
}
CASES = [
    pytest.param(n, way, point, id=f"{way}-{point}", marks=[pytest.mark.thorough] if n > 2 else [])
    for way, (n, points) in WAYS.items()
    for point in points
]


def check_failures(rank: int, way: str, point: str) -> None:
    training, straight = Training(way), Training(way)
    for each in (training, straight):
        with failing(C10d, "start", -1) as calls:
            each.step(rank, 0)  # in which the order of gradients is learnt
    for step in (1, 2, 3):
        training.step(rank, step)
        straight.step(rank, step)
        assert training.all == straight.all
        before, model, optimizer = training.state(), training.model.state_dict(), training.optimizer.state_dict()
        held, kept = bits(before), copy.deepcopy((model, optimizer))
        if step == 3:
            break
        told = "at (start|_run|reduce|cast|added_up|an interrupt)|Interrupt has"
        told += "|its backward did not finish"  # of an error that breaks a backward off
        raises = pytest.raises((Trap, Interrupt) if rank == 1 else StepFailedError, match=told)
        with raises, POINTS[point](len(calls)) if rank == 1 else nullcontext():
            training.step(rank, 10 + step)
        assert bits(training.state()) == held
        if way == "attach":  # which takes the local step before
            training.model.load_state_dict(kept[0])
            training.optimizer.load_state_dict(kept[1])


@pytest.mark.parametrize(("n", "way", "point"), CASES)
def test_a_failure_of_one_rank_is_one_on_all_and_leaves_no_trace(gloo, n, way, point):
    gloo(n, check_failures, way, point)


def check_abandoned(rank: int, way: str) -> None:
    training, straight = Training(way), Training(way)
    for step in range(3):
        training.step(rank, step)
        straight.step(rank, step)
        assert training.all == straight.all
        held = bits(training.state())
        with pytest.raises(Trap), broken_off():
            training.step(rank, 10 + step)
        assert bits(training.state()) == held


def test_a_backward_that_is_broken_off_leaves_no_trace(gloo):
    """(FSDP itself adds what is left of such a backward to the next one, and torch's class does not go on.)"""
    gloo(2, check_abandoned, "module")


def check_interrupt_behind_the_vote(rank: int, way: str) -> None:
    training = Training(way)
    training.step(rank, 0)
    with pytest.raises(Interrupt) if rank == 1 else nullcontext(), ending(way) if rank == 1 else nullcontext():
        training.step(rank, 1)
    if rank == 1:
        with pytest.raises(RuntimeError, match="an earlier step failed on this rank"):
            training.step(rank, 2)


def ending(way: str) -> Any:
    """Let an interrupt come when all ranks have agreed, and this one has not applied the result."""
    if way == "module":
        return interrupted(Steps, "_keeps_promises")
    return interrupted(Reduction if way == "shards" else Step, "commit")


@pytest.mark.parametrize("way", ["module", "register", "shards", "attach"])
def test_an_interrupt_behind_the_vote_lets_the_rank_refuse(gloo, way):
    gloo(2, check_interrupt_behind_the_vote, way)


def check_dead_wire(rank: int, way: str) -> None:
    training = Training(way)
    training.step(rank, 0)
    held = bits(training.state())
    dead = failing(C10d, "vote", error=RuntimeError("the peer is gone"))
    with pytest.raises(CollectiveError, match="the peer is gone"), dead:
        training.step(rank, 1)
    with pytest.raises(RuntimeError, match="an earlier step failed on this rank|desynchronized"):
        training.step(rank, 2)
    if way != "shards":
        assert bits(training.state()) == held


@pytest.mark.parametrize("way", ["module", "register", "replicas", "attach"])
def test_after_a_collective_that_failed_no_rank_goes_on(gloo, way):
    gloo(2, check_dead_wire, way)


class Replica(Training):
    """A replica of torchft's, whose parameters, optimizer and state a replica that joins would get."""

    def __init__(self, name: str, address: str) -> None:
        from torchft import Optimizer

        from fnddp.integrations.torchft import DistributedDataParallel

        self.net = network()
        self.sgd = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.manager = new_manager(name, address, self)
        self.model = DistributedDataParallel(self.manager, self.net, sync=fnddp.parse(LOSSY), bucket_cap_mb=1e-4)
        self.state = lambda: self.model.sync_state
        self.optimizer = Optimizer(self.manager, self.sgd)

    def state_dict(self) -> Any:
        return self.net.state_dict(), self.sgd.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        self.net.load_state_dict(saved[0])
        self.sgd.load_state_dict(saved[1])


def hangs_up(wire: Any, *_: Any) -> None:
    wire.hang_up()


def points_of_replicas(count: int) -> dict[str, Any]:
    from fnddp.integrations.torchft import ManagerWire

    return {
        "before the first gradient": failing(nn.Tanh, "forward"),
        "in a backward that is broken off": broken_off(),
        "in a segment": failing(Step, "_run"),
        "in the first collective": failing(ManagerWire, "start"),
        "in the last collective": failing(ManagerWire, "start", count - 1),
        "behind the last gradient": failing(Vote, "cast"),
        "on a dead wire": before(ManagerWire, "start", count - 1, hangs_up),
        "on a wire that is dead at the vote": before(ManagerWire, "vote", 0, hangs_up),
    }


def train_as_replica(name: str, address: str, folder: Path, _: Any) -> None:
    """Fail at one point after the other, in steps that both replicas discard, beside a module in which nothing fails.

    An error is raised where it is, and nowhere else: not even there, where the wire is dead.
    """
    rank = int(name[1])
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "straight"), 2), rank=rank, world_size=2)
    training, straight = Replica(name, address), Training("module")
    with failing(type(training.model._wire), "start", -1) as calls:
        training.step(rank, 0)
    straight.step(rank, 0)
    for step, point in enumerate(points_of_replicas(0), 1):
        assert training.all == straight.all
        assert training.manager.current_step() == step
        held = training.all, bits(training.sgd.state_dict())
        fails = points_of_replicas(len(calls))[point] if rank == 1 else nullcontext()
        raises = pytest.raises(Trap) if rank == 1 and "wire" not in point else nullcontext()
        with raises, fails:
            training.step(rank, 10 + step)
        assert (training.all, bits(training.sgd.state_dict())) == held
        for each in (training, straight):
            each.step(rank, step)
    assert training.all == straight.all
    assert training.model._engine.failed_steps == step
    training.manager.shutdown(wait=False)


@pytest.mark.thorough
def test_replicas_of_torchft_discard_a_step_that_fails_and_go_on():
    pytest.importorskip("torchft")
    on_processes(2, train_as_replica)


def check_refusal_within(rank: int) -> None:
    """A backward that does not begin at the model's outputs, where the step would: its first gradient begins it."""
    training, within = Training("replicas"), []
    training.model[0].register_forward_hook(lambda _, __, output: within.append(output))
    for step in range(2):
        training.step(rank, step)
    training.optimizer.zero_grad()
    training.model(torch.ones(4, 6))
    within[-1].square().mean().backward()
    assert training.model[0].weight.grad is not None
    dead = failing(C10d, "vote", error=RuntimeError("the peer is gone"))
    with pytest.raises(CollectiveError, match="the peer is gone"), dead:
        training.step(rank, 2)
    training.optimizer.zero_grad()
    training.model(torch.ones(4, 6))
    with pytest.raises(RuntimeError, match="an earlier step failed on this rank"):
        within[-1].square().mean().backward()


def test_a_step_of_replicas_that_cannot_begin_at_a_gradient_raises(gloo):
    gloo(2, check_refusal_within)
