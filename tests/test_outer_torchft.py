"""DiLoCo over torchft's wire: two replicas, one killed in the middle of an exchange, and another one in its place."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fnddp import outer
from fnddp.laws import bits
from tests.forks import forks

pytest.importorskip("torchft", reason="torchft has no wheel for this platform")
pytest.importorskip("fnddp.integrations.torchft", reason="this tree is without the wire over torchft's manager")

SECONDS, COMMITTED = 90, 16


def replica(name: str, address: str, seed: int, dies_at: int | None, file: str) -> None:
    """Trains until the replicas have committed so many exchanges; writes a line for each that it asked for."""
    from fnddp.integrations.torchft import ManagerWire
    from tests.replica import new_manager

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    asked: list[bool] = []

    class Training:
        def state_dict(self) -> dict[str, Any]:
            return {"model": model.state_dict(), "outer": attached.replicated_state_dict()}

        def load_state_dict(self, saved: dict[str, Any]) -> None:
            model.load_state_dict(saved["model"])
            attached.load_replicated_state_dict(saved["outer"])

    manager = new_manager(name, address, Training(), seconds=5)

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
    while manager.current_step() < COMMITTED:
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
        late = start("b", 3)
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
