"""Outer steps between torchft's replicas that are late, die, and come back; and that are sharded themselves."""

import json
import os
import random
import signal
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("torchft", reason="torchft is not installed: pip install 'fnddp[torchft]'")

from torchft.coordination import LighthouseServer

from fnddp.integrations.torchft import ManagerWire, attach
from fnddp.laws import bits
from fnddp.outer.shards import local
from tests.replicas import (
    Job,
    Record,
    Training,
    digest_of,
    meet,
    new_manager,
    on_processes,
    read,
    require_equal,
    wait_together,
    write,
)
from tests.ways import Trap, failing

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]
STEP = "diloco(weighted(error_feedback(quantize(two_shot, bits=4, block=16))), every=4)"


class Worker(Training):
    """Gives its manager no functions: `attach` registers its own."""

    load_state_dict = state_dict = None  # pyright: ignore


def train_worker(name: str, address: str, folder: Path, options: Mapping[str, Any]) -> None:
    """Trains until the file "over" is there, with a line about each exchange. It may be stopped or killed anywhere."""
    training = Worker(seed=0)
    seconds = {"seconds": 3, "init_sync": False}
    manager = new_manager(f"{name}-{options['incarnation']}", read(folder / "address"), training, **seconds)
    attached = attach(manager, training.net, training.optimizer, STEP)
    log, step = (folder / f"{name}.jsonl").open("a"), 0
    if not options["incarnation"]:
        wait_together(name, folder, options["replicas"])
    while not (folder / "over").exists():
        before, number = attached.state, manager.current_step()
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1000 * int(name[1:]) + step))
        training.optimizer.zero_grad()
        training.net(x).square().mean().backward()
        attached.count(6 + int(name[1:]))
        training.optimizer.step()
        step += 1
        time.sleep(0.01)
        if attached.state is not before and attached.state.step == 0:
            digest = digest_of(attached.state.anchor, attached.state.velocity)
            done = Record(name, 0, manager.current_step(), manager.num_participants(), "", digest, committed=True)
            log.write(json.dumps(done.__dict__) + "\n")
            log.flush()
        assert manager.current_step() >= number
    manager.shutdown(wait=False)


def run_with_faults(workers: int, kills: int, stragglers: int, seed: int = 0) -> dict[str, int]:
    """Kill workers, and stop others for longer than the grace period, at random times; return what was counted."""
    order, draws = ["kill"] * kills + ["stop"] * stragglers, random.Random(seed)
    draws.shuffle(order)
    with Job(workers, run=train_worker) as job:
        lighthouse = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=1,
            join_timeout_ms=400,
            quorum_tick_ms=20,
            heartbeat_timeout_ms=2000,
        )
        write(job.path / "address", f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}")
        for i in range(workers):
            job.start(f"r{i}")

        def committed(of: int) -> int:
            return sum(each.participants >= of for each in job.records())

        def more(of: int) -> None:
            now = committed(of)
            job.wait_for(lambda: committed(of) >= now + 2, f"to exchange as {of}")

        more(workers)
        for act in order:
            name = f"r{draws.randrange(workers)}"
            process = job.processes[name]
            time.sleep(draws.random() / 5)  # anywhere: in a local step, a quorum, an exchange
            if act == "kill":
                process.kill()
                process.join()
                more(workers - 1)  # the others go on
                job.start(name)
            else:
                os.kill(process.pid, signal.SIGSTOP)
                more(workers - 1)
                os.kill(process.pid, signal.SIGCONT)
            more(workers)  # and all come together again
            job.require_none_failed()
        (job.path / "over").touch()
        job.wait_for(lambda: all(each.exitcode == 0 for each in job.processes.values()), "to end")
        done = job.records()
        lighthouse.shutdown()
    require_equal(done)
    return {
        "exchanges": len({each.step for each in done}),
        "commits": len(done),
        "with fewer": len({each.step for each in done if each.participants < workers}),
    }


def test_workers_are_killed_and_late_and_all_commits_are_equal():
    counted = run_with_faults(3, kills=2, stragglers=1)
    assert counted["with fewer"] >= 3, counted


