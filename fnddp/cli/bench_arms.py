"""The arms of a benchmark: one training step with each pipeline and each peer, ready to be called."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import fnddp
from fnddp.cli.failures import WrongArgument
from fnddp.cli.models import BATCH_SIZE, Batch, Loss, Params, load, trained
from fnddp.core.options import did_you_mean
from fnddp.core.sync import Sync
from fnddp.wire.counter import WireCounter

PEERS = ("ddp", "fp16_hook", "bf16_hook", "powersgd_hook", "none")

Step = Callable[[], None]


@dataclass(frozen=True)
class Setup:
    """What is benchmarked."""

    model: str  # as `fnddp.cli.models.load` takes it
    pipelines: list[Sync]  # ours
    peers: list[str]  # to compare with, of `PEERS`
    engine: str = "ddp"  # how a pipeline is run: "ddp", "register" or "value_and_grad"
    compiled: bool = False  # compile the step. Ours are then functional, whatever the engine
    device: str = "cpu"  # "cpu" or "cuda"
    pairs: int = 30  # timed rounds; each runs every arm once
    seed: int = 0  # of the parameters and of the order of arms in a round
    is_profiled: bool = False  # whether to say where the time of a step goes
    backend: str | None = None  # who runs the segments of our plans

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
    """A way to run a training step: forward, loss, backward, with or without synchronization."""

    step: Step  # runs one
    clear: Step  # drops the gradients of the last
    wire_bytes: Callable[[], int]  # counts what a step hands to its collectives, by running one


def check_machine(device: str, link: str | None, backend: str | None, compiled: bool) -> None:
    """Raise a WrongArgument if this machine has no such ranks, or `backend` would not be used."""
    if device == "cuda" and not torch.cuda.is_available():
        raise WrongArgument("--device cuda, but there is no CUDA device here")
    if device == "cuda" and link is not None:
        raise WrongArgument("--link shapes what gloo sends; leave it out with --device cuda")
    if backend is not None and compiled:
        raise WrongArgument("--backend is for what plans compute, and steps that are compiled whole have none")


def check_peers(against: str, device: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return the peers in `against` that can run on `device` and so many ranks; and which cannot, and why.

    Raises:
        WrongArgument: One is unknown, or none is left.
    """
    names = [name.strip() for name in against.split(",")]
    if unknown := [name for name in names if name not in PEERS]:
        hint = did_you_mean(unknown[0], PEERS) or f"; known ones are {', '.join(PEERS)}"
        raise WrongArgument(f"--against: unknown peer {unknown[0]!r}{hint}")
    left_out = {name: reason for name in names if (reason := why_not(name, device, ranks)) is not None}
    peers = [name for name in names if name not in left_out]
    if not peers:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in left_out.items())
        raise WrongArgument(f"--against {against}: no peer is left to compare with; add ddp{reasons}")
    return peers, left_out


def why_not(peer: str, device: str, ranks: int) -> str | None:
    """Why `peer` cannot run on `device` on so many ranks; None if it can."""
    if device == "cpu" and peer == "bf16_hook":
        return "torch registers its bf16 hook with NCCL on CUDA only; compare with fp16_hook"
    if device == "cpu" and ranks > 1 and peer == "powersgd_hook":
        return "torch's PowerSGD hook waits inside future callbacks, which aborts on gloo"
    return None


def make_arms(setup: Setup, device: torch.device) -> list[Arm]:
    """The arms of `setup` on this rank, in the order of its names. All start from the same parameters."""
    rank, workload = dist.get_rank(), load(setup.model)
    task = workload.task(BATCH_SIZE)
    generator = torch.Generator().manual_seed(rank)
    batch = tuple(part.to(device) for part in task.batch(rank, dist.get_world_size(), generator))

    def module() -> nn.Module:
        return workload.make(setup.seed).to(device)

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
    params = trained(module)
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
