"""The arms of a benchmark: one training step with each pipeline and each peer, ready to be called."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import fnddp
from fnddp.cli.models import Batch, Loss, load
from fnddp.sync import Sync
from fnddp.wire.counter import WireCounter

PEERS = ("ddp", "fp16_hook", "bf16_hook", "powersgd_hook", "none")

Params = dict[str, Tensor]
Step = Callable[[], None]


@dataclass(frozen=True)
class Setup:
    """What is benchmarked.

    Attributes:
        model: As `fnddp.cli.models.load` takes it.
        pipelines: Ours.
        peers: To compare with, of `PEERS`.
        engine: How a pipeline is run: "ddp", "register" or "value_and_grad".
        compiled: Compile the step. Ours are then functional, whatever the engine.
        device: "cpu" or "cuda".
        pairs: Timed rounds; each runs every arm once.
        seed: Of the parameters and of the order of arms in a round.
        is_profiled: Whether to say where the time of a step goes.
        backend: Who runs the segments of our plans.
    """

    model: str
    pipelines: list[Sync]
    peers: list[str]
    engine: str = "ddp"
    compiled: bool = False
    device: str = "cpu"
    pairs: int = 30
    seed: int = 0
    is_profiled: bool = False
    backend: str | None = None

    @property
    def names(self) -> list[str]:
        """The arms, in order: ours, then the peers. One that occurs twice is numbered."""
        texts = [*map(repr, self.pipelines), *self.peers]
        return [f"{text} #{n}" if (n := texts[: i + 1].count(text)) > 1 else text for i, text in enumerate(texts)]

    @property
    def functional(self) -> bool:
        """Whether ours are functions of parameters, and not modules."""
        return self.compiled or self.engine == "value_and_grad"


@dataclass(frozen=True)
class Arm:
    """A way to run a training step: forward, loss, backward, with or without synchronization.

    Attributes:
        step: Runs one.
        clear: Drops the gradients of the last.
        wire_bytes: Counts what a step hands to its collectives, by running one.
    """

    step: Step
    clear: Step
    wire_bytes: Callable[[], int]


def why_not(peer: str, device: str, ranks: int) -> str | None:
    """Why `peer` cannot run on `device` on so many ranks; None if it can."""
    if device == "cpu" and peer == "bf16_hook":
        return "torch registers its bf16 hook with NCCL on CUDA only; compare with fp16_hook"
    if device == "cpu" and ranks > 1 and peer == "powersgd_hook":
        return "torch's PowerSGD hook waits inside future callbacks, which aborts on gloo"
    return None


def make_arms(setup: Setup, rank: int, device: torch.device) -> list[Arm]:
    """The arms of `setup` on this rank, in the order of its names. All start from the same parameters."""
    workload = load(setup.model)
    task = workload.task()
    batch = tuple(part.to(device) for part in task.batch(rank))

    def module() -> nn.Module:
        torch.manual_seed(setup.seed)
        return workload.make().to(device)

    ours = [
        _functional(setup, module(), task.loss, batch, sync)
        if setup.functional
        else _module(_wrap(module(), sync, setup), task.loss, batch)
        for sync in setup.pipelines
    ]
    return ours + [_peer(peer, setup, module(), task.loss, batch) for peer in setup.peers]


def _wrap(module: nn.Module, sync: Sync, setup: Setup) -> nn.Module:
    if setup.engine == "ddp":
        return fnddp.DistributedDataParallel(module, sync=sync, backend=setup.backend)
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
    fnddp.register(wrapped, sync, backend=setup.backend)
    return wrapped


def _peer(peer: str, setup: Setup, module: nn.Module, loss: Loss, batch: Batch) -> Arm:
    if peer == "none" and setup.functional:
        return _functional(setup, module, loss, batch, sync=None)
    if setup.compiled:
        module.compile()
    if peer == "none":
        return _module(module, loss, batch)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    if peer == "fp16_hook":
        model.register_comm_hook(None, fp16_compress_hook)
    elif peer == "bf16_hook":
        model.register_comm_hook(None, bf16_compress_hook)
    elif peer == "powersgd_hook":  # from the first step that it can
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)
    return _module(model, loss, batch)


def _module(module: nn.Module, loss: Loss, batch: Batch) -> Arm:
    def step() -> None:
        loss(module, batch).backward()

    return Arm(step, module.zero_grad, lambda: _count(step))


def _functional(setup: Setup, module: nn.Module, loss: Loss, batch: Batch, sync: Sync | None) -> Arm:
    params = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    buffers = dict(module.named_buffers())

    def loss_fn(params: Params, *batch: Tensor) -> Tensor:
        # torch.func lets a step change only buffers that are its own.
        own = {name: buffer.clone() for name, buffer in buffers.items()}
        return loss(lambda *inputs: functional_call(module, (params, own), inputs), batch)

    def train_step(params: Params, state: Any, *batch: Tensor) -> tuple[Tensor, Params, Any]:
        grads, value = torch.func.grad_and_value(loss_fn)(params, *batch)
        if sync is not None:
            grads, state = sync(grads, state)
        return value, grads, state

    run = train_step if sync is None or setup.compiled else fnddp.value_and_grad(loss_fn, sync, backend=setup.backend)
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

    def wire_bytes() -> int:
        # A compiled step hides its collectives. The same pipeline on the same tree hands over the same bytes.
        return 0 if sync is None else _count(partial(sync, params, state))

    return Arm(step, clear, wire_bytes if setup.compiled else lambda: _count(step))


def _count(step: Callable[[], object]) -> int:
    with WireCounter() as counter:
        step()
    return counter.wire_bytes
