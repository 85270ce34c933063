"""Models that FSDP2 shards, on gloo ranks: made, trained and read in one way by all tests of its axes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import debug
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """Shapes that do not divide by the shards, a bias of one element, and a layer that some steps leave out."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 9), nn.Linear(9, 5), nn.Linear(5, 1)])
        self.extra = nn.Linear(5, 5)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, extra: bool = True) -> dict[str, Tensor]:
        first, second, last = self.layers
        x = first(x).tanh()
        x = checkpoint(second, x, use_reentrant=False) if self.checkpointed else second(x)
        return {"out": last(x.tanh() + self.extra(x) if extra else x)}


def meshes(*shape: int, names: str = "replicate shard", kind: str = "cpu") -> DeviceMesh:
    """A mesh. DTensor remembers equal ones of earlier tests in this process, whose groups are gone."""
    debug._clear_sharding_prop_cache()
    return init_device_mesh(kind, shape, mesh_dim_names=tuple(names.split()))


def sharded(
    mesh: Any = None,
    *,
    seed: int = 0,
    checkpointed: bool = False,
    frozen: bool = False,
    compiled: bool = False,
    grouped: bool = False,
    **options: Any,
) -> Any:
    """`Net`, with groups of parameters for each layer."""
    torch.manual_seed(seed)
    model = Net(checkpointed).to("cpu" if mesh is None else mesh.device_type)
    if frozen:
        model.layers[1].weight.requires_grad_(False)
    parts: list[Any] = [*model.layers, model.extra]
    for i, part in enumerate([parts[0], parts[1:3], parts[3]] if grouped else parts):
        fully_shard(part, mesh=mesh, **options)
        if compiled and i < 3:
            model.layers[i].compile(backend="aot_eager")
    return fully_shard(model, mesh=mesh, **options)


def batches(steps: int, seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    return [torch.randn(4, 6, generator=generator) for _ in range(steps)]


def loss(model: nn.Module, x: Tensor, **options: Any) -> Tensor:
    y = model(x, **options)
    return (y["out"] if isinstance(y, dict) else y).square().mean()


def train(
    model: nn.Module, steps: list[Tensor], no_sync: Callable[[], Any] = nullcontext, optimizer: Any = None
) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in steps:
        first, second = x.chunk(2)
        with no_sync():
            loss(model, first).backward()
        loss(model, second).backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def switched_off(switch: Callable[[bool], None]) -> Iterator[None]:
    switch(False)
    yield
    switch(True)


def local(model: nn.Module) -> Tensor:
    parameters: Any = model.parameters()
    return torch.cat([p.to_local().detach().flatten() for p in parameters])


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """The weights with which a forward of this rank computes."""
    modules: Any = [module for module in model.modules() if hasattr(module, "unshard")]
    for module in modules:
        module.unshard()
    weights = {name: getattr(p, "_local_tensor", p).detach().clone() for name, p in model.named_parameters()}
    for module in modules:
        module.reshard()
    return weights


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for name, p in model.named_parameters()}
