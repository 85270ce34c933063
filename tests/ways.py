"""The ways in, each as a `Way`: how a model trains by it, what its state is, and where a step of it can fail.

tests/test_ways.py runs each of them through each of its events, and demands that it leaves no trace, unless `Way.cells`
says otherwise.
"""

import copy
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import outer
from fnddp.core.table import Hop
from fnddp.integrations import checkpoint
from fnddp.integrations.fsdp import Matrices, compress, compress_replicas, compress_shards, own_matrices
from fnddp.integrations.fsdp.shards import unsynchronized
from fnddp.integrations.fsdp.unit import Unit
from fnddp.laws import bits
from fnddp.run import hops
from fnddp.run.step import Step
from fnddp.run.vote import Vote
from fnddp.wire.c10d import C10d
from tests.sharded import meshes

LOSSY = "error_feedback(fp16(allreduce))"
TWO_HOPS = "error_feedback(quantize(two_shot, bits=4, block=16, rounding='stochastic'))"
RANDOM_HOP = "ef21(quantize(allgather, bits=4, block=16, rounding='stochastic'))"
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
SAME = None
DEFAULT: dict[str, Refuses | Absent | None] = {
    "a dead wire": REFUSED,
    "an error in the update": Absent("no optimizer of another rank takes part"),
}
"""The cells of most ways in that are not `SAME`: training ends as one that was not disturbed, to the bit."""


# What trains


class Trap(Exception):
    """An error of the test's."""


class Interrupt(KeyboardInterrupt):
    """Ctrl-C, which may come between any two operations."""


@dataclass
class Batch:
    """The input of a forward: micro-batches `xs`, whether the part `extra` is used, and a factor of the loss.

    Attributes:
        extra: The part `extra` is used, or times zero, or not at all.
        trap: Where the forward or its backward raises: "forward", "leaf", "middle" or nowhere.
    """

    xs: list[Tensor]
    extra: float | None = 1.0
    factor: float = 1.0
    trap: str = ""


@dataclass(frozen=True)
class Shape:
    """How a `Net` and its optimizer are made.

    Attributes:
        layout: "rows", or "other": channels_last and transposed.
        extra: The part `extra` is "trained", "frozen", or "constant": no parameter at all.
        units: Whether FSDP shards layers on their own.
        momentum: That of the optimizer.
    """

    layout: str = "rows"
    extra: str = "trained"
    units: bool = True
    momentum: float = 0.9


class Net(nn.Module):
    """Layers, a leaf of four dimensions, another one that may be transposed, and a part that steps may leave out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def drawn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator) / 2

        self.image, self.turned = nn.Parameter(drawn(4, 3, 2, 2)), nn.Parameter(drawn(6, 4))
        self.first, self.last, self.extra = nn.Linear(6, 8), nn.Linear(8, 4, bias=False), nn.Linear(6, 4, bias=False)
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
            hidden.register_hook(raising(Trap("in backward")))
        if batch.trap == "leaf":
            turned = turned * 1.0
            turned.register_hook(raising(Trap("in backward")))
        y = self.last(hidden) + x @ turned
        y = y if batch.extra is None else y + batch.extra * self.extra(x)
        return y.square().mean() + x.mean() * image.square().mean()


def batch(rank: int, step: int, *, device: str = "cpu", **options: Any) -> Batch:
    """Return the batch of a rank and a step; options are those of `Batch`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return Batch([torch.randn(4, 6, generator=generator).to(device)], **options)


# Points of failure


@contextmanager
def at_call(owner: Any, name: str, at: int, act: Callable[..., object], *, after: bool = False) -> Generator[list[int]]:
    """Run `act` before call number `at` of a method, or as it returns; yield the list of calls."""
    calls: list[int] = []
    original = getattr(owner, name)

    def run(*given: Any, **options: Any) -> Any:
        calls.append(len(calls))
        is_due = calls[-1] == at
        if is_due and not after:
            act(*given, **options)
        result = original(*given, **options)
        if is_due and after:
            act(*given, **options)
        return result

    with mock.patch.object(owner, name, run):
        yield calls


def raising(error: BaseException) -> Callable[..., object]:
    def act(*_: Any, **__: Any) -> None:
        raise type(error)(*error.args)  # a new one, which keeps nothing alive

    return act