def be_late(name: str, address: str, folder: Path, options: Mapping[str, Any]) -> None:
    """The third worker trains more slowly than the grace period: the others go on, and its difference counts later."""
    if name == "r0":  # a lighthouse that does not wait for long
        own = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=3000, quorum_tick_ms=20)
        write(folder / "address", f"http://127.0.0.1:{own.address().rpartition(':')[2]}")
    training = Worker(seed=0)
    manager = new_manager(name, read(folder / "address"), training, init_sync=False)
    attached = attach(manager, training.net, None, "diloco(weighted(allreduce), every=2, lr=1, momentum=0)")

    def steps(of: float) -> None:
        for _ in range(2):
            attached.count(1 + int(name[1]))
            with torch.no_grad():
                for p in training.net.parameters():
                    p.add_(of)
            attached.step()

    def require_moved(by: float) -> None:
        for path, leaf in attached.state.anchor.items():
            torch.testing.assert_close(leaf, start[path] + by, rtol=1e-5, atol=1e-5)

    wait_together(name, folder, 3)
    steps(1.0)
    assert manager.num_participants() == 3
    start = {path: leaf.clone() for path, leaf in attached.state.anchor.items()}
    if name == "r2":
        read(folder / "r0-alone", folder / "r1-alone")
        require_moved(0.0)
        write(folder / "comes")
        steps(8.0)  # what it has trained in the meantime
    else:
        steps(1.0)  # without the third one
        assert manager.num_participants() == 2
        require_moved(2.0)
        write(folder / f"{name}-alone")
        read(folder / "comes")
        time.sleep(1)  # until the third one has asked for a quorum
        write(folder / f"{name}-goes")
        read(folder / "r0-goes", folder / "r1-goes")
        steps(1.0)
    assert manager.num_participants() == 3
    require_moved(2 + (2 * 1 + 2 * 2 + 16 * 3) / 6)  # by tokens: 1, 2 and 3 for each of two steps
    for path, leaf in attached.state.anchor.items():
        assert bits(leaf) == bits(dict(training.net.named_parameters())[path].detach())
    wait_together(name, folder, 3, point="end")


def test_a_late_workers_difference_counts_in_the_next_exchange_by_its_tokens():
    on_processes(3, be_late)


def sharded_workers(name: str, address: str, folder: Path, options: Mapping[str, Any]) -> None:
    """Two replicas of two shards; one rank of one fails in an exchange, and nobody applies it."""
    replica, rank, together = meet(name, folder, 2)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / replica), 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    training = Worker(seed=0)
    for layer in (training.net[0], training.net[2], training.net):
        fully_shard(layer, mesh=mesh)
    manager = new_manager(replica, address, training, init_sync=False, **together)
    attached = attach(manager, training.net, None, "diloco(weighted(allreduce), every=1, lr=1, momentum=0)")
    wait_together(name, folder, 4)

    def move(by: float) -> None:
        attached.count(1 + rank)
        with torch.no_grad():
            for p in training.net.parameters():
                local(p).add_(by)
        attached.step()

    start = {path: local(p).clone() for path, p in training.net.named_parameters()}
    moves = 3.0 if replica == "replica1" else 1.0
    move(moves)
    for path, p in training.net.named_parameters():
        torch.testing.assert_close(local(p), start[path] + 2)
    before, number = bits(attached.state), manager.current_step()
    is_mine = name == "r3"
    with failing(ManagerWire, "start") if is_mine else nullcontext(), pytest.raises(Trap) if is_mine else nullcontext():
        move(moves)
    assert bits(attached.state) == before
    assert manager.current_step() == number
    move(0.0)
    for path, p in training.net.named_parameters():
        torch.testing.assert_close(local(p), start[path] + 4)
    wait_together(name, folder, 4, point="end")


def test_replicas_that_are_sharded_exchange_shards_and_fail_together():
    on_processes(2, sharded_workers, ranks=2)


if __name__ == "__main__":  # the long form: python -m tests.test_torchft_outer
    print(run_with_faults(3, kills=10, stragglers=5))
