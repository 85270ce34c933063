"""Two replicas learn handwritten digits; one is killed and comes back, while both print their accuracy.

pip install 'fnddp[torchft,demo]'
RUST_LOG=error python examples/kill_and_rejoin.py

Without RUST_LOG torchft tells of each quorum, on stderr.
"""

import hashlib
import logging
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

import fnddp
from fnddp.cli import digits
from fnddp.integrations.torchft import DistributedDataParallel

KILLED_AT = 30  # the step in which replica 1 dies, the first time, or a later one if it starts late
TOGETHER = 40  # training ends when both have taken so many steps in a row
SECONDS = timedelta(seconds=20)
SYNC = "error_feedback(powersgd(bf16(allreduce), rank=2))"


def train(replica: int, lighthouse: str, dies: bool) -> None:
    """What one replica runs: a usual loop with torchft. Only the line with `sync=` is fnddp's."""
    net = digits.make_model(seed=replica)
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def load(saved: dict[str, Any]) -> None:
        net.load_state_dict(saved["net"])
        sgd.load_state_dict(saved["sgd"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=SECONDS),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "sgd": sgd.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=SECONDS,
        replica_id=f"replica{replica}",
        lighthouse_addr=lighthouse,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        rank=0,
        world_size=1,
    )
    model = DistributedDataParallel(manager, net, sync=fnddp.parse(SYNC))
    optimizer = Optimizer(manager, sgd)
    train_set, test_set = digits.load()
    generator = torch.Generator().manual_seed(replica)

    together, before = 0, 0
    while together < TOGETHER:
        optimizer.zero_grad()  # a quorum
        step, replicas = manager.current_step(), manager.num_participants()
        x, y = train_set.batch(32, generator)
        loss = nn.functional.cross_entropy(model(x), y)
        if dies and step >= KILLED_AT and replicas == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()  # if all is well
        is_committed = manager.current_step() > step
        together = together + 1 if replicas == 2 and is_committed else 0
        if step % 20 == 0 or replicas != before or not is_committed:
            accuracy = digits.accuracy(net, dict(net.named_parameters()), test_set)
            what = "" if is_committed else ", discarded: the other one was lost"
            print(f"replica {replica}, step {step} of {replicas}: {accuracy:.1%} of the test set{what}", flush=True)
        before = replicas
        time.sleep(0.02)  # as if the model were larger
    parameters = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    print(f"replica {replica} ends with parameters {hashlib.sha256(parameters).hexdigest()[:16]}", flush=True)
    manager.shutdown(wait=False)


def main() -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=1000)
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"

    def start(replica: int, *, dies: bool = False) -> subprocess.Popen[bytes]:
        arguments = [sys.executable, __file__, str(replica), address, "dies" if dies else ""]
        return subprocess.Popen(arguments, env={**os.environ, "OMP_NUM_THREADS": "1"})

    running = [start(0), start(1, dies=True)]
    if running[1].wait() == -signal.SIGKILL:
        print("replica 1 was killed; it is started again", flush=True)
        running[1] = start(1)
    failed = [process.wait() for process in running]
    lighthouse.shutdown()
    sys.exit(max(failed))


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # torchft tells of all that it does
    if len(sys.argv) > 1:
        train(int(sys.argv[1]), sys.argv[2], dies=sys.argv[3] == "dies")
        os._exit(0)  # without waiting for torchft's threads
    main()