def failing(owner: Any, name: str, at: int = 0, error: BaseException | None = None) -> Any:
    """Let call number `at` of a method raise, once; yield the list of calls."""
    return at_call(owner, name, at, raising(error or Trap(f"at {name}")))


def interrupted(owner: Any, name: str, at: int = 0) -> Any:
    """Let an interrupt come as call number `at` of a method returns."""
    return at_call(owner, name, at, raising(Interrupt("at an interrupt")), after=True)


@dataclass(frozen=True)
class Point:
    """A method in which a rank fails. Of its last calls in a step, `-after` are after the vote."""

    owner: Any
    name: str
    after: int = 0
    interrupts: bool = False

    def at(self, call: int) -> Any:
        return (interrupted if self.interrupts else failing)(self.owner, self.name, call)


def on(wire: type) -> tuple[Point, ...]:
    """Return the points of any pipeline on a wire: in each message, and after it."""
    return Point(wire, "start"), Point(wire, "start", interrupts=True)


# Segments of a plan encode and decode; the last one runs after the vote.
BY_LEAF = Point(Step, "_run", -1), Point(Step, "_run", -1, interrupts=True), Point(Vote, "cast")
# A codec's encode and decode, of each group of FSDP's parameters.
BY_BUFFER = Point(Unit, "reduce"), Point(Hop, "added")


# The ways in


