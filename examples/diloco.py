"""A training script whose ranks train apart: DiLoCo after the optimizer's steps, a checkpoint, and the plan.

python examples/diloco.py
torchrun --nproc-per-node 2 examples/diloco.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fnddp
from fnddp import outer, quantize, two_shot
from fnddp.cli import digits  # real handwritten digits and a small MLP; needs pip install 'fnddp[demo]'

STEPS, BATCH_SIZE = 200, 32


class Training:
    """A model, its optimizer, and how they are saved. Only the line with `attach` is not a single machine's."""

    def __init__(self) -> None:
        # Half of the model starts its exchange after steps 10, 30, ..., the other after 20, 40, ..., in 4 bits; each
        # goes on for 3 local steps.
        step = outer.streaming_diloco(quantize(two_shot, bits=4), every=20, fragments=2, delay=3, alpha=0.5)
        self.model = digits.make_model(seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.attached = outer.attach(self.model, self.optimizer, step)

    def step(self, data: digits.Digits, number: int) -> None:
        generator = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
        x, y = data.batch(BATCH_SIZE, generator)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()  # now and then, this starts or ends an exchange

    def save(self, path: Path) -> None:
        parts = {"model": self.model, "optimizer": self.optimizer, "outer": self.attached}
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)

    def load(self, path: Path) -> None:
        checkpoint = torch.load(path, weights_only=True)
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.attached.load_state_dict(checkpoint["outer"])


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
        path = Path(folder) / f"rank{rank}.pt"  # parameters are each rank's own between exchanges, so every rank saves
        training = Training()
        for number in range(112):  # to the middle of an exchange
            training.step(shard, number)
        training.save(path)

        resumed = Training()
        resumed.load(path)
        for run in (training, resumed):
            with fnddp.WireCounter() as counter:
                for number in range(112, STEPS):
                    run.step(shard, number)

    pairs = zip(training.model.parameters(), resumed.model.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    anchor = training.attached.state.anchor  # equal on all ranks: what to evaluate, and to keep
    if rank == 0:
        print(outer.lower(training.attached.outer, dict(training.model.named_parameters())))
        accuracy = digits.accuracy(training.model, anchor, test_set)
        whole = sum(p.numel() * p.element_size() for p in anchor.values())
        print(f"world size {world_size}: {accuracy:.2%} of the test set")
        print(f"{counter.wire_bytes / (STEPS - 112):,.0f} B a step; a step's gradients would be {whole:,} B")
        print(f"resumed in the middle of an exchange, with the same parameters to the bit: {'yes' if same else 'no'}")
    for run in (training, resumed):
        run.attached.detach()  # finishes open exchanges; otherwise destroy_process_group may wait for their messages
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
