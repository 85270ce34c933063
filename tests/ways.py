"""The ways in, each as a `Way`: how a model trains by it, what its state is, and where a step of it can fail.

tests/test_ways.py runs each of them through each of its events, and demands `SAME` unless `Way.cells` says otherwise.
"""

import copy
import itertools
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import outer
from fnddp.integrations import checkpoint
from fnddp.integrations.fsdp import compress, compress_replicas, compress_shards, matrices, own_matrices
from fnddp.integrations.fsdp.unit import Unit
from fnddp.laws import bits
from fnddp.reducers import halves
from fnddp.run.step import Step
from fnddp.run.vote import Vote
from fnddp.wire.c10d import C10d
from tests.sharded import meshes

LOSSY = "error_feedback(fp16(allreduce))"
TWO_HOPS = "error_feedback(quantize(two_shot, bits=4, block=16))"
SMALL = 1e-4  # MiB: several buckets


# Cells


@dataclass(frozen=True)
class Refuses:
    """All ranks raise an error that matches `text`."""

    text: str


@dataclass(frozen=True)
class Absent:
    """There is no such event for this way in, because of `reason`."""

    reason: str


REFUSED = Refuses("an earlier step failed on this rank|desynchronized")
SAME = "ends as a run that was not disturbed, to the bit"


# What trains


class Trap(Exception):
    """An error of the test's."""


class Interrupt(KeyboardInterrupt):
    """Ctrl-C, which may come between any two operations."""


@dataclass
class Batch:
    """The input of a forward: micro-batches `xs`, whether the part `extra` is used, and a factor of the loss.

    Attributes:
        trap: Where the forward or its backward raises: "forward", "leaf", "middle" or nowhere.
    """

    xs: list[Tensor]
    extra: bool = True
    factor: float = 1.0
    trap: str = ""


@dataclass(frozen=True)
class Shape:
    """How the parameters of a `Net` are, without an effect on its numbers.

    Attributes:
        layout: "rows", or "other": channels_last and transposed.
        extra: The part `extra` is "trained", "frozen", or "constant": no parameter at all.
        units: Whether FSDP shards layers on their own.
    """

    layout: str = "rows"
    extra: str = "trained"
    units: bool = True


class Net(nn.Module):
    """Layers, a leaf of four dimensions, another one that may be transposed, and a part that steps may leave out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def drawn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator) / 2

        self.image, self.turned = nn.Parameter(drawn(4, 3, 2, 2)), nn.Parameter(drawn(6, 4))
        self.first, self.last, self.extra = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(6, 4)
        for layer in (self.first, self.last, self.extra):
            for name, p in [*layer.named_parameters()]:
                p.data = drawn(*p.shape)
                if layer is self.extra and shape.extra != "trained":
                    p.requires_grad_(False)
                    if shape.extra == "constant":
                        delattr(layer, name)
                        layer.register_buffer(name, p.detach())
        if shape.layout == "other":
            self.image.data = self.image.data.to(memory_format=torch.channels_last)
            self.turned.data = self.turned.data.t().contiguous().t()

    def forward(self, batch: Batch) -> Tensor:
        if batch.trap == "forward":
            raise Trap("in forward")
        return sum((self.loss(x, batch) for x in batch.xs), torch.zeros((), device=batch.xs[0].device)) * batch.factor

    def loss(self, x: Tensor, batch: Batch) -> Tensor:
        image, turned = self.image.contiguous(), self.turned.contiguous()
        hidden = torch.tanh(self.first(x))
        if batch.trap == "middle":
            hidden.register_hook(_raises)
        if batch.trap == "leaf":
            turned = turned * 1.0
            turned.register_hook(_raises)
        y = self.last(hidden) + x @ turned
        return (self.extra(x) + y if batch.extra else y).square().mean() + x.mean() * image.square().mean()


def _raises(_: Tensor) -> None:
    raise Trap("in backward")


def batch(rank: int, step: int, *, device: str = "cpu", **options: Any) -> Batch:
    """Return the batch of a rank and a step; options are those of `Batch`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return Batch([torch.randn(4, 6, generator=generator).to(device)], **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, foreach=False)


# Points of failure


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


def failing(owner: Any, name: str, at: int = 0, error: BaseException | None = None) -> Any:
    """Let call number `at` of a method raise, once; yield the list of calls."""

    def act(*_: Any, **__: Any) -> None:
        raise error or Trap(f"at {name}")

    return before(owner, name, at, act)


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


@dataclass(frozen=True)
class Point:
    """A method in which a rank fails, and how many of its calls in a step are before the vote: None for all."""

    owner: Any
    name: str
    calls: int | None = None
    interrupts: bool = False

    def at(self, call: int) -> Any:
        return (interrupted if self.interrupts else failing)(self.owner, self.name, call)

    def __str__(self) -> str:
        return f"{'after' if self.interrupts else 'in'} {self.name}"


def on(wire: type) -> list[Point]:
    """Points of any pipeline on a wire: messages, and what comes between them."""
    return [Point(wire, "start"), Point(wire, "start", interrupts=True)]


BY_LEAF = [Point(Step, "_run", 1), Point(Step, "_run", 1, interrupts=True), Point(Vote, "cast", 1)]
BY_BUFFER = [Point(Unit, "reduce"), Point(halves, "added_up")]  # a codec's encode and decode


# The ways in