class Way:
    """A training by one way in. Made on all ranks.

    Attributes:
        ranks: The number of ranks that it needs.
        text: Its pipeline; `plain` is one without memory, and `counted` one that counts steps.
        cells: The cells of the table that are not `SAME`, by event.
        points: Where a rank can fail by itself before the vote, so that all ranks raise and nothing has changed.
        traps: Where an error of the user's in forward or backward ends the step on all ranks, too.
        told: What the others' StepFailedError says; empty if they raise nothing.
        updates: Whether messages of the optimizer's step end as those of a backward do.
        wire: The class that sends.
        uses_alike: All ranks must use the same leaves in a step.
        owns: Ranks have other parts of the optimizer's state.
        shares: Its backward is that of another way in.
        undoes: A failed backward that began without gradients leaves none.
    """

    ranks = 2
    text, plain = LOSSY, "allreduce"
    counted = "error_feedback(warmup(bf16(allreduce), steps=5))"
    cells: Mapping[str, Refuses | Absent | None] = DEFAULT
    points: tuple[Point, ...] = (*on(C10d), *BY_LEAF)
    traps: tuple[str, ...] = ()
    told = "rank {} failed with"
    updates = False
    wire: type = C10d
    uses_alike = owns = shares = undoes = False
    device = "cpu"

    model: Any
    optimizer: Any
    keeper: Any  # has `sync_state`

    def __init__(self, text: str = "", *, shape: Shape | None = None, device: str = "") -> None:
        self.shape, self.text, self.device = shape or Shape(), text or self.text, device or self.device
        self.make()

    def make(self) -> None:
        raise NotImplementedError

    def net(self) -> Net:
        return Net(self.shape).to(self.device)

    def sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=self.shape.momentum, foreach=False)

    def batch(self, rank: int, step: int, **options: Any) -> Batch:
        return batch(rank, step, device=self.device, **options)

    def step(self, *batches: Batch) -> None:
        """Train one step; gradients of several batches accumulate, and are synchronized in the last one."""
        self.backward(*batches)
        self.update()

    def backward(self, *batches: Batch) -> None:
        self.model.zero_grad()
        for each in batches[:-1]:
            with self.no_sync():
                with self.no_sync():  # whose end is not that of the one around it
                    pass
                self.model(each).backward()
        self.model(batches[-1]).backward()

    def update(self) -> None:
        if self.is_finite():
            self.optimizer.step()

    def is_finite(self) -> bool:
        return all(p.grad is None or bool(local(p.grad).isfinite().all()) for p in self.model.parameters())

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.keeper.no_sync() if hasattr(self.keeper, "no_sync") else self.model.no_sync()

    def evaluate(self, x: Batch) -> Tensor:
        with torch.no_grad():
            return self.model(x)

    def dead_wire(self, rank: int) -> AbstractContextManager[Any]:
        """Let the wire be dead at the end of a step."""
        return failing(self.wire, "vote", error=RuntimeError("the peer is gone"))

    @property
    def state(self) -> Any:
        return self.keeper.sync_state

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The trained parameters, whole."""
        named = getattr(self.model, "module", self.model).named_parameters()
        whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in named if p.requires_grad}
        return {name: p.detach().clone() for name, p in whole.items()}

    @property
    def all(self) -> Any:
        """The bits of all that training goes on with."""
        held = {name: local(p) for name, p in self.model.named_parameters() if p.requires_grad}
        of_optimizer = [{k: local(v) for k, v in of.items()} for of in self.optimizer.state_dict()["state"].values()]
        return bits([held, of_optimizer, self.state])

    def save(self, folder: Path) -> None:
        sync = None if self.keeper is self.model else self.keeper
        checkpoint.save(folder, self.model, self.optimizer, sync=sync)

    def load(self, folder: Path, **options: Any) -> None:
        sync = None if self.keeper is self.model else self.keeper
        checkpoint.load(folder, self.model, self.optimizer, sync=sync, **options)

    def set_state(self, state: Any) -> None:
        self.keeper.sync_state = state

    def set_sync(self, text: str) -> None:
        """Continue with another pipeline, from its initial state."""
        self.keeper.sync = fnddp.parse(text)

    def reset(self) -> None:
        self.keeper.reset_sync()

    def end(self) -> None:
        """Free what outlives the object. All ranks call it."""


def local(value: Any) -> Any:
    return value.to_local().detach() if hasattr(value, "to_local") else value


class Module(Way):
    traps, undoes = ("leaf", "middle"), True

    def make(self) -> None:
        self.model = fnddp.DistributedDataParallel(self.net(), sync=fnddp.parse(self.text), bucket_cap_mb=SMALL)
        self.optimizer, self.keeper = self.sgd(self.model), self.model


class Register(Way):
    cells = DEFAULT | {
        "another pipeline": Refuses("has no setter"),
        "an error of all ranks in backward": Refuses("Expected to have finished reduction in the prior"),  # torch's
        "deepcopy": Refuses("cannot be copied or pickled"),
        "pickle": Refuses("cannot be copied or pickled"),
    }

    def make(self) -> None:
        finds = self.shape.extra == "trained"
        self.model = TorchDDP(self.net(), bucket_cap_mb=SMALL, find_unused_parameters=finds)
        self.keeper = fnddp.register(self.model, fnddp.parse(self.text))
        self.optimizer = self.sgd(self.model)


class ValueAndGrad(Way):
    """The caller has parameters and state."""

    traps = "forward", "leaf", "middle"
    cells = DEFAULT | {
        "accumulation": Absent("the caller adds gradients up"),
        "states of other steps": Absent("the caller has the state"),
        "pickle": Refuses("pickle"),  # of a function within another one
    }

    def make(self) -> None:
        self.model = self.net()
        self.optimizer = self.sgd(self.model)
        self.set_sync(self.text)

    @property
    def params(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def loss(self, params: dict[str, Tensor], each: Batch) -> Tensor:
        return torch.func.functional_call(self.model, params, (each,))

    def made(self) -> Any:
        return fnddp.value_and_grad(self.loss, self.sync)

    def means(self, each: Batch) -> tuple[dict[str, Tensor | None], Any]:
        _, mean, state = self.run(self.params, self.kept, each)
        return mean, state

    def backward(self, *batches: Batch) -> None:
        (each,) = batches
        mean, self.kept = self.means(each)
        for name, p in self.model.named_parameters():
            p.grad = mean.get(name)

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
        self.reset()
        if not reset_sync:
            self.kept = fnddp.load_state_dict(self.kept, saved[2])

    def set_sync(self, text: str) -> None:
        self.sync = fnddp.parse(text)
        self.run = self.made()
        self.reset()

    def reset(self) -> None:
        self.kept = self.sync.init(self.params)


class Jit(ValueAndGrad):
    traps = ()
    cells = ValueAndGrad.cells | {"pickle": SAME}

    def made(self) -> Any:
        return fnddp.jit(self.sync)

    def means(self, each: Batch) -> tuple[dict[str, Tensor | None], Any]:
        return self.run(torch.func.grad(self.loss)(self.params, each), self.kept)


class Owners(Way):
    text, plain = "error_feedback(bf16(two_shot))", "two_shot"
    counted = TWO_HOPS
    traps = "leaf", "middle"
    cells = DEFAULT | {
        "deepcopy": Refuses("cannot be copied or pickled"),
        "pickle": Refuses("cannot be copied or pickled"),
        "an error in the update": Refuses("restart from a checkpoint"),
    }

    owns, undoes, weights = True, True, "allgather"

    def make(self) -> None:
        net = self.net()
        self.optimizer = self.sgd(net)
        with mock.patch.object(hops, "CUT", 16):  # leaves are cut by rows
            self.keeper = self.model = fnddp.own(net, self.optimizer, self.text, self.weights, bucket_cap_mb=SMALL)

    def is_finite(self) -> bool:
        return bool(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e9).isfinite())


class OwnersOfWeights(Owners):
    """Owners have weights of their own, which are more exact than the model's."""

    shares, weights = True, RANDOM_HOP


