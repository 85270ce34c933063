"""A training script with fnddp.DistributedDataParallel: accumulation, a checkpoint, and the plan that it runs.

python examples/module.py
torchrun --nproc-per-node 2 examples/module.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fnddp
from fnddp.cli import digits  # real handwritten digits and a small MLP; needs pip install 'fnddp[demo]'

STEPS, BATCH_SIZE, ACCUMULATED = 200, 16, 2


class Training:
    """A model, its optimizer, and how they are saved. Only the line with `sync=` is not the usual one."""

    def __init__(self) -> None:
        sync = fnddp.error_feedback(fnddp.powersgd(fnddp.bf16(fnddp.allreduce), rank=2))
        self.model = fnddp.DistributedDataParallel(digits.make_model(seed=0), sync=sync)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, data: digits.Digits, number: int) -> None:
        generator = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
        self.optimizer.zero_grad()
        with self.model.no_sync():  # gradients add up on this rank
            for _ in range(ACCUMULATED - 1):
                self._backward(data, generator)
        self._backward(data, generator)  # synchronizes their sum, while it runs
        self.optimizer.step()

    def _backward(self, data: digits.Digits, generator: torch.Generator) -> None:
        x, y = data.batch(BATCH_SIZE, generator)
        (nn.functional.cross_entropy(self.model(x), y) / ACCUMULATED).backward()

    def save(self, path: Path) -> None:
        checkpoint = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sync": fnddp.state_dict(self.model.sync_state),
        }
        torch.save(checkpoint, path)

    def load(self, path: Path) -> None:
        checkpoint = torch.load(path, weights_only=True)
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.model.sync_state = fnddp.load_state_dict(self.model.sync_state, checkpoint["sync"])


def main() -> None:
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = digits.load()
    shard = train_set.shard(rank, world_size)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rank{rank}.pt"  # residuals are each rank's own, so every rank saves
        training = Training()
        for number in range(STEPS // 2):
            training.step(shard, number)
        training.save(path)

        resumed = Training()
        resumed.load(path)
        for run in (training, resumed):
            for number in range(STEPS // 2, STEPS):
                run.step(shard, number)

    pairs = zip(training.model.parameters(), resumed.model.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    module = training.model.module
    accuracy = digits.accuracy(module, dict(module.named_parameters()), test_set)
    if rank == 0:
        print(training.model.plan)
        print(f"{training.model.sync}, world size {world_size}: {accuracy:.2%} of the test set")
        print(f"the module resumed with the same parameters to the bit: {'yes' if same else 'no'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
