"""Gradients of several small batches, synchronized once: no_sync, with a pipeline that compresses.

python examples/accumulation.py
torchrun --nproc-per-node 2 examples/accumulation.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fnddp
from fnddp.cli import digits  # real handwritten digits and a small MLP; needs pip install 'fnddp[demo]'

STEPS, MICRO_BATCHES, BATCH_SIZE = 100, 4, 8


def accumulate(model: fnddp.DistributedDataParallel, x: Tensor, y: Tensor) -> None:
    """The gradient of a batch, of which only a fourth is in memory at a time."""
    micro_batches = list(zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True))
    with model.no_sync():  # gradients add up on this rank
        for micro_x, micro_y in micro_batches[:-1]:
            (nn.functional.cross_entropy(model(micro_x), micro_y) / MICRO_BATCHES).backward()
    micro_x, micro_y = micro_batches[-1]
    (nn.functional.cross_entropy(model(micro_x), micro_y) / MICRO_BATCHES).backward()  # synchronizes their sum


def main() -> None:
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = digits.load()
    shard = train_set.shard(rank, world_size)
    generator = torch.Generator().manual_seed(rank)

    # It gives what one backward of the whole batch gives.
    model = fnddp.DistributedDataParallel(digits.make_model(seed=0))
    x, y = shard.batch(MICRO_BATCHES * BATCH_SIZE, generator)
    accumulate(model, x, y)
    whole = fnddp.DistributedDataParallel(digits.make_model(seed=0))
    nn.functional.cross_entropy(whole(x), y).backward()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    same = all(torch.allclose(one.grad, other.grad, atol=1e-6) for one, other in pairs)

    # The pipeline runs once for each step of the optimizer.
    model.sync = fnddp.error_feedback(fnddp.powersgd(fnddp.bf16(fnddp.allreduce), rank=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        accumulate(model, *shard.batch(MICRO_BATCHES * BATCH_SIZE, generator))
        optimizer.step()

    accuracy = digits.accuracy(model.module, {}, test_set)
    if rank == 0:
        backwards = MICRO_BATCHES * STEPS
        print(f"{model.sync}, world size {world_size}: {accuracy:.2%} of the test set")
        print(f"{backwards} backward passes, {STEPS} synchronizations of {model.plan.wire_bytes:,} bytes")
        print(f"accumulated gradients are those of the whole batch: {'yes' if same else 'no'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
