"""Ways in, on the accelerator of this folder: each is given the rank, the device and a pipeline.

It returns a step, and a function that returns what the steps have changed.
"""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fnddp
from fnddp import outer
from fnddp.core import tree
from fnddp.integrations.fsdp import compress, compress_replicas, compress_shards
from fnddp.laws import bits
from tests.sharded import meshes, sharded
from tests.ways import Manager

STEPS = 9
FEEDBACK = "error_feedback(fp16(allreduce))"


def small(rank: int, device: str) -> tuple[nn.Module, list[Tensor]]:
    """A network, and this rank's batch of each step."""
    torch.manual_seed(0)
    net, generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), torch.Generator().manual_seed(rank)
    return net.to(device), [torch.randn(4, 6, generator=generator).to(device) for _ in range(STEPS)]


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)


Step = Callable[[Tensor], Tensor]


def trained(rank: int, device: str, way: Any, given: tuple[Any, ...] = (), steps: int = STEPS) -> Any:
    """Return the bits of what eager steps change."""
    step, found = way(rank, device, *given)
    for batch in small(rank, device)[1][:steps]:
        step(batch)
    return bits(found())


def step_of(
    model: nn.Module, optimizer: Any, around: Any = nullcontext, scale: Any = lambda x: x, **options: Any
) -> Step:
    """Return a step whose gradients are cleared with `options`, and whose backward is within `around()`."""

    def step(x: Tensor) -> Tensor:
        model.zero_grad(**options)
        out = model(x)
        loss = (out["out"] if isinstance(out, dict) else out).square().mean()
        with around():
            scale(loss).backward()
        optimizer.step()
        return loss.detach()

    return step


def together(optimizers: list[Any]) -> Any:
    return SimpleNamespace(step=lambda: [each.step() for each in optimizers])


def the_class(rank: int, device: str, text: str, **options: Any) -> tuple[Step, Any]:
    net = small(rank, device)[0]
    model = fnddp.DistributedDataParallel(net, sync=fnddp.parse(text), bucket_cap_mb=0.0002)
    weight = torch.full((), 2.0 + rank, dtype=torch.float64, device=device)

    def around() -> Any:
        weight.add_(rank + 1)  # in the graph
        return model.weight(weight) if model.sync.takes_weight else nullcontext()

    return step_of(model, sgd(net), around, **options), lambda: [dict(net.named_parameters()), model.sync_state]


class Branches(nn.Module):
    """Two layers, of which a forward may leave one out."""

    def __init__(self, uses_both: bool) -> None:
        super().__init__()
        self.used, self.left_out, self.uses_both = nn.Linear(6, 5), nn.Linear(6, 5), uses_both

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + self.left_out(x) if self.uses_both else self.used(x)


def branches(rank: int, device: str, text: str, *users: int) -> tuple[Step, Any]:
    """Only the ranks `users` have a gradient of one layer."""
    net = Branches(rank in users).to(device)
    model = fnddp.DistributedDataParallel(net, sync=fnddp.parse(text), find_unused_parameters=True)
    return step_of(model, sgd(net)), lambda: dict(net.named_parameters())


def register(rank: int, device: str, text: str) -> tuple[Step, Any]:
    with torch.Stream(device):  # torch's reducer waits for the stream on which it was made
        model = TorchDDP(small(rank, device)[0], bucket_cap_mb=0.0002)
        handle = fnddp.register(model, fnddp.parse(text)) if text else None
    torch.accelerator.synchronize()
    step = step_of(model, sgd(model))
    return step, lambda: [dict(model.named_parameters()), handle and handle.sync_state]