class Way:
    """A training by one way in. Made on all ranks.

    Attributes:
        ranks: The number of ranks that it needs.
        text: Its pipeline; `plain` is one without memory.
        cells: The cells of tests/test_ways.py that are not `SAME`, by event.
        points: Where a rank can fail by itself before the vote, so that all ranks raise and nothing has changed.
        tells: Whether the others raise a StepFailedError.
        traps: Where an error of the user's in forward or backward ends the step on all ranks, too.
        family: Those of one family load each other's checkpoints.
    """

    ranks = 2
    text, plain = LOSSY, "allreduce"
    cells: Mapping[str, Refuses | Absent] = {"a dead wire": REFUSED}
    points: list[Point] = [*on(C10d), *BY_LEAF]
    tells = True
    traps: tuple[str, ...] = ()
    family = ""

    model: Any
    optimizer: Any
    keeper: Any  # has `sync_state`

    def __init__(self, text: str = "", *, shape: Shape | None = None, device: str = "cpu") -> None:
        self.shape, self.device, self.text = shape or Shape(), device, text or self.text
        self.make()

    def make(self) -> None:
        raise NotImplementedError

    def net(self) -> Net:
        return Net(self.shape).to(self.device)

    def batch(self, rank: int, step: int, **options: Any) -> Batch:
        return batch(rank, step, device=self.device, **options)

    def step(self, *batches: Batch) -> None:
        """Train one step; gradients of several batches accumulate, and are synchronized in the last one."""
        self.optimizer.zero_grad()
        for each in batches[:-1]:
            with self.no_sync():
                self.model(each).backward()
        self.model(batches[-1]).backward()
        if all(p.grad is None or bool(local(p.grad).isfinite().all()) for p in self.model.parameters()):
            self.optimizer.step()

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.model.no_sync()

    def evaluate(self, x: Batch) -> Tensor:
        with torch.no_grad():
            return self.model(x)

    @property
    def state(self) -> Any:
        return self.keeper.sync_state

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The parameters, whole."""
        named = getattr(self.model, "module", self.model).named_parameters()
        return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in named}

    @property
    def all(self) -> Any:
        """The bits of all that training goes on with."""
        held = {name: local(p) for name, p in self.model.named_parameters()}
        return bits([held, self.optimizer.state_dict()["state"], self.state])

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, self.model, self.optimizer, sync=self.keeper)

    def load(self, folder: Path, **options: Any) -> None:
        checkpoint.load(folder, self.model, self.optimizer, sync=self.keeper, **options)

    def set_sync(self, text: str) -> None:
        """Continue with another pipeline, from its initial state."""
        self.keeper.sync = fnddp.parse(text)

    def reset(self) -> None:
        self.keeper.reset_sync()


def local(tensor: Any) -> Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


class Module(Way):
    traps = ("leaf", "middle")
    family = "data parallel"

    def make(self) -> None:
        self.model = fnddp.DistributedDataParallel(self.net(), sync=fnddp.parse(self.text), bucket_cap_mb=SMALL)
        self.optimizer, self.keeper = sgd(self.model), self.model

    def load(self, folder: Path, **options: Any) -> None:
        checkpoint.load(folder, self.model, self.optimizer, **options)

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, self.model, self.optimizer)


class Register(Way):
    family = "data parallel"
    cells = {
        **Way.cells,
        "another pipeline": Refuses("has no setter"),
        "an error of all ranks in backward": Refuses("Expected to have finished reduction in the prior"),  # torch's
    }

    def make(self) -> None:
        self.model = TorchDDP(self.net(), bucket_cap_mb=SMALL, find_unused_parameters=self.shape.extra == "trained")
        self.keeper = fnddp.register(self.model, fnddp.parse(self.text))
        self.optimizer = sgd(self.model)


class Functional(Way):
    """What keeps nothing between steps: the caller has parameters and state."""

    family = "functional"
    cells = {
        **Way.cells,
        "accumulation": Absent("the caller adds gradients up"),
    }

    def make(self) -> None:
        self.model = self.net()
        self.optimizer, self.sync = sgd(self.model), fnddp.parse(self.text)
        self.params = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        self.run, self.kept = self.made(), self.sync.init(self.params)

    def loss(self, params: dict[str, Tensor], each: Batch) -> Tensor:
        return torch.func.functional_call(self.model, params, (each,))

    def made(self) -> Any:
        return fnddp.value_and_grad(self.loss, self.sync)

    def means(self, each: Batch) -> tuple[dict[str, Tensor | None], Any]:
        _, mean, state = self.run(self.params, self.kept, each)
        return mean, state

    def step(self, *batches: Batch) -> None:
        (each,) = batches
        mean, self.kept = self.means(each)
        if all(leaf is None or bool(leaf.isfinite().all()) for leaf in mean.values()):
            for name, p in self.model.named_parameters():
                p.grad = mean.get(name)
            self.optimizer.step()

    @property
    def state(self) -> Any:
        return self.kept

    def save(self, folder: Path) -> None:
        saved = (self.model.state_dict(), self.optimizer.state_dict(), fnddp.state_dict(self.kept))
        torch.save(saved, folder / f"{dist.get_rank()}.pt")

    def load(self, folder: Path, *, reset_sync: bool = False) -> None:
        saved = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=True)
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        if not reset_sync:
            self.kept = fnddp.load_state_dict(self.kept, saved[2])

    def set_sync(self, text: str) -> None:
        self.sync = fnddp.parse(text)
        self.run, self.kept = self.made(), self.sync.init(self.params)

    def reset(self) -> None:
        self.kept = self.sync.init(self.params)


class ValueAndGrad(Functional):
    traps = ("forward", "leaf", "middle")


class Jit(Functional):
    def made(self) -> Any:
        return fnddp.jit(self.sync)

    def means(self, each: Batch) -> tuple[dict[str, Tensor | None], Any]:
        return self.run(torch.func.grad(self.loss)(self.params, each), self.kept)


WAYS: dict[str, type[Way]] = {
    "module": Module,
    "register": Register,
    "value_and_grad": ValueAndGrad,
    "jit": Jit,
}
