"""What TCP alone takes for the messages of an all_to_all on shaped links: plain sockets, no torch in ranks. Needs root.

python benchmarks/validate_tcp.py [--hosts 8] [--rate 200mbit] [--mb 4] [--tcp reno]
"""

import argparse
import json
import os
import select
import socket
import statistics
import subprocess
import time

from fnddp import Link
from fnddp.cli.network import Host, shaped_hosts

SHARE = 1448 / 1514  # of a packet is payload, the rest headers of TCP over Ethernet
PORT, CALLS = 5000, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--mb", type=float, default=4, help="what a host has in the end, its own part too")
    parser.add_argument("--tcp", help="congestion control of the hosts")
    arguments = parser.parse_args()
    n, part = arguments.hosts, int(arguments.mb * 1e6) // arguments.hosts
    with shaped_hosts(n, arguments.rate) as hosts:
        for host in hosts if arguments.tcp else ():
            control_congestion(host, arguments.tcp)
        read, write = os.pipe()
        children = [os.fork() or rank(i, hosts[i], n, part, write) for i in range(n)]
        os.close(write)
        with os.fdopen(read) as lines:
            found = [json.loads(line) for line in lines]
        for child in children:
            os.waitpid(child, 0)
    seconds = max(statistics.median(times[1:]) for times, _ in found)  # the first one drains the bucket
    predicted = Link(Link.parse(arguments.rate).bandwidth * SHARE).seconds("all_to_all", n * part, n)
    print(f"{seconds * 1e3:.1f} ms, predicted {predicted * 1e3:.1f}: {predicted / seconds - 1:+.1%}")
    print(f"processor time of all hosts, {CALLS} calls: {sum(cpu for _, cpu in found):.2f} s")


def control_congestion(host: Host, how: str) -> None:
    write = f"echo {how} > /proc/sys/net/ipv4/tcp_congestion_control"
    subprocess.run(["ip", "netns", "exec", host.namespace, "sh", "-c", write], check=True)


def rank(i: int, host: Host, n: int, part: int, write: int) -> int:
    host.enter()
    peers = connected(i, n)
    times: list[float] = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        exchange(peers, part)
        times.append(time.perf_counter() - begin)
    os.write(write, f"{json.dumps([times, sum(os.times()[:2])])}\n".encode())
    time.sleep(0.5)  # others may still be sending
    os._exit(0)


def connected(i: int, n: int) -> list[socket.socket]:
    """Connects to the ranks before this one, and waits for those after it."""
    server = socket.create_server((f"10.0.0.{i + 1}", PORT))
    peers: list[socket.socket] = []
    for j in range(i):
        while True:
            try:
                peers.append(socket.create_connection((f"10.0.0.{j + 1}", PORT)))
                break
            except OSError:
                time.sleep(0.02)
    peers += [server.accept()[0] for _ in range(n - 1 - i)]
    for peer in peers:
        peer.setblocking(False)
    return peers


def exchange(peers: list[socket.socket], part: int) -> None:
    """`part` bytes to each of them, and from each: all at once, both ways at the same time."""
    data, buffer = memoryview(bytes(part)), bytearray(1 << 18)
    sends, receives = {peer.fileno(): part for peer in peers}, {peer.fileno(): part for peer in peers}
    by_number, poll = {peer.fileno(): peer for peer in peers}, select.poll()
    for number in by_number:
        poll.register(number, select.POLLIN | select.POLLOUT)
    while any(sends.values()) or any(receives.values()):
        for number, event in poll.poll():
            peer = by_number[number]
            if event & select.POLLIN and receives[number]:
                receives[number] -= peer.recv_into(buffer, min(receives[number], len(buffer)))
            if event & select.POLLOUT and sends[number]:
                sends[number] -= peer.send(data[part - sends[number] :])
            wanted = (select.POLLIN if receives[number] else 0) | (select.POLLOUT if sends[number] else 0)
            poll.modify(number, wanted)


if __name__ == "__main__":
    main()
