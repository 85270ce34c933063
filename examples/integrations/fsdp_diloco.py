"""DiLoCo between workers that FSDP2 has sharded: each rank exchanges its shards, in 4 bits, every 20 steps.

torchrun --nproc-per-node 4 examples/integrations/fsdp_diloco.py

Two workers of two shards each train apart on handwritten digits. Each saves a checkpoint of its own in the middle, from
which both resume to the bit.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fnddp import Link, outer
from fnddp.cli import digits  # real handwritten digits; needs pip install 'fnddp[demo]'
from fnddp.integrations.checkpoint import load, save
from fnddp.integrations.fsdp import plan_axes

STEPS, BATCH = 120, 32
STEP = "diloco(error_feedback(quantize(two_shot, bits=4)), every=20)"


def make(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, outer.Attached]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    fully_shard(model[0], mesh=mesh["shard"])  # within a worker: FSDP averages the gradients of each step
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return model, optimizer, outer.attach(model, optimizer, outer.parse(STEP), group=mesh["worker"])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: digits.Digits, begin: int, end: int) -> None:
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x, y = data.batch(BATCH, generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()  # every 20th exchanges


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach() for name, p in model.named_parameters() if isinstance(p, DTensor)}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train_set, test_set = digits.load()
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("worker", "shard"))
    of_worker = mesh["shard"].get_group()
    folder = Path(folders[0]) / f"worker{mesh.get_local_rank('worker')}"
    model, optimizer, attached = make(mesh, seed=0)
    half = STEPS // 2 + 7
    train(model, optimizer, train_set, 0, half)
    save(folder, model, optimizer, sync=attached, group=of_worker)
    train(model, optimizer, train_set, half, STEPS)

    again, optimizer, resumed = make(mesh, seed=1)
    load(folder, again, optimizer, sync=resumed, group=of_worker)
    train(again, optimizer, train_set, half, STEPS)

    ours, theirs = whole(model), whole(again)
    same = all(torch.equal(ours[name], theirs[name]) for name in ours)
    everyone: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, ours)
    together = all(torch.equal(ours[name], other[name]) for other in everyone for name in ours)
    accuracy = digits.accuracy(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), ours, test_set)
    if dist.get_rank() == 0:
        print(f"world size {dist.get_world_size()}: {accuracy:.2%} of the test set")
        groups = {"": {name: torch.empty(p.shape, device="meta") for name, p in model.named_parameters()}}
        plan = plan_axes(groups, world_size={"shards": mesh.size(1), "workers": mesh.size(0)}, outer=STEP)
        inside, between = Link.parse("10gbit"), Link.parse("100mbit:20ms")
        print(plan.show({"gradients": inside, "weights": inside, "workers": between}))
        print(f"after the last exchange workers are equal to the bit: {'yes' if together else 'no'}")
        print(f"the resumed run has the same parameters to the bit: {'yes' if same else 'no'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
