"""Ranks with different numbers of batches: join, with a pipeline that compresses.

python examples/uneven.py
torchrun --nproc-per-node 2 examples/uneven.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnddp
from fnddp.cli import digits  # real handwritten digits and a small MLP; needs pip install 'fnddp[demo]'

EPOCHS, BATCH_SIZE = 6, 16


def main() -> None:
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = digits.load()
    x, y = train_set.shard(rank, world_size)
    count = len(y) * (rank + 1) // world_size  # the last rank has most
    torch.manual_seed(rank)
    batches = DataLoader(TensorDataset(x[:count], y[:count]), BATCH_SIZE, shuffle=True)

    sync = fnddp.error_feedback(fnddp.powersgd(fnddp.bf16(fnddp.allreduce), rank=2))
    model = fnddp.DistributedDataParallel(digits.make_model(seed=0), sync=sync)
    # Without momentum: of a rank that is done early it would not be that of the others in the next epoch.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    for _ in range(EPOCHS):
        with model.join():  # who is done takes part in the others' steps, with zeros and its residual
            for inputs, labels in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()

    counts: list[int] = [0] * world_size
    dist.all_gather_object(counts, len(batches))
    parameters = nn.utils.parameters_to_vector(model.parameters()).detach()
    others = [torch.empty_like(parameters) for _ in range(world_size)]
    dist.all_gather(others, parameters)
    same = all(torch.equal(parameters, other) for other in others)
    accuracy = digits.accuracy(model.module, {}, test_set)
    if rank == 0:
        print(f"{model.sync}, world size {world_size}: {accuracy:.2%} of the test set")
        print(f"batches per epoch and rank: {', '.join(map(str, counts))}")
        print(f"all ranks have the same parameters to the bit: {'yes' if same else 'no'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