# FSDP's


class Fsdp(Way):
    cells = DEFAULT | {
        "memory formats": Refuses("contiguous"),  # FSDP's own
        "another pipeline": Refuses("has no setter"),
        "deepcopy": Refuses("does not support deepcopy"),
        "pickle": Refuses("Can't pickle"),
        "an error of all ranks in backward": Absent("FSDP adds what is left of such a backward to the next one"),
        "a thread that evaluates": Absent("two threads of FSDP gather and free one model's weights"),
    }

    uses_alike = True

    @property
    def all(self) -> Any:
        for part in self.model.modules():
            if hasattr(part, "reshard"):
                part.reshard()
        return super().all

    def sharded(self, mesh: Any = None) -> Any:
        net = self.net()
        for part in (net.first, net.last) if self.shape.units else ():
            fully_shard(part, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    def mesh(self, *shape: int) -> Any:
        return meshes(*shape, kind=self.device.split(":")[0])


class Shards(Fsdp):
    undoes = True
    text, plain = TWO_HOPS, "two_shot"
    counted = TWO_HOPS
    points = (*on(C10d), *BY_BUFFER)

    def make(self) -> None:
        self.model = self.sharded(self.mesh(1, dist.get_world_size())["shard"])
        self.keeper, self.optimizer = compress_shards(self.model, self.text), self.sgd(self.model)


class Replicas(Fsdp):
    def make(self) -> None:
        mesh = self.mesh(dist.get_world_size(), 1)
        self.model = self.sharded(mesh["shard"])
        self.keeper = compress_replicas(self.model, self.text, mesh["replicate"])
        self.optimizer = self.sgd(self.model)


class ShardsAndReplicas(Shards):
    ranks = 4
    points = (*Shards.points, Point(Vote, "cast"))
    cells = Shards.cells | {"another pipeline": Absent("as of shards alone")}

    def make(self) -> None:
        mesh = self.mesh(2, dist.get_world_size() // 2)
        self.model = self.sharded(mesh["shard"])
        replicas = LOSSY if self.text == TWO_HOPS else "allreduce"
        self.keeper = compress(self.model, mesh, gradients=self.text, replicas=replicas)
        self.optimizer = self.sgd(self.model)


class OwnedMatrices(Fsdp):
    text, plain, owns = RANDOM_HOP, "allgather", True
    points = (Point(Matrices, "require_same_parameters"),)
    told = "on another rank refused to begin"
    updates = True
    cells = Fsdp.cells | {
        "an error in the update": Refuses("an earlier step failed"),
        "another pipeline": Absent("the hops of an optimizer are for good"),
        "a dead wire": Absent("its messages are torch's, and end the process"),
        "reset": Absent("what owners have of weights is no memory of gradients"),
        "states of other steps": Absent("it has no state of gradients"),
        "an update in inference mode": Absent("Muon's own state would be inference tensors"),
    }

    def make(self) -> None:
        self.model = self.sharded(self.mesh(1, dist.get_world_size())["shard"])
        trained = [p for p in self.model.parameters() if p.ndim == 2 and p.requires_grad]
        self.optimizer = torch.optim.Muon(trained, lr=0.02, momentum=self.shape.momentum, weight_decay=0.0)
        gradients = "allgather" if self.text == self.plain else "quantize(allgather)"
        self.keeper = own_matrices(self.model, self.optimizer, gradients, self.text, bucket_cap_mb=SMALL)

    def no_sync(self) -> AbstractContextManager[Any]:
        return unsynchronized(self.model)

    @property
    def state(self) -> Any:
        return ()

    def save(self, folder: Path) -> None:
        model = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        saved = model, self.keeper.optimizer_state_dict()
        if dist.get_rank() == 0:
            torch.save(saved, folder / "0.pt")
        dist.barrier()

    def load(self, folder: Path) -> None:
        model, optimizer = torch.load(folder / "0.pt", weights_only=True)
        set_model_state_dict(self.model, model, options=StateDictOptions(full_state_dict=True))
        self.keeper.load_optimizer_state_dict(optimizer)


# Outer steps


class Attach(Way):
    """An outer step after each local one. A failed exchange leaves the local step, which is taken back here."""

    updates = True
    plain = "local_sgd(every=1)"
    cells = DEFAULT | {
        "a gradient that is not finite": Absent("all ranks must take the same number of local steps"),
        "weights that are written": Absent("an outer step counts them as a local one"),
        "hooks of a step": Absent("the outer step is one of them"),
        "another pipeline": Absent("attach another outer step"),
        "deepcopy": Refuses("cannot be copied or pickled"),
        "pickle": Refuses("cannot be copied or pickled|Can't pickle"),
    }

    def make(self) -> None:
        self.model = self.net()
        is_adam = self.text.startswith("des_loc")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False) if is_adam else self.sgd(self.model)
        self.keeper = outer.attach(self.model, self.optimizer, outer.parse(self.text))

    def update(self) -> None:
        held = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        try:
            super().update()
        except BaseException:
            self.model.load_state_dict(held[0])
            self.optimizer.load_state_dict(held[1])
            raise

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @property
    def state(self) -> Any:
        return self.keeper.state

    def set_state(self, state: Any) -> None:
        self.keeper.state = state

    def save(self, folder: Path) -> None:
        alone, _ = dist.new_subgroups(1)
        checkpoint.save(folder / str(dist.get_rank()), self.model, self.optimizer, sync=self.keeper, group=alone)

    def load(self, folder: Path, **options: Any) -> None:
        alone, _ = dist.new_subgroups(1)
        mine = folder / str(dist.get_rank())
        checkpoint.load(mine, self.model, self.optimizer, sync=self.keeper, group=alone, **options)

    def end(self) -> None:
        self.keeper.detach()


OUTER = {  # with rates of which no training diverges in a thousand steps
    "local_sgd": f"local_sgd(every=1, sync={LOSSY})",
    "post_local_sgd": "post_local_sgd(start=1, every=1, sync=allgather)",
    "hierarchical_local_sgd": "hierarchical_local_sgd({1: allreduce})",
    "diloco": f"diloco({LOSSY}, every=1, lr=0.01)",
    "streaming_diloco": "streaming_diloco(two_shot, every=1, fragments=1, lr=0.01)",
    "des_loc": "des_loc({'params': diloco(allgather, every=1), 'exp_avg': local_sgd(every=1)})",
    "sparse_loco": "sparse_loco(every=1, k=4, chunk=16)",
    "muloco": "muloco(every=1, lr=0.01)",
}


def attached(name: str) -> type[Attach]:
    # Each tree of des_loc has a step of its own, and what comes between them is after a vote.
    points = Attach.points[:1] if name == "des_loc" else Attach.points
    cells = {**Attach.cells}
    if name == "post_local_sgd":  # whose engine of parameters is set up in that step, as the wire's own error says
        cells["a dead wire"] = Refuses("the peer is gone")
        cells["a failure in the first step"] = Absent("it exchanges nothing in it")
    if name == "des_loc":
        cells["an update in inference mode"] = Absent("AdamW's own state would be inference tensors")
    counted = OUTER[name].replace("every=1", "every=3")
    of_name = {"text": OUTER[name], "counted": counted, "points": points, "cells": cells}
    return type(f"Attach_{name}", (Attach,), of_name)


# torchft's


class Manager(SimpleNamespace):
    """As much of torchft's manager as its classes ask for, between ranks of the pool, none of which is ever lost."""

    def __init__(self) -> None:
        from torchft import ProcessGroupGloo

        super().__init__(_use_async_quorum=False, _replica_world_size_mode=SimpleNamespace(name="DYNAMIC"))
        self._min_replica_size, self._quorum_id, self._is_due, self._error = dist.get_world_size(), -1, True, None
        self._user_state_dicts, self._load_state_dict_fns = {"default": lambda: None}, {}
        self._pg = ProcessGroupGloo(timeout=timedelta(seconds=30))
        names: list[Any] = [f"manager {uuid4()}"]  # an id may come again, and ranks would read old addresses
        dist.broadcast_object_list(names)
        store: Any = _get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self._place = f"{store.host}:{store.port}/{names[0]}"

    def start_quorum(self) -> None:
        self._error = None
        if self._is_due:
            self._quorum_id += 1
            self._pg.configure(f"{self._place}/{self._quorum_id}", str(dist.get_rank()), dist.get_rank(), 2)
            self._is_due = False

    def should_commit(self) -> bool:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self._error is not None)
        self._is_due = any(everyone)
        return not any(everyone)

    def num_participants(self) -> int:
        return dist.get_world_size() if self._quorum_id >= 0 else 0

    def participating_rank(self) -> int | None:
        return dist.get_rank() if self._quorum_id >= 0 else None

    def errored(self) -> Any:
        return self._error

    def report_error(self, error: Exception) -> None:
        self._error = self._error or SimpleNamespace(original_exception=error)

    def register_state_dict_fn(self, key: str, load: Any, give: Any) -> None:
        self._user_state_dicts[key], self._load_state_dict_fns[key] = give, load