def value_and_grad(rank: int, device: str, text: str) -> tuple[Step, Any]:
    net, sync = small(rank, device)[0], fnddp.parse(text)

    def loss(params: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(net, params, (x,)).square().mean()

    return functional(net, sync, fnddp.value_and_grad(loss, sync))


def jit(rank: int, device: str, text: str) -> tuple[Step, Any]:
    net, run = small(rank, device)[0], fnddp.jit(text)

    def step(params: Any, state: Any, x: Tensor) -> Any:
        return x.sum(), *run({name: each * x.mean() for name, each in params.items()}, state)

    return functional(net, run.sync, step)


def functional(net: nn.Module, sync: fnddp.Sync, run: Callable[..., Any]) -> tuple[Step, Any]:
    params = {name: p.detach() for name, p in net.named_parameters()}
    state = sync.init(params)

    def step(x: Tensor) -> Tensor:
        loss, mean, new = run(params, state, x)
        for name, p in params.items():
            p.sub_(0.1 * mean[name])
        for old, part in zip(*(tree.flatten_any(each)[0] for each in (state, new)), strict=True):
            if isinstance(part, Tensor):
                old.copy_(part)
        return loss

    return step, lambda: [params, state]


def owners(rank: int, device: str, text: str, weights: str = "allgather", n: int = 1) -> tuple[Step, Any]:
    net = small(rank, device)[0]
    parameters = list(net.parameters())
    optimizers = [torch.optim.SGD(parameters[i::n], lr=0.1, foreach=False) for i in range(n)]
    model = fnddp.own(net, optimizers, gradients=text, weights=weights)
    return step_of(model, together(optimizers)), lambda: dict(net.named_parameters())


def mesh_of(device: str, *shape: int) -> Any:
    return meshes(*shape, kind=device.split(":")[0])


def local_parts(model: nn.Module) -> dict[str, Tensor]:
    return {name: p._local_tensor for name, p in model.named_parameters()}


def shards(rank: int, device: str, text: str, weights: str | None = None) -> tuple[Step, Any]:
    model, numbers = sharded(mesh_of(device, 1, 2)["shard"]), count(2 + rank)
    handle: Any = compress_shards(model, text or None, weights) if text or weights else None
    around = (lambda: handle.weight(next(numbers))) if text.startswith("weighted") else nullcontext
    return step_of(model, sgd(model), around), lambda: [local_parts(model), handle and handle.sync_state]


def two_axes(rank: int, device: str, gradients: str, replicas: str, weights: str | None = None) -> tuple[Step, Any]:
    """HSDP: two process groups."""
    mesh = mesh_of(device, 2, 2)
    model = sharded(mesh["shard"])
    handle = compress(model, mesh, gradients=gradients, weights=weights, replicas=replicas)
    return step_of(model, sgd(model)), lambda: [local_parts(model), handle.sync_state]


def a_hook(rank: int, device: str) -> tuple[Step, Any]:
    net = small(rank, device)[0]
    model = fnddp.DistributedDataParallel(net, sync=fnddp.from_hook(allreduce_hook))
    return step_of(model, sgd(net)), lambda: dict(net.named_parameters())


def two_models(rank: int, device: str, is_joint: bool, *texts: str) -> tuple[Step, Any]:
    """Two modules in a step, as a generator and what judges it: in one backward, or one after the other."""
    nets = [small(rank, device)[0] for _ in texts]
    models = [fnddp.DistributedDataParallel(n, sync=fnddp.parse(t)) for n, t in zip(nets, texts, strict=True)]
    both, steps = nn.ModuleList(models), [step_of(each, sgd(each)) for each in models]
    optimizer = sgd(both)

    def step(x: Tensor) -> Tensor:
        if not is_joint:
            return torch.stack([each(x) for each in steps])
        both.zero_grad()
        loss = models[0](x).square().mean() + models[1](x).abs().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, lambda: [dict(both.named_parameters()), [each.sync_state for each in models]]


def a_compiled_model(rank: int, device: str, text: str, is_outside: bool) -> tuple[Step, Any]:
    net = small(rank, device)[0]
    inner: Any = net if is_outside else torch.compile(net, backend="aot_eager")
    model = fnddp.DistributedDataParallel(inner, sync=fnddp.parse(text), bucket_cap_mb=0.0002)
    outer: Any = torch.compile(model, backend="aot_eager") if is_outside else model
    return step_of(outer, sgd(net)), lambda: [dict(net.named_parameters()), model.sync_state]


def a_scaler(rank: int, device: str, text: str) -> tuple[Step, Any]:
    net = small(rank, device)[0]
    model = fnddp.DistributedDataParallel(net, sync=fnddp.parse(text), bucket_cap_mb=0.0002)
    scaler, optimizer = torch.amp.GradScaler(device.split(":")[0], init_scale=4.0), sgd(net)
    scaled = SimpleNamespace(step=lambda: (scaler.step(optimizer), scaler.update()))
    return step_of(model, scaled, scale=scaler.scale), lambda: [dict(net.named_parameters()), model.sync_state]


class OverWorld:
    """The process group of a manager, which sends tensors of the device."""

    def configure(self, *_: Any) -> None:
        """Connect nothing: all ranks are there."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist.group.WORLD, name)

    def getBackendName(self) -> str:
        return "simccl"


def torchft(rank: int, device: str, text: str) -> tuple[Step, Any]:
    from fnddp.integrations.torchft import DistributedDataParallel

    net, manager = small(rank, device)[0], Manager()
    manager._pg = OverWorld()
    model = DistributedDataParallel(manager, net, sync=fnddp.parse(text), bucket_cap_mb=0.0002)
    optimizer = sgd(net)
    model.register_forward_pre_hook(lambda *_: manager.start_quorum())
    committed = SimpleNamespace(step=lambda: manager.should_commit() and optimizer.step())
    return step_of(model, committed), lambda: [dict(net.named_parameters()), model.sync_state]


def replicas(rank: int, device: str, text: str, shards: int = 1) -> tuple[Step, Any]:
    mesh = mesh_of(device, 2, shards)
    model = sharded(mesh["shard"])
    handle = compress_replicas(model, text, mesh["replicate"])
    return step_of(model, sgd(model)), lambda: [local_parts(model), handle.sync_state]


def outer_steps(rank: int, device: str, text: str) -> tuple[Step, Any]:
    net = small(rank, device)[0]
    optimizer = sgd(net)
    outer.attach(net, optimizer, outer.parse(text))
    return step_of(net, optimizer), lambda: dict(net.named_parameters())
