"""Hosts on one machine: ranks talk over their links, and however a run ends no host stays."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fnddp import Link
from fnddp.cli import network
from fnddp.cli.main import main
from fnddp.cli.network import NetworkError, sent_bytes, shaped_hosts


def why_not(link: str = "1gbit") -> str | None:
    try:
        with shaped_hosts(1, link):
            return None
    except NetworkError as error:
        return str(error)


REASON = why_not()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def namespaces(pid: int | None = None) -> set[str]:
    return {path.name for path in network.NAMESPACES.glob(f"fnddp-{pid or os.getpid()}-*")}


@pytest.mark.parametrize("n", [0, 255])
def test_wrong_hosts(n: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 254 hosts, got {n}"), shaped_hosts(n, "1gbit"):
        pass


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=str(Path("netns"))):
        network.Host("fnddp-none", "10.0.0.1").enter()
    name = f"no{secrets.token_hex(3)}"
    with pytest.raises(ValueError, match=f"no network interface '{name}'"):
        sent_bytes(name)
    monkeypatch.setattr(shutil, "which", lambda tool: "/sbin/ip")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NetworkError, match="needs root"):
        network.check_available()
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(NetworkError, match="needs ip and tc of iproute2"):
        network.check_available()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NetworkError, match="Linux network namespaces, but this is darwin"):
        network.check_available()


@needs_hosts
def test_made_and_removed_also_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        with shaped_hosts(2, "200mbit") as hosts, shaped_hosts(1, "1gbit") as others:
            assert len(hosts) == 2
            assert {host.namespace for host in hosts + others} < namespaces()
            assert len(namespaces()) == 5  # and two switches
            show = ["tc", "-n", hosts[1].namespace, "qdisc", "show", "dev", hosts[1].interface]
            shown = subprocess.run(show, capture_output=True, text=True, check=True).stdout
            assert "tbf" in shown
            assert "rate 200Mbit" in shown
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert namespaces() == set()
    monkeypatch.setattr(network, "QUEUE", "soon")
    with pytest.raises(NetworkError, match="`tc .* latency soon` failed: .*soon"), shaped_hosts(2, "200mbit"):
        pass
    assert namespaces() == set()


def test_a_latency_is_netems(monkeypatch: pytest.MonkeyPatch) -> None:
    if REASON is None:
        reason = why_not("200mbit:2ms")  # of a kernel without sch_netem
        assert reason is None or "netem delay 2000us" in reason
        assert namespaces() == set()
    commands: list[str] = []
    monkeypatch.setattr(network, "_run", lambda *command: commands.append(" ".join(command)))
    network._make("here", 1, Link.parse("2.5gbit:20us"))
    assert [command.partition("dev eth0 ")[2] for command in commands if command.startswith("tc")] == [
        "root handle 1: netem delay 20us limit 1000000",
        "parent 1:1 tbf rate 2500000000bit burst 256kb latency 100ms",
    ]


SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
if sys.argv[1:] == ["--fails"] and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total := torch.ones(100_000))
sys.stdout.write(f"rank {rank} of {os.environ['LOCAL_WORLD_SIZE']} {sys.argv[1:]} {total[0]}\\n")
dist.barrier()
dist.destroy_process_group()
"""


@needs_hosts
@pytest.mark.timeout(60)
@pytest.mark.parametrize("option", ["--steps", "--fails"])
def test_a_script_runs_over_the_link(option: str, tmp_path: Path, capfd, monkeypatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    code = main(["run", "--link", "1gbit", "--ranks", "2", "train.py", option])
    said, errors = capfd.readouterr()
    assert namespaces() == set()
    if option == "--fails":
        assert code == 1
        assert "fnddp run: rank 1 was ended by SIGKILL" in errors
        return
    assert code == 0
    assert "socket.cpp" not in errors  # c10d's warnings that hosts have no names
    *lines, last = said.strip().splitlines()
    assert {f"rank {rank} of 2 ['--steps'] 2.0" for rank in range(2)} <= {*lines}
    assert "over links of 1gbit" in last
    assert all(f"0.4 MB by rank {rank}" in last for rank in range(2))


HOLDS = """
import sys, time
from fnddp.cli.network import shaped_hosts
with shaped_hosts(2, "200mbit"):
    print("made", flush=True)
    time.sleep(100)
"""


@needs_hosts
@pytest.mark.thorough
@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_removed_after_sigterm_or_by_the_next_run(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        assert len(namespaces(process.pid)) == 3
        process.send_signal(number)
    if number == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM
    else:
        assert len(namespaces(process.pid)) == 3
        with shaped_hosts(1, "1gbit"):
            pass
    assert namespaces(process.pid) == set()
