"""torchft: replicas of several ranks, of which each has its own part of the model, as with tensor or pipeline parallel.

If one rank is lost, so is its replica: what started it starts all of its ranks again.
"""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("torchft", reason="torchft is not installed: pip install 'fnddp[torchft]'")

import fnddp
from fnddp.integrations.torchft import DistributedDataParallel, ManagerWire
from fnddp.laws import bits
from tests.replica import Network, Trap, meet, new_manager, read, wait_together, write
from tests.replicas import Job, on_processes

LOSSY = "error_feedback(powersgd(fp16(allreduce), rank=2))"
AT = 3  # the step in which something befalls a replica
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(150)]


@pytest.mark.parametrize(
    ("victim", "point"),
    [
        ("r2", "forward"),  # with which the replica's server dies
        ("r2", "collective 1"),
        ("r2", "commit"),
        ("r3", "backward"),
        ("r3", "vote"),
        ("r3", "stepped"),
    ],
)
def test_one_rank_of_a_replica_is_killed(victim, point):
    with Job(2, ranks=2, sync=LOSSY) as job:
        records = job.run({victim: Trap(point, AT)})
    assert job.incarnations == {"r0": 0, "r1": 0, "r2": 1, "r3": 1}
    for rank in range(2):
        assert any(r.participants == 1 and r.committed and r.rank == rank for r in records), "one replica went on alone"
    if point in ("forward", "collective 1", "backward", "vote"):
        # The ranks that had not lost anybody had means: they are gone as well.
        assert {r.replica for r in records if r.step == AT and not r.committed} == {"r0", "r1"}


class Sharded:
    """A network of which each rank of a replica has shards."""

    def __init__(self) -> None:
        self.net = Network(0)
        mesh = init_device_mesh("cpu", (2,))
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=mesh)

    def shards(self) -> dict[str, torch.Tensor]:
        return {name: p.to_local().detach() for name, p in self.net.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {name: shard.clone() for name, shard in self.shards().items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        for name, shard in self.shards().items():
            shard.copy_(saved[name])


def train_sharded(name: str, address: str, folder: Path, options: Mapping[str, Any]) -> None:
    replica, rank, together = meet(name, folder, 2)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / replica), 2), rank=rank, world_size=2)
    training = Sharded()
    manager = new_manager(replica, address, training, init_sync=False, **together)
    with pytest.raises(TypeError, match="DTensor"):
        DistributedDataParallel(manager, nn.Sequential(training.net))
    sync = fnddp.parse(LOSSY)
    step, state = fnddp.jit(sync, wire=ManagerWire(manager)), sync.init(training.shards())
    wait_together(name, folder, 4)
    lost = 0
    while manager.current_step() < AT + 3:
        manager.start_quorum()
        number = manager.current_step()
        if name == "r3" and number == AT:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * int(name[1]) + number))
        training.net(x).square().mean().backward()
        grads = {path: p.grad.to_local() for path, p in training.net.named_parameters()}
        training.net.zero_grad()
        try:
            mean, after = step(grads, state)
        except fnddp.CollectiveError:
            mean, after = {}, state
        if not manager.should_commit():  # the other rank may have lost somebody, and this one nobody
            lost += 1
            continue
        state = after
        for path, shard in training.shards().items():
            shard.sub_(0.1 * mean[path])
        write(folder / f"{name}-{number}", str(bits(training.shards())))
        other = folder / f"r{int(name[1]) ^ 2}-{number}"  # the same rank of the other replica
        assert number >= AT or read(other) == str(bits(training.shards()))
    assert lost == 1
    assert manager.num_participants() == 1
    read(*(folder / f"r{i}-{number}" for i in range(2)))  # rank 0 serves both of them until then


def test_shards_over_the_wire():
    """FSDP2 within a replica: each rank synchronizes its own shards with those of the other replica."""
    on_processes(2, train_sharded, ranks=2)
