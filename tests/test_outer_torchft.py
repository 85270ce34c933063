"""DiLoCo over torchft's wire: a replica that is killed in the middle of an exchange, and torchft's own classes."""

import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fnddp import outer
from fnddp.laws import bits
from tests.forks import forks
from tests.replica import HEARTBEAT, Network, Training, new_manager
from tests.replicas import on_processes

pytestmark = pytest.mark.thorough

pytest.importorskip("torchft", reason="torchft has no wheel for this platform")
pytest.importorskip("fnddp.integrations.torchft", reason="this tree is without the wire over torchft's manager")

SECONDS = 90


def replica(name: str, address: str, seed: int, dies_at: int | None, file: str) -> None:
    """Trains until it is told how far; writes a line for each exchange that it asked for."""
    from fnddp.integrations.torchft import ManagerWire

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    asked: list[bool] = []

    class State:
        def state_dict(self) -> dict[str, Any]:
            return {"model": model.state_dict(), "outer": attached.replicated_state_dict()}

        def load_state_dict(self, saved: dict[str, Any]) -> None:
            model.load_state_dict(saved["model"])
            attached.load_replicated_state_dict(saved["outer"])

    manager = new_manager(name, address, State(), seconds=5)

    def prepare() -> None:
        manager.start_quorum()
        if len(asked) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def commit() -> bool:
        asked.append(manager.should_commit())
        return asked[-1]

    step = outer.parse("diloco(error_feedback(quantize(two_shot, bits=4)), every=3)")
    wire: Any = ManagerWire(manager)
    attached = outer.attach(model, optimizer, step, wire=wire, init_sync=False, prepare=prepare, commit=commit)
    stop = Path(file).with_name("stop")
    while not stop.exists() or manager.current_step() < int(stop.read_text()):
        seen = len(asked)
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().mean().backward()
        optimizer.step()
        time.sleep(0.05)
        if len(asked) > seen:
            # str: json has no bytes; and what is forked hashes alike
            digest = str(hash(tuple(bits((attached.state.anchor, attached.state.velocity)))))
            line = [name, manager.current_step(), asked[-1], manager.num_participants(), digest]
            with Path(file).open("a") as out:
                out.write(json.dumps(line) + "\n")
    os._exit(0)  # torchft's threads


@pytest.mark.timeout(SECONDS + 30)
def test_a_replica_that_dies_in_an_exchange_ends_it_for_the_other_and_comes_back(tmp_path: Path):
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=500, quorum_tick_ms=50)
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    context, file = forks(), tmp_path / "lines.json"
    started: list[Any] = []

    def start(name: str, seed: int, dies_at: int | None = None) -> Any:
        process = context.Process(target=replica, args=(name, address, seed, dies_at, str(file)), daemon=True)
        process.start()
        started.append(process)
        return process

    try:
        survivor, victim = start("a", 1), start("b", 2, dies_at=4)
        victim.join(SECONDS)
        assert victim.exitcode == -signal.SIGKILL
        killed = len(file.read_text().splitlines())
        late = start("b", 3)

        def lines_since() -> list[Any]:
            return [
                json.loads(line) for line in file.read_text().splitlines(keepends=True)[killed:] if line[-1] == "\n"
            ]

        deadline = time.monotonic() + SECONDS
        while sum(line[0] == "b" and line[2] and line[3] == 2 for line in lines_since()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (tmp_path / "new").write_text(str(max(line[1] for line in lines_since()) + 10))
        (tmp_path / "new").rename(tmp_path / "stop")
        for process in (survivor, late):
            process.join(SECONDS)
            assert process.exitcode == 0
    finally:
        for process in started:
            with suppress(ValueError):
                process.kill()
                process.join()
        lighthouse.shutdown()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lost = [line for line in lines if not line[2]]
    assert [line[0] for line in lost] == ["a"]  # the exchange in which the other died: nothing raised, nothing applied
    before = next(line for line in lines if line[0] == "a" and line[1] == lost[0][1] and line[2])
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
    """Two models on the same batches, each with a manager and a lighthouse of its own."""
    from torchft.coordination import LighthouseServer

    from fnddp.integrations.torchft import ManagerWire

    told = folder / "address"
    if name == "r0":
        second = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
        (folder / "new").write_text(f"http://127.0.0.1:{second.address().rpartition(':')[2]}")
        (folder / "new").rename(told)
    while not told.exists():
        time.sleep(0.02)
    trainings = [Training(0), Training(0)]
    nets = [training.net for training in trainings]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    managers = [
        new_manager(name, at, training, init_sync=False)
        for at, training in zip((address, told.read_text()), trainings, strict=True)
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
    time.sleep(HEARTBEAT)
    (folder / f"{name}.ready").touch()
    while not all((folder / f"r{i}.ready").exists() for i in range(2)):
        time.sleep(0.02)
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
    (folder / f"{name}.done").touch()
    while not all((folder / f"r{i}.done").exists() for i in range(2)):  # of whom one is the lighthouse
        time.sleep(0.02)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.timeout(150)
def test_exchanges_are_torchfts_to_the_bit(pair: str):
    """Its LocalSGD and DiLoCo, which reduce parameter by parameter: two ranks' sums have one order."""
    on_processes(2, train_both, pair=pair)
