"""torchft: replicas that die at any point of a step, and come back. Real processes, a real lighthouse."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("torchft", reason="torchft is not installed: pip install 'fnddp[torchft]'")

from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD

import fnddp
from fnddp import RankMismatchError, outer
from fnddp.integrations.torchft import DistributedDataParallel, ManagerWire, QuorumError, attach
from fnddp.laws import bits
from tests.replicas import (
    POINTS,
    Job,
    Network,
    Record,
    Training,
    Trap,
    digest_of,
    meet,
    new_manager,
    on_processes,
    read,
    wait_together,
    wrap,
    write,
)

LOSSY = "error_feedback(powersgd(fp16(allreduce), rank=2))"
AT = 3  # the step in which something befalls a replica
ROUNDING = 2e-3  # of the largest mean: float16 on the wire
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(150)]


def discarded(records: list[Record], step: int = AT) -> list[Record]:
    return [r for r in records if r.step == step and not r.committed]


def require_law_8(kept: Mapping[tuple[str, int], Any]) -> None:
    survivor = [step for name, step in kept if name == "r0"]
    assert survivor == list(range(len(survivor)))
    checked = 0
    for step in survivor[1:]:
        sent = []
        for name in [name for name in ("r0", "r1") if (name, step) in kept]:
            now = kept[name, step]
            before = kept.get((name, step - 1), {}).get("residual", {})  # none: it has joined, with zeros
            sent.append({p: g + before.get(p, 0) - now["residual"].get(p, 0) for p, g in now["grads"].items()})
        means = kept["r0", step]["means"]
        for path, mean in means.items():
            expected = torch.stack([each[path] for each in sent]).mean(0)
            torch.testing.assert_close(mean, expected, rtol=0, atol=ROUNDING * mean.abs().max().item())
        checked += len(sent) == 2
    assert checked >= 3 + AT - 1


@pytest.mark.parametrize("point", POINTS)
def test_a_replica_is_killed_and_comes_back(point):
    with Job(2, sync=LOSSY, keeps=True) as job:
        records = job.run({"r1": Trap(point, AT)})
        kept = {(r.replica, r.step): torch.load(r.file) for r in records if r.committed}
    assert job.incarnations == {"r0": 0, "r1": 1}
    assert any(r.participants == 1 and r.committed for r in records), "the survivor went on alone"
    if point in POINTS[:5]:  # before the vote is complete
        assert [r.replica for r in discarded(records)] == ["r0"]
        require_law_8(kept)
    else:  # the survivor has taken the step
        assert [r.participants for r in records if r.step == AT and r.committed][:1] == [2]


@pytest.mark.parametrize("traps", [{"r2": "collective 1"}, {"r1": "backward", "r2": "vote"}], ids=["one", "two"])
def test_of_three_replicas_some_are_killed(traps):
    with Job(3, sync=LOSSY) as job:
        records = job.run({name: Trap(point, AT) for name, point in traps.items()})
    survivors = {"r0", "r1", "r2"} - traps.keys()
    assert {r.replica for r in discarded(records)} == survivors
    assert any(r.participants == 3 - len(traps) and r.committed for r in records)


def test_a_replica_is_slower_than_the_timeout():
    def goes_on(job: Job) -> None:
        is_alone = sum(r.participants == 1 and r.committed for r in job.records()) >= 2
        if is_alone and job.processes["r1"].exitcode is None:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(job.processes["r1"].pid, signal.SIGCONT)

    with Job(2, sync=LOSSY, manager={"seconds": 3}) as job:
        records = job.run({"r1": Trap("collective 1", AT, "stop")}, goes_on)
    assert {r.replica for r in discarded(records)} == {"r0", "r1"}  # its own step is none, either
    assert job.incarnations == {"r0": 0, "r1": 0}


def fails_to_heal(manager: Any, net: Network, options: Mapping[str, Any]) -> torch.nn.Module:
    """The second replica does not get the state that it needs in its first step."""
    receive = manager._checkpoint_transport.recv_checkpoint

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        manager._checkpoint_transport.recv_checkpoint = receive
        raise TimeoutError("the checkpoint took too long")

    manager._checkpoint_transport.recv_checkpoint = fails_once
    return wrap(manager, net, options)


def reports(manager: Any, net: Network, options: Mapping[str, Any]) -> torch.nn.Module:
    def report(*_: Any) -> None:
        if manager._replica_id == "r1" and manager.current_step() == 1:
            manager.report_error(ValueError("this replica's batch is broken"))
            hook.remove()

    hook = net.register_forward_hook(report)
    return wrap(manager, net, options)


def two_halves(manager: Any, net: Network, options: Mapping[str, Any]) -> torch.nn.Module:
    first, second = net[0], torch.nn.Sequential(net[1], net[2])
    wrapped = (
        DistributedDataParallel(manager, first, sync=fnddp.parse(options["sync"])),
        DistributedDataParallel(manager, second),
    )
    return torch.nn.Sequential(*wrapped)


def two_halves_from_the_last(manager: Any, net: Network, options: Mapping[str, Any]) -> torch.nn.Module:
    last = DistributedDataParallel(manager, torch.nn.Sequential(net[1], net[2]))
    return torch.nn.Sequential(DistributedDataParallel(manager, net[0]), last)


BOTH = {"r0", "r1"}
SITUATIONS: dict[str, tuple[dict[str, Any], Trap | None]] = {
    "all_gather": ({"sync": "error_feedback(topk(allgather, ratio=0.3))"}, Trap("collective 1", AT)),
    "all_to_all": ({"sync": "error_feedback(quantize(two_shot, bits=8, block=16))"}, Trap("collective 0", AT)),
    "no plan": ({"sync": "error_feedback(fp16(allreduce, check=True))"}, Trap("collective 0", AT)),
    "warmup": ({"sync": "warmup(error_feedback(powersgd(fp16(allreduce))), steps=5)"}, Trap("backward", AT)),
    "the second of two backwards": ({"backwards": 2, "sync": "allreduce"}, Trap("collective 3", AT)),
    "a weight": ({"sync": f"weighted({LOSSY})", "weighs": True}, Trap("collective 0", AT)),  # that of the weight
    "two modules": ({"wrap": two_halves}, Trap("backward", AT)),
    "two modules, a step left out": (
        {"wrap": two_halves_from_the_last, "leaves_out": True},
        Trap("forward", AT, "raise"),
    ),
    "not healed": ({"wrap": fails_to_heal, "sync": "allreduce"}, None),
    "an error reported to the manager": ({"wrap": reports}, None),
}
DISCARDED = {  # by whom, and in which step, if not by the survivor in that of the trap
    "two modules, a step left out": (AT, BOTH),
    "not healed": (0, BOTH),
    "an error reported to the manager": (1, BOTH),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_step_ends_for_all_that_are_left_and_leaves_nothing(situation):
    options, trap = SITUATIONS[situation]
    with Job(2, **{"sync": LOSSY, **options}) as job:
        records = job.run({} if trap is None else {"r1": trap})
    step, whose = DISCARDED.get(situation, (AT, {"r0"}))
    assert {r.replica for r in discarded(records, step)} == whose
    assert "wrap" in options or all(r.is_planned == (situation != "no plan") for r in records)


def train_shards(name: str, address: str, folder: Path, options: Mapping[str, Any]) -> None:
    """With `jit` on the shards of FSDP: the caller rolls back by keeping what it has."""
    replica, rank, together = meet(name, folder, 2)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / replica), 2), rank=rank, world_size=2)
    mesh, training = init_device_mesh("cpu", (2,)), Training(seed=0)
    net = training.net
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    manager = new_manager(replica, address, training, init_sync=False, **together)
    with pytest.raises(TypeError, match="DTensor"):
        DistributedDataParallel(manager, nn.Sequential(net))
    params = {path: p._local_tensor.detach() for path, p in net.named_parameters()}
    sync, lost = fnddp.parse(LOSSY), 0
    mean_of, state = fnddp.jit(sync, wire=ManagerWire(manager)), sync.init(params)
    wait_together(name, folder, 4)
    while manager.current_step() < AT + 3:
        manager.start_quorum()
        number, before = manager.current_step(), digest_of(params, state)
        if number == AT and name == "r3":
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * int(name[1]) + number))
        net.zero_grad()
        net(x).square().mean().backward()
        try:
            mean, after = mean_of({path: p.grad.to_local() for path, p in net.named_parameters()}, state)
        except fnddp.CollectiveError:
            mean, after = {}, state
        if not manager.should_commit():  # another rank may have lost somebody, and this one nobody
            lost += 1
            assert digest_of(params, state) == before
            continue
        assert mean
        state = after
        for path, p in params.items():
            p.sub_(0.1 * mean[path])
        write(folder / f"{name}-{number}", digest_of(params))
        other = folder / f"r{int(name[1]) ^ 2}-{number}"  # the same rank of the other replica
        assert number >= AT or read(other) == digest_of(params)
    assert lost == 1
    assert manager.num_participants() == 1
    read(*(folder / f"r{i}-{number}" for i in range(2)))  # rank 0 serves both of them until then


def test_a_functional_loop():
    on_processes(2, train_shards, ranks=2)


def lose_the_lighthouse(name: str, address: str, folder: Path, options: Mapping[str, Any]) -> None:
    told, stepped = folder / "address", folder / "stepped"
    if name == "r1":  # is the lighthouse
        own = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
        write(told, f"http://127.0.0.1:{own.address().rpartition(':')[2]}")
        read(stepped)
        os.kill(os.getpid(), signal.SIGKILL)
    training = Training(seed=0)
    manager = new_manager(name, read(told), training, quorum_timeout=timedelta(seconds=3))
    model = DistributedDataParallel(manager, training.net)
    manager.start_quorum()
    model(torch.ones(1, 8)).sum().backward()
    assert manager.should_commit()
    stepped.touch()

    def train() -> None:
        while True:  # until it is dead
            manager.start_quorum()
            model(torch.ones(1, 8)).sum().backward()
            manager.should_commit()

    with pytest.raises(QuorumError, match=f"replica '{name}' is in no quorum"):
        train()


def test_the_lighthouse_is_gone():
    on_processes(2, lose_the_lighthouse)


def stepping(manager: Any, net: Network, sync: str) -> Callable[[], None]:
    model = DistributedDataParallel(manager, net, sync=sync)

    def step() -> None:
        manager.start_quorum()
        model(torch.ones(1, 8)).sum().backward()
        manager.should_commit()

    return step


def of_another_pipeline(manager: Any, training: Training, is_other: bool) -> Callable[[], None]:
    return stepping(manager, training.net, "allreduce" if is_other else LOSSY)


def of_another_network(manager: Any, training: Training, is_other: bool) -> Callable[[], None]:
    if is_other:
        training.net.append(nn.Linear(4, 4))
        training.optimizer.add_param_group({"params": training.net[3].parameters()})
    return stepping(manager, training.net, LOSSY)


def of_another_outer_step(manager: Any, training: Training, is_other: bool) -> Callable[[], None]:
    return attach(manager, training.net, None, f"diloco(allreduce, every={1 if is_other else 2})").step


def join_with_another(name: str, address: str, folder: Path, options: Mapping[str, Any]) -> None:
    """The second replica is another one: it alone is told, again and again, and the first one goes on."""
    training = Training(seed=0)
    refused, begun, ended = (folder / point for point in ("refused", "begun", "ended"))
    if name == "r1":
        read(begun)
    manager = new_manager(name, address, training)
    step = options["make"](manager, training, name == "r1")
    if name == "r1":
        for _ in range(20):
            with pytest.raises(RankMismatchError, match=options["says"]):
                step()
        manager.shutdown(wait=False)  # as those do who catch an error and end
        refused.touch()
        read(ended)
        return
    committed, lost = 0, 0
    while committed < 5:
        before = manager.current_step()
        step()
        is_committed = manager.current_step() > before
        begun.touch()
        committed += is_committed and refused.exists()
        lost += not is_committed
        time.sleep(0.02)
    assert manager.num_participants() == 1
    assert options["make"] is of_another_outer_step or lost == 1  # the step in which the other one came
    ended.touch()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (of_another_pipeline, r"disagree about pipeline: rank 0: error_feedback.*rank 1: allreduce"),
        (of_another_network, r"disagree about leaf '3.weight': rank 0: nothing; rank 1: float32\[4, 4\]"),
        (of_another_outer_step, r"pipeline: rank 0: diloco\(allreduce, every=2\); rank 1"),
    ],
)
def test_a_replica_that_differs_gives_way_for_good_and_the_others_go_on(make: Callable[..., Any], says: str):
    on_processes(2, join_with_another, make=make, says=says)


# Replicas of several ranks, of which each has its own part of the model, as with tensor or pipeline parallel. If one
# rank is lost, so is its replica: what started it starts all of its ranks again.


@pytest.mark.parametrize(
    ("victim", "point"),
    [
        ("r2", "forward"),  # with which the replica's server dies
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
    if point != "stepped":
        # The ranks that had not lost anybody had means: they are gone as well.
        assert {r.replica for r in records if r.step == AT and not r.committed} == {"r0", "r1"}


# Theirs and ours, and for how many local steps.
PAIRS = {
    "local_sgd": ("local_sgd(every=3)", 7),
    "diloco": ("diloco(allreduce, every=3)", 10),
    "streaming": ("streaming_diloco(allreduce, every=4, fragments=('0.*', '2.*'))", 13),
}


def attach_theirs(name: str, manager: Any, net: Network, optimizer: torch.optim.Optimizer) -> Any:
    if name == "local_sgd":
        return LocalSGD(manager, net, optimizer, sync_every=3)
    fragments = [net] if name == "diloco" else [net[0], net[2]]
    descents = [torch.optim.SGD(f.parameters(), lr=0.7, momentum=0.9, nesterov=True) for f in fragments]
    return DiLoCo(manager, fragments, optimizer, descents, sync_every=3 if name == "diloco" else 4, pin_memory=False)


def train_both(name: str, address: str, folder: Path, options: Mapping[str, Any]) -> None:
    told = folder / "address"
    if name == "r0":
        second = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
        write(told, f"http://127.0.0.1:{second.address().rpartition(':')[2]}")
    trainings = [Training(0), Training(0)]
    nets = [training.net for training in trainings]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    managers = [
        new_manager(name, at, training, init_sync=False)
        for at, training in zip((address, read(told)), trainings, strict=True)
    ]
    attach_theirs(options["pair"], managers[0], nets[0], optimizers[0]).__enter__()
    text, steps = PAIRS[options["pair"]]
    outer.attach(
        nets[1],
        optimizers[1],
        outer.parse(text),
        wire=ManagerWire(managers[1]),
        init_sync=False,
        prepare=managers[1].start_quorum,
        commit=managers[1].should_commit,
    )
    wait_together(name, folder)
    for step in range(steps):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * int(name[1]) + step))
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        assert bits(dict(nets[0].named_parameters())) == bits(dict(nets[1].named_parameters())), step
    assert [manager.current_step() for manager in managers] == [
        steps // (2 if options["pair"] == "streaming" else 3)
    ] * 2
    wait_together(name, folder, point="end")  # one is the lighthouse


@pytest.mark.parametrize("pair", PAIRS)
def test_exchanges_are_torchfts_to_the_bit(pair: str):
    """Its LocalSGD and DiLoCo, which reduce parameter by parameter: two ranks' sums have one order."""
    on_processes(2, train_both, pair=pair)


def test_the_example():
    example = Path(__file__).parent.parent / "examples" / "kill_and_rejoin.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=140, check=True)
    assert "replica 1 was killed; it is started again" in done.stdout, done
    lost = re.search(r"replica 0, step (\d+) of 2: .* discarded: the other one was lost", done.stdout)
    assert lost is not None, done
    assert f"replica 0, step {lost[1]} of 1: " in done.stdout, done
    ends = re.findall(r"ends with parameters ([0-9a-f]{16})", done.stdout)
    assert len(ends) == 2
    assert len(set(ends)) == 1
    accuracies = [float(found) for found in re.findall(r"([\d.]+)% of the test set", done.stdout)]
    assert accuracies[-1] > 85, accuracies
