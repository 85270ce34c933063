"""An existing DistributedDataParallel script with another gradient synchronization, saved and resumed.

python examples/existing_ddp.py
torchrun --nproc-per-node 2 examples/existing_ddp.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fnddp
from fnddp.cli import digits  # real handwritten digits and a small MLP; needs pip install 'fnddp[demo]'

STEPS, BATCH_SIZE = 200, 32


class Training:
    """The script as it was, but for the line with `fnddp.register`."""

    def __init__(self) -> None:
        self.model = DistributedDataParallel(digits.make_model(seed=0))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        sync = fnddp.warmup(fnddp.error_feedback(fnddp.powersgd(fnddp.bf16(fnddp.allreduce), rank=2)), steps=30)
        self.handle = fnddp.register(self.model, sync)

    def run(self, data: digits.Digits, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
            x, y = data.batch(BATCH_SIZE, generator)
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()  # the pipeline runs in here
            self.optimizer.step()

    def save(self, path: Path) -> None:
        checkpoint = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sync": fnddp.state_dict(self.handle.sync_state),
        }
        torch.save(checkpoint, path)

    def load(self, path: Path) -> None:
        checkpoint = torch.load(path, weights_only=True)
        self.model.module.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.handle.sync_state = fnddp.load_state_dict(self.handle.sync_state, checkpoint["sync"])


def main() -> None:
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    train_and_resume()  # its models are gone when it returns: a DDP model that lives keeps gloo's threads alive
    dist.destroy_process_group()


def train_and_resume() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = digits.load()
    shard = train_set.shard(rank, world_size)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rank{rank}.pt"  # residuals are each rank's own, so every rank saves
        training = Training()
        training.run(shard, 0, STEPS // 2)
        training.save(path)
        training.run(shard, STEPS // 2, STEPS)

        resumed = Training()
        resumed.load(path)
        resumed.run(shard, STEPS // 2, STEPS)

    pairs = zip(training.model.parameters(), resumed.model.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    model = training.model.module
    accuracy = digits.accuracy(model, dict(model.named_parameters()), test_set)
    if rank == 0:
        print(f"{training.handle.sync}, world size {world_size}: {accuracy:.2%} of the test set")
        print(f"the resumed run has the same parameters to the bit: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main()
