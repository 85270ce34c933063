"""FSDP2 with experts: two meshes in one module, each with a pipeline of its own.

torchrun --nproc-per-node 4 examples/integrations/fsdp_experts.py

Two experts, each sharded over two ranks, and all else over four. Handwritten digits go to the expert that their router
chooses. Losses are divided by the digits of all ranks, so gradients are sums, and the run is that of one process with
all digits, but for what four bits lose. A checkpoint is loaded in the middle.
"""

import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult  # no public names yet
from torch.distributed.tensor import DTensor

from fnddp import Link
from fnddp.cli import digits  # real handwritten digits; needs pip install 'fnddp[demo]'
from fnddp.integrations.checkpoint import load, save
from fnddp.integrations.fsdp import Shards, compress_shards

STEPS, BATCH, EXPERTS = 60, 32, 2


class Experts(nn.Module):
    """A layer whose tokens go to one of the experts: all of them here, or one on each rank of `mesh`."""

    def __init__(self, width: int, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.router, self.mesh = nn.Linear(width, EXPERTS), mesh
        every = {str(i): nn.Linear(width, width) for i in range(EXPERTS)}
        own = [*every] if mesh is None else [str(mesh.get_local_rank())]
        self.experts = nn.ModuleDict({name: every[name] for name in own})  # by number: a checkpoint tells them apart

    def forward(self, x: Tensor) -> Tensor:
        score, choice = self.router(x).softmax(-1).max(-1)
        order, sizes = choice.argsort(stable=True), choice.bincount(minlength=EXPERTS)
        if self.mesh is None:
            y = torch.cat(
                [of(part) for of, part in zip(self.experts.values(), x[order].split(sizes.tolist()), strict=True)]
            )
        else:
            group = self.mesh.get_group()
            arriving = torch.empty_like(sizes)
            dist.all_to_all_single(arriving, sizes, group=group)
            there, here = sizes.tolist(), arriving.tolist()
            (expert,) = self.experts.values()
            y = expert(all_to_all_single_autograd(x[order], here, there, group))
            y = all_to_all_single_autograd(y, there, here, group)
        return x + torch.empty_like(y).index_copy(0, order, y.relu()) * score.unsqueeze(-1)


def network(mesh: DeviceMesh | None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), Experts(128, mesh), nn.Linear(128, 10))


def make(mesh: DeviceMesh, whole: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer, Shards]:
    model = network(mesh["expert"])
    of_experts = ShardPlacementResult(None, FSDPMeshInfo(mesh["expert_shard"], 0))
    experts = {*model[1].experts.parameters()}
    fully_shard(model[1], mesh=whole, shard_placement_fn=lambda p: of_experts if p in experts else None)
    fully_shard(model, mesh=whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sums
    shards = compress_shards(
        model,
        gradients={"*.experts.*": "error_feedback(quantize(two_shot, bits=4))", "*": "quantize(two_shot)"},
        weights={"*.experts.*": "quantize(allgather)", "*": "allgather"},
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), shards


def batches(data: digits.Digits, step: int) -> list[tuple[Tensor, Tensor]]:
    """The batch of each rank."""
    ranks = range(dist.get_world_size())
    return [data.batch(BATCH, torch.Generator().manual_seed(step * len(ranks) + rank)) for rank in ranks]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: digits.Digits, begin: int, end: int) -> None:
    for step in range(begin, end):
        every = batches(data, step)
        x, y = (torch.cat(parts) for parts in zip(*every, strict=True))
        tokens = len(x)
        if any(isinstance(p, DTensor) for p in model.parameters()):
            x, y = every[dist.get_rank()]
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x), y, reduction="sum") / tokens).backward()
        optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train_set, test_set = digits.load()
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // EXPERTS, EXPERTS), mesh_dim_names=("expert_shard", "expert")
    )
    whole = mesh._flatten("whole")

    model, optimizer, shards = make(mesh, whole)
    train(model, optimizer, train_set, 0, STEPS // 2)
    save(folders[0], model, optimizer, sync=shards)
    train(model, optimizer, train_set, STEPS // 2, STEPS)

    resumed, optimizer, again = make(mesh, whole)
    load(folders[0], resumed, optimizer, sync=again)
    train(resumed, optimizer, train_set, STEPS // 2, STEPS)
    pairs = zip(model.parameters(), resumed.parameters(), strict=True)
    same = all(torch.equal(p.to_local(), q.to_local()) for p, q in pairs)

    alone = network(None)
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), train_set, 0, STEPS)
    with torch.no_grad():
        x, y = test_set
        out = [(each(x).argmax(-1) == y).float().mean().item() for each in (model, alone)]
    if dist.get_rank() == 0:
        print(f"world size {dist.get_world_size()}: {out[0]:.2%} of the test set, and {out[1]:.2%} in one process")
        print(shards.plan.show(Link.parse("1gbit:100us")))
        print(f"the resumed run has the same parameters to the bit: {'yes' if same else 'no'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
