"""torch.distributed.checkpoint of model, optimizer and pipeline in one call, also in the background.

torchrun --nproc-per-node 2 examples/integrations/distributed_checkpoint.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fnddp import DistributedDataParallel, parse
from fnddp.cli import digits  # real handwritten digits; needs pip install 'fnddp[demo]'
from fnddp.integrations.checkpoint import async_save, load

SYNC = "error_feedback(powersgd(bf16(allreduce), rank=2))"
STEPS, BATCH = 60, 32


def make() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(net, sync=parse(SYNC))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: digits.Digits, begin: int, end: int) -> None:
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x, y = data.batch(BATCH, generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train_set, test_set = digits.load()
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    first, second = Path(folders[0]) / "thread", Path(folders[0]) / "process"

    model, optimizer = make()
    train(model, optimizer, train_set, 0, STEPS // 3)
    in_thread = async_save(first, model, optimizer, more={"step": STEPS // 3})
    train(model, optimizer, train_set, STEPS // 3, 2 * STEPS // 3)  # while it is written
    in_thread.result()
    in_process = async_save(second, model, optimizer, more={"step": 2 * STEPS // 3}, in_process=True)
    train(model, optimizer, train_set, 2 * STEPS // 3, STEPS)
    in_process.result()

    same = True
    for folder in (first, second):
        resumed, optimizer = make()
        begin = load(folder, resumed, optimizer, more={"step": 0})["step"]
        train(resumed, optimizer, train_set, begin, STEPS)
        pairs = zip(model.parameters(), resumed.parameters(), strict=True)
        same = same and all(torch.equal(a, b) for a, b in pairs)
    if dist.get_rank() == 0:
        accuracy = digits.accuracy(model.module, {}, test_set)
        print(f"world size {dist.get_world_size()}: {accuracy:.2%} of the test set")
        print(f"both resumed runs have the same parameters to the bit: {'yes' if same else 'no'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
