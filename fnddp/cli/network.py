"""Several hosts with slow links on one machine: Linux network namespaces, joined by a bridge in another namespace.

The machine's own network does not change. `tc tbf` limits the rate at which a host sends; `tc netem` adds a latency.
"""

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from fnddp.cli.failures import Failure
from fnddp.cost.link import Link

NAMESPACES = Path("/run/netns")  # the folder of `ip netns`
PREFIX = "fnddp"  # of their names: fnddp-PID-RANDOM-HOST
INTERFACE = "eth0"  # within a host
BURST, QUEUE = "256kb", "100ms"
IN_FLIGHT = "1000000"  # packets that a delay holds: never the limit
MAX_HOSTS = 254
CLONE_NEWNET = 0x40000000  # linux/sched.h


class NetworkError(Failure, RuntimeError):
    """Hosts cannot be created on this machine; the message names the missing part."""


@dataclass(frozen=True)
class Host:
    """A network namespace, with one network device that leads to the other hosts."""

    namespace: str
    address: str
    interface: str = INTERFACE

    def enter(self) -> None:
        """Move the calling thread to this host: sockets that it opens from now on are the host's."""
        libc = ctypes.CDLL(None, use_errno=True)  # os.setns comes with Python 3.12
        with (NAMESPACES / self.namespace).open() as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                error = ctypes.get_errno()
                raise OSError(error, f"cannot enter the network namespace {self.namespace}: {os.strerror(error)}")


@contextmanager
def shaped_hosts(n: int, link: str) -> Generator[list[Host]]:
    """Create `n` hosts on one switch, each with its own `link`, and remove them when the block ends.

    `Link.parse` reads the link, such as "200mbit"; a latency needs the kernel's module sch_netem. In the block, SIGTERM
    raises `SystemExit`, so that it cleans up as Ctrl-C does. The next run removes the hosts of a killed one. Call it on
    the main thread.
    """
    parsed = Link.parse(link)
    if not 1 <= n <= MAX_HOSTS:
        raise ValueError(f"a network has 1 to {MAX_HOSTS} hosts, got {n}")
    check_available()
    for stale in NAMESPACES.glob(f"{PREFIX}-*-*-*"):
        pid = stale.name.split("-")[1]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            _remove(stale.name)
    name = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"

    def stop(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with signals_held(signal.SIGINT, signal.SIGTERM):
            hosts = _make(name, n, parsed)
        yield hosts
    finally:
        with signals_held(signal.SIGINT, signal.SIGTERM):
            _remove(f"{name}-*")
        signal.signal(signal.SIGTERM, before)


def check_available() -> None:
    """Raise a NetworkError unless this machine and user can have network namespaces."""
    if sys.platform != "linux":
        raise NetworkError(f"a shaped link needs Linux network namespaces, but this is {sys.platform}")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetworkError(f"a shaped link needs {' and '.join(missing)} of iproute2: apt-get install iproute2")
    if os.geteuid() != 0:
        raise NetworkError("a shaped link needs root to make network namespaces: run the command as root or with sudo")


def loopback_device() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def sent_bytes(interface: str) -> int:
    """Return the bytes that this process's host has sent through `interface` so far, with headers."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])  # after eight columns of received ones
    raise ValueError(f"this host has no network interface {interface!r}")


def _make(name: str, n: int, link: Link) -> list[Host]:
    switch, hosts = f"{name}-switch", [Host(f"{name}-{i}", f"10.0.0.{i + 1}") for i in range(n)]
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")
    for i, host in enumerate(hosts):
        inside, port = ("-n", host.namespace), f"port{i}"
        _run("ip", "netns", "add", host.namespace)
        ends = ("netns", host.namespace, "type", "veth", "peer", "name", port, "netns", switch)
        _run("ip", "link", "add", host.interface, *ends)
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", *inside, "address", "add", f"{host.address}/24", "dev", host.interface)
        _run("ip", *inside, "link", "set", "lo", "up")
        _run("ip", *inside, "link", "set", host.interface, "up")
        add, below = ("tc", *inside, "qdisc", "add", "dev", host.interface), ("root",)
        if link.latency:
            _run(*add, *below, "handle", "1:", "netem", "delay", f"{link.latency * 1e6:g}us", "limit", IN_FLIGHT)
            below = ("parent", "1:1")
        _run(*add, *below, "tbf", "rate", f"{round(8 * link.bandwidth)}bit", "burst", BURST, "latency", QUEUE)
    return hosts


def _remove(pattern: str) -> None:
    for namespace in NAMESPACES.glob(pattern):  # devices are removed with their namespace
        subprocess.run(["ip", "netns", "delete", namespace.name], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetworkError(f"cannot shape the link: `{' '.join(command)}` failed: {done.stderr.strip()}")


@contextmanager
def signals_held(*held: signal.Signals) -> Generator[None]:
    """Hold signals back until the end of the block. Processes started inside never see them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
