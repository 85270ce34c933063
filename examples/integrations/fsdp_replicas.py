"""FSDP2 with a pipeline between the replicas: HSDP, whose slow half is compressed.

torchrun --nproc-per-node 4 examples/integrations/fsdp_replicas.py

Two replicas of two shards each train on handwritten digits. A checkpoint of all four ranks is loaded in the middle.
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fnddp.cli import digits  # real handwritten digits; needs pip install 'fnddp[demo]'
from fnddp.integrations.checkpoint import load, save
from fnddp.integrations.fsdp import Replicas, compress_replicas

SYNC = "error_feedback(powersgd(bf16(allreduce), rank=2))"
STEPS, BATCH = 80, 32


def make() -> tuple[nn.Module, torch.optim.Optimizer, Replicas]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    fully_shard(model[0], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    replicas = compress_replicas(model, SYNC, mesh["replicate"])
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), replicas


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: digits.Digits, begin: int, end: int) -> None:
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x, y = data.batch(BATCH, generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach() for name, p in model.named_parameters() if isinstance(p, DTensor)}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train_set, test_set = digits.load()
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)

    model, optimizer, replicas = make()
    train(model, optimizer, train_set, 0, STEPS // 2)
    save(folders[0], model, optimizer, sync=replicas)
    train(model, optimizer, train_set, STEPS // 2, STEPS)

    resumed, optimizer, replicas = make()
    load(folders[0], resumed, optimizer, sync=replicas)
    train(resumed, optimizer, train_set, STEPS // 2, STEPS)

    trained, again = whole(model), whole(resumed)
    same = all(torch.equal(trained[name], again[name]) for name in trained)
    plain = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    accuracy = digits.accuracy(plain, trained, test_set)
    if dist.get_rank() == 0 and replicas.plan is not None:
        gradients = sum(4 * tensor.numel() for tensor in trained.values()) // 2
        print(f"world size {dist.get_world_size()}: {accuracy:.2%} of the test set")
        print(f"between replicas a rank sends {replicas.plan.wire_bytes:,} B a step, of {gradients:,} B of gradients")
        print(f"the resumed run has the same parameters to the bit: {'yes' if same else 'no'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
