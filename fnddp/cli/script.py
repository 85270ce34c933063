"""A training script on ranks that are hosts of this machine, with slow links between them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fnddp.cli import checks
from fnddp.cli.launch import SETTLE_SECONDS, RankError, how_it_ended
from fnddp.cli.network import Host, sent_bytes

PORT = 29500  # torch's own
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL


def run(script: Path, arguments: Sequence[str], hosts: Sequence[Host]) -> None:
    """Run `script` once on each of `hosts`, as torchrun does, until all have ended; end all when one fails."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, host in enumerate(hosts):
            command = ("ip", "netns", "exec", host.namespace, sys.executable, str(script), *arguments)
            environment = _of_torchrun(rank, hosts)
            processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(0.05)
        if any(codes):
            time.sleep(SETTLE_SECONDS)  # a rank that is killed breaks the others' connections: name that one
            codes = [process.poll() or 0 for process in processes]
            rank = codes.index(min(codes) or max(codes))
            raise RankError(how_it_ended(f"rank {rank}", codes[rank]))
    finally:
        for process in processes:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while None in [process.poll() for process in processes] and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in processes:
            _signal(process, signal.SIGKILL)  # also its child processes
            process.wait()


def sent(host: Host) -> int:
    """Return the bytes that `host` has sent over its link, with headers."""

    def count() -> int:
        host.enter()
        return sent_bytes(host.interface)

    with ThreadPoolExecutor(1) as pool:  # a thread cannot leave the host that it entered
        return pool.submit(count).result()


def _of_torchrun(rank: int, hosts: Sequence[Host]) -> dict[str, str]:
    n, interface = len(hosts), hosts[rank].interface
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_PORT": PORT}
    names = {"MASTER_ADDR": hosts[0].address, "GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    # These hosts do not have names, and c10d would log a warning on each connection.
    defaults = {"OMP_NUM_THREADS": str(max(1, checks.cores() // n)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {**defaults, **os.environ, **names, **{name: str(number) for name, number in numbers.items()}}


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
