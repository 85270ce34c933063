"""DiLoCo over torchft's wire: a replica that is killed in the middle of an exchange, and torchft's own classes."""

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fnddp import outer
from fnddp.laws import bits
from tests.replicas import Job, Network, Training, digest_of, new_manager, on_processes, read, wait_together, write

pytestmark = pytest.mark.thorough

pytest.importorskip("torchft", reason="torchft has no wheel for this platform")
pytest.importorskip("fnddp.integrations.torchft", reason="this tree is without the wire over torchft's manager")


def train_and_die(name: str, address: str, folder: Path, options: Mapping[str, Any]) -> None:
    """Trains until the file "stop" gives the last step; writes a line for each exchange that it asked for."""
    from fnddp.integrations.torchft import ManagerWire

    training = Training(options["seed"])
    asked: list[bool] = []

    class State:
        def state_dict(self) -> dict[str, Any]:
            return {"training": training.state_dict(), "outer": attached.replicated_state_dict()}

        def load_state_dict(self, saved: dict[str, Any]) -> None:
            training.load_state_dict(saved["training"])
            attached.load_replicated_state_dict(saved["outer"])

    manager = new_manager(name, address, State(), seconds=5)

    def prepare() -> None:
        manager.start_quorum()
        if len(asked) == options.get("dies_at"):
            os.kill(os.getpid(), signal.SIGKILL)

    def commit() -> bool:
        asked.append(manager.should_commit())
        return asked[-1]

    step = outer.parse("diloco(error_feedback(quantize(two_shot, bits=4)), every=3)")
    wire: Any = ManagerWire(manager)
    attached = outer.attach(
        training.net, training.optimizer, step, wire=wire, init_sync=False, prepare=prepare, commit=commit
    )
    stop, generator = folder / "stop", torch.Generator().manual_seed(options["seed"])
    while not stop.exists() or manager.current_step() < int(stop.read_text()):
        seen = len(asked)
        training.optimizer.zero_grad()
        training.net(torch.randn(5, 8, generator=generator)).square().mean().backward()
        training.optimizer.step()
        time.sleep(0.05)
        if len(asked) > seen:
            digest = digest_of(attached.state.anchor, attached.state.velocity)
            line = [name, manager.current_step(), asked[-1], manager.num_participants(), digest]
            with (folder / "lines").open("a") as out:
                out.write(json.dumps(line) + "\n")


@pytest.mark.timeout(150)
def test_a_replica_that_dies_in_an_exchange_ends_it_for_the_other_and_comes_back():
    with Job(2, run=train_and_die) as job:

        def lines() -> list[Any]:
            return [json.loads(line) for line in (job.path / "lines").read_text().splitlines(True) if line[-1] == "\n"]

        job.start("r0", seed=1)
        job.start("r1", seed=2, dies_at=4)
        job.wait_for(lambda: job.killed() == ["r1"], "to die")
        killed = len(lines())
        job.start("r1", seed=3)
        job.wait_for(
            lambda: sum(name == "r1" and done and n == 2 for name, _, done, n, _ in lines()[killed:]) >= 3,
            "to be together again",
        )
        write(job.path / "stop", str(max(line[1] for line in lines()) + 10))
        job.wait_for(lambda: all(process.exitcode == 0 for process in job.processes.values()), "to end")
        check(lines())


def check(lines: list[Any]) -> None:
    lost = [line for line in lines if not line[2]]
    assert [line[0] for line in lost] == ["r0"]  # the exchange in which the other died: nothing raised, nothing applied
    before = next(line for line in lines if line[0] == "r0" and line[1] == lost[0][1] and line[2])
    assert before[4] == lost[0][4]
    committed: dict[int, dict[str, str]] = {}
    for name, number, done, _, digest in lines:
        if done:
            committed.setdefault(number, {})[name] = digest
    together = [number for number, digests in committed.items() if len(digests) == 2]
    assert min(together) < lost[0][1] + 1 < max(together)  # before and after
    assert all(len(set(committed[number].values())) == 1 for number in together)


# Theirs and ours, and for how many local steps.
PAIRS = {
    "local_sgd": ("local_sgd(every=3)", 7),
    "diloco": ("diloco(allreduce, every=3)", 10),
    "streaming": ("streaming_diloco(allreduce, every=4, fragments=('0.*', '2.*'))", 13),
}


def attach_theirs(name: str, manager: Any, net: Network, optimizer: torch.optim.Optimizer) -> Any:
    from torchft.local_sgd import DiLoCo, LocalSGD

    if name == "local_sgd":
        return LocalSGD(manager, net, optimizer, sync_every=3)
    fragments = [net] if name == "diloco" else [net[0], net[2]]
    descents = [torch.optim.SGD(f.parameters(), lr=0.7, momentum=0.9, nesterov=True) for f in fragments]
    return DiLoCo(manager, fragments, optimizer, descents, sync_every=3 if name == "diloco" else 4, pin_memory=False)


def train_both(name: str, address: str, folder: Path, options: Mapping[str, Any]) -> None:
    from torchft.coordination import LighthouseServer

    from fnddp.integrations.torchft import ManagerWire

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
@pytest.mark.timeout(150)
def test_exchanges_are_torchfts_to_the_bit(pair: str):
    """Its LocalSGD and DiLoCo, which reduce parameter by parameter: two ranks' sums have one order."""
    on_processes(2, train_both, pair=pair)
