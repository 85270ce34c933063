"""Two hosts for tests: network namespaces with names of their own, or this machine twice where there can be none."""

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fnddp.cli.network import NetworkError, check_available, shaped_hosts

NAMES = ("host0", "host1")
LINK = "1gbit"
# With a name of its own, and a file of names in which it finds the others, as machines of a cluster do.
_BECOME = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


@dataclass(frozen=True)
class Hosts:
    """Names by which two hosts find each other, and what to put before a command to run it on each."""

    names: tuple[str, str]
    prefixes: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def are_apart(self) -> bool:
        return self.names[0] != self.names[1]

    def start(self, host: int, *command: object, **environment: str) -> subprocess.Popen[str]:
        return start(*self.prefixes[host], *command, **environment)


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Makes them; their file of names goes into `folder`."""
    with ExitStack() as stack:
        try:
            check_available()
            namespaces = stack.enter_context(shaped_hosts(2, LINK))
        except NetworkError:  # not root, or a kernel without namespaces
            yield Hosts(("127.0.0.1", "127.0.0.1"), ((), ()))
            return
        names = folder / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"10.0.0.{i + 1} {name}\n" for i, name in enumerate(NAMES)))
        become = ("unshare", "--mount", "--uts", "sh", "-c", _BECOME, "host", str(names))
        first, second = (
            ("ip", "netns", "exec", namespace.namespace, *become, name)
            for namespace, name in zip(namespaces, NAMES, strict=True)
        )
        yield Hosts(NAMES, (first, second))


def start(*command: object, **environment: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen(list(map(str, command)), env=environment, stdout=pipe, stderr=pipe, text=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def all_said(processes: Sequence[subprocess.Popen[str]], seconds: float) -> list[str]:
    """What each has written to its standard output. All must end well, and in time; none outlives the call."""
    deadline = time.monotonic() + seconds
    with suppress(subprocess.TimeoutExpired):
        for process in processes:
            process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    late = [process.args for process in processes if process.poll() is None]
    for process in processes:
        process.terminate()  # torchrun ends its ranks
    ended = [process.communicate() for process in processes]
    told = "\n".join(f"{out[-2000:]}\n{errors[-2000:]}" for out, errors in ended)
    assert not late, f"after {seconds} s {late} still ran:\n{told}"
    assert [process.returncode for process in processes] == [0] * len(processes), told
    return [out for out, _ in ended]


def complaints(errors: str) -> list[str]:
    """What a command writes beside its output and its progress, but that a lowering took long on a busy machine."""
    usual = r"\.\.\. |made a plan of .* in [\d.]+ s; this happens once"
    return [line for line in errors.splitlines() if not re.match(usual, line)]