def hangs_up(wire: Any, *_: Any) -> None:
    wire.hang_up()


if find_spec("torchft") is None:
    TORCHFT: dict[str, type[Way]] = {}
else:
    from fnddp.integrations import torchft

    class OfManager:
        """What the ways in of torchft share: a step is in a quorum, and a dead wire makes another one."""

        cells = DEFAULT | {
            "a dead wire": SAME,
            "deepcopy": Absent("of a manager there is one"),
            "pickle": Absent("of a manager there is one"),
            "states of other steps": Absent("a replica sets its own, and gets that of others when it joins"),
        }
        points = (Point(torchft.ManagerWire, "start"), *BY_LEAF)  # after a message nobody knows that it was sent
        wire = torchft.ManagerWire

        def dead_wire(self, rank: int) -> AbstractContextManager[Any]:
            return at_call(torchft.ManagerWire, "vote", 0, hangs_up) if rank == 1 else nullcontext()

    class Torchft(OfManager, Way):
        cells = OfManager.cells | {"a checkpoint after a failure": Absent("a step that failed ends with its commit")}
        traps = "forward", "leaf", "middle"
        told = ""

        def make(self) -> None:
            net, self.manager = self.net(), Manager()
            self.model = torchft.DistributedDataParallel(
                self.manager, net, sync=fnddp.parse(self.text), bucket_cap_mb=SMALL
            )
            self.keeper, self.optimizer = self.model, self.sgd(net)

        def backward(self, *batches: Batch) -> None:
            self.manager.start_quorum()
            super().backward(*batches)

        def update(self) -> None:
            if self.manager.should_commit():
                super().update()

    class TorchftFunctional(OfManager, ValueAndGrad):
        cells = OfManager.cells | ValueAndGrad.cells | {"a dead wire": SAME}

        def made(self) -> Any:
            self.manager = Manager()
            return fnddp.value_and_grad(self.loss, self.sync, wire=torchft.ManagerWire(self.manager))

        def means(self, each: Batch) -> tuple[dict[str, Tensor | None], Any]:
            self.manager.start_quorum()
            try:
                done = super().means(each)
            except BaseException:
                assert not self.manager.should_commit()
                raise
            assert self.manager.should_commit()
            return done

    TORCHFT = {"torchft": Torchft, "torchft_functional": TorchftFunctional}


WAYS: dict[str, type[Way]] = {
    "module": Module,
    "register": Register,
    "value_and_grad": ValueAndGrad,
    "jit": Jit,
    "own": Owners,
    "own_weights": OwnersOfWeights,
    "compress_shards": Shards,
    "compress_replicas": Replicas,
    "compress": ShardsAndReplicas,
    "own_matrices": OwnedMatrices,
    **{name: attached(name) for name in OUTER},
    **TORCHFT,
}
FAMILIES = [
    (LOSSY, ["module", "register", *[name for name in TORCHFT if name == "torchft"]]),
    ("two_shot", ["module", "register", "own"]),
    (LOSSY, ["value_and_grad", "jit"]),
]
"""Ways in that load each other's checkpoints, of one pipeline."""
