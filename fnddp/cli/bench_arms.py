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
BF16_ON_CPU = "torch registers its bf16 hook with NCCL on CUDA only; compare with fp16_hook"
POWERSGD_ON_GLOO = "torch's PowerSGD hook waits inside future callbacks, which aborts on gloo"


@dataclass(frozen=True)
class Setup:
    """A benchmark as it was asked for."""

    model: str  # as `fnddp.cli.models.load` takes it
    pipelines: list[Sync]  # ours
    peers: list[str]  # to compare with, of `PEERS`
    ranks: int
    parameters: int  # elements that are trained
    engine: str = "ddp"  # how a pipeline is run: "ddp", "register" or "value_and_grad"
    compiled: bool = False  # compile the step. Ours are then functional, whatever the engine
    device: str = "cpu"  # "cpu" or "cuda"
    pairs: int = 30  # timed rounds; each runs every arm once
    seed: int = 0  # of the parameters and of the order of arms in a round
    is_profiled: bool = False  # measure where the time of a step goes, too
    backend: str | None = None  # that runs the segments of our plans
    link: str | None = None  # rate of each rank's link; None for loopback
    launcher: str | None = None  # that has started the ranks; None if they were started here

    @property
    def names(self) -> list[str]:
        """The arms, in order: ours, then the peers. One that occurs twice is numbered."""
        texts = [*map(repr, self.pipelines), *self.peers]
        return [f"{text} #{n}" if (n := texts[: i + 1].count(text)) > 1 else text for i, text in enumerate(texts)]

    @property
    def functional(self) -> bool:
        """True where ours are functions of parameters, and not modules."""
        return self.compiled or self.engine == "value_and_grad"


@dataclass(frozen=True)
class Arm:
    """A way to run a training step: forward, loss, backward, with or without synchronization."""

    step: Callable[[], None]  # runs one
    clear: Callable[[], None]  # drops the gradients of the last
    wire_bytes: Callable[[], int]  # counts the bytes that a step passes to its collectives, by running one


def check_machine(device: str, link: str | None, backend: str | None, compiled: bool) -> None:
    """Raise a WrongArgument if this machine has no such ranks, or `backend` would not be used."""
    if device == "cuda" and not torch.cuda.is_available():
        raise WrongArgument("--device cuda, but there is no CUDA device here")
    if device == "cuda" and link is not None:
        raise WrongArgument("--link shapes what gloo sends; leave it out with --device cuda")
    if backend is not None and compiled:
        raise WrongArgument("--backend is for what plans compute, and steps that are compiled whole have none")


def check_peers(against: str, device: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return the peers in `against` that can run on `device` and `ranks` ranks; and the others, with the reason.

    Raises:
        WrongArgument: One is unknown, or none is left.
    """
    names = [name.strip() for name in against.split(",")]
    if unknown := [name for name in names if name not in PEERS]:
        hint = did_you_mean(unknown[0], PEERS) or f"; known ones are {', '.join(PEERS)}"
        raise WrongArgument(f"--against: unknown peer {unknown[0]!r}{hint}")
    impossible = {"bf16_hook": BF16_ON_CPU} | ({"powersgd_hook": POWERSGD_ON_GLOO} if ranks > 1 else {})
    left_out = {name: impossible[name] for name in names if device == "cpu" and name in impossible}
    peers = [name for name in names if name not in left_out]
    if not peers:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in left_out.items())
        raise WrongArgument(f"--against {against}: no peer is left to compare with; add ddp{reasons}")
    return peers, left_out


def make_arms(setup: Setup, device: torch.device) -> list[Arm]:
    """Return the arms of `setup` on this rank, in the order of its names. All start from the same parameters."""
    rank, workload = dist.get_rank(), load(setup.model)
    task = workload.task(BATCH_SIZE)
    loss = task.loss
    generator = torch.Generator().manual_seed(rank)
    batch = tuple(part.to(device) for part in task.batch(rank, dist.get_world_size(), generator))

    def module() -> nn.Module:
        return workload.make(setup.seed).to(device)

    ours = [_ours(sync, setup, module(), loss, batch) for sync in setup.pipelines]
    return ours + [_peer(peer, setup, module(), loss, batch) for peer in setup.peers]


def _ours(sync: Sync, setup: Setup, module: nn.Module, loss: Loss, batch: Batch) -> Arm:
    if setup.functional:
        return _functional(setup, module, loss, batch, sync)
    if setup.engine == "ddp":
        return _module(fnddp.DistributedDataParallel(module, sync=sync, backend=setup.backend), loss, batch)
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
    fnddp.register(wrapped, sync, backend=setup.backend)
    return _module(wrapped, loss, batch)


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

    return Arm(step, module.zero_grad, partial(_count, step))


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
        # A compiled step hides its collectives. The same pipeline on the same tree passes the same bytes to them.
        return 0 if sync is None else _count(partial(sync, params, state))

    return Arm(step, clear, wire_bytes if setup.compiled else partial(_count, step))


def _count(step: Callable[[], object]) -> int:
    with WireCounter() as counter:
        step()
    return counter.wire_bytes
