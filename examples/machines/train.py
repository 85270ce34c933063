r"""Training on several machines that goes on where it was, to the bit, after ranks have died and were started again.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d \
    --rdzv-endpoint localhost:29500 examples/machines/train.py --folder SHARED --die-at 25

Set the variable with every --max-restarts, on one machine too: without it, ranks that are started again read the
addresses of the last ones, which are gone, from a store that torchrun keeps for all attempts.
"""

import argparse
import hashlib
import os
import signal
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fnddp import DistributedDataParallel, parse
from fnddp.cli import digits  # real handwritten digits; needs pip install 'fnddp[demo]'
from fnddp.integrations.checkpoint import load, save

SYNC = "error_feedback(powersgd(bf16(allreduce), rank=2))"
BATCH, STEPS, EVERY = 32, 40, 10  # a checkpoint every so many steps


def latest(folder: Path) -> Path | None:
    """The last checkpoint that is whole. One rank looks: a shared file system may show others an older one."""
    name = folder / "latest"
    found = [name.read_text() if dist.get_rank() == 0 and name.exists() else None]
    dist.broadcast_object_list(found)
    return None if found[0] is None else folder / found[0]


def save_step(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    save(folder / f"step-{step}", model, optimizer, more={"step": step})
    if dist.get_rank() == 0:  # `save` returns when all ranks have written; the name is replaced at once, or not at all
        (folder / "latest.new").write_text(f"step-{step}")
        (folder / "latest.new").replace(folder / "latest")


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def train(net: nn.Module, device: torch.device, folder: Path, die_at: int | None = None) -> str:
    """Trains from the last checkpoint on, in the default process group. Returns a digest of the parameters.

    Args:
        net: From `make`, on its device.
        device: Of this rank.
        folder: For checkpoints; all machines see it.
        die_at: Before this step the last rank kills itself, the first time.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data, test_set = digits.load()
    model = DistributedDataParallel(net, sync=parse(SYNC))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpoint = latest(folder)
    begin = 0 if checkpoint is None else load(checkpoint, model, optimizer, more={"step": 0})["step"]
    for step in range(begin, STEPS):
        if step == die_at and begin == 0 and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(step * world_size + rank)  # so a step that is repeated has its batch
        x, y = (part.to(device) for part in data.batch(BATCH, generator))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            save_step(folder, step + 1, model, optimizer)

    hosts = [""] * world_size
    dist.all_gather_object(hosts, socket.gethostname())
    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in net.parameters())).hexdigest()[:16]
    if rank == 0:
        accuracy = digits.accuracy(net.cpu(), {}, test_set)
        print(f"world size {world_size} on {', '.join(dict.fromkeys(hosts))}: {accuracy:.2%} of the test set")
        print(f"from step {begin}; parameters {digest}", flush=True)
    return digest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; all machines see it")
    parser.add_argument("--die-at", type=int, metavar="STEP", help="a rank kills itself, once it has a checkpoint")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(make().to(device), device, options.folder, options.die_at)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
