"""FSDP2 with codecs on all axes: gradients and weights of its shards, and its replicas.

torchrun --nproc-per-node 4 examples/integrations/fsdp_axes.py

Two replicas of two shards each train on handwritten digits, with batches of different sizes, which the means weigh. A
checkpoint of all four ranks is loaded in the middle.
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fnddp import Link
from fnddp.cli import digits  # real handwritten digits; needs pip install 'fnddp[demo]'
from fnddp.integrations.checkpoint import load, save
from fnddp.integrations.fsdp import Compressed, compress

STEPS, BATCH = 80, 32


def make() -> tuple[nn.Module, torch.optim.Optimizer, Compressed]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    fully_shard(model[0], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    handle = compress(
        model,
        mesh,
        gradients="weighted(error_feedback(quantize(two_shot, bits=4)))",
        weights="quantize(allgather)",
        replicas="weighted(error_feedback(powersgd(bf16(allreduce), rank=2)))",
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), handle


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, handle: Compressed, data: digits.Digits, begin: int, end: int
) -> None:
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x, y = data.batch(BATCH - 4 * dist.get_rank(), generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        with handle.weight(len(x)):
            loss.backward()
        optimizer.step()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach() for name, p in model.named_parameters() if isinstance(p, DTensor)}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train_set, test_set = digits.load()
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)

    model, optimizer, handle = make()
    train(model, optimizer, handle, train_set, 0, STEPS // 2)
    save(folders[0], model, optimizer, sync=handle)
    train(model, optimizer, handle, train_set, STEPS // 2, STEPS)

    resumed, optimizer, again = make()
    load(folders[0], resumed, optimizer, sync=again)
    train(resumed, optimizer, again, train_set, STEPS // 2, STEPS)

    trained, other = whole(model), whole(resumed)
    same = all(torch.equal(trained[name], other[name]) for name in trained)
    accuracy = digits.accuracy(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), trained, test_set)
    if dist.get_rank() == 0:
        print(f"world size {dist.get_world_size()}: {accuracy:.2%} of the test set")
        print(handle.plan.show(Link.parse("1gbit:100us")))
        print(f"the resumed run has the same parameters to the bit: {'yes' if same else 'no'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
