"""Commands in a pseudo-terminal, as a user sees them."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from typing import NamedTuple

# Runs commands one after the other: to import torch for each of them would take longer than they do.
CHILD = """
import fcntl, json, os, struct, sys, termios
from fnddp.cli import main
for columns, environment, arguments in json.loads(sys.argv[1]):
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    for name in ("NO_COLOR", "COLUMNS"):
        os.environ.pop(name, None)
    os.environ.update({"TERM": "xterm-256color", **environment})
    try:
        code = main.main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    sys.stderr.flush()
    print(f"\\0{code}\\0", end="", flush=True)
"""


class Command(NamedTuple):
    """What is run, where."""

    columns: int
    environment: dict[str, str]
    arguments: list[str]


def complaints(errors: str) -> list[str]:
    """What a command writes beside its output, but that a lowering took long, as it does where a machine is busy."""
    return [line for line in errors.splitlines() if not re.match(r"lowered .* in [\d.]+ s, which happens once", line)]


def run(*commands: Command, seconds: float = 300) -> list[str]:
    """What each command writes to its terminal, escape codes and all, both outputs together. Each must exit with 0."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(commands)], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    try:
        said = _read(ours, time.monotonic() + seconds)
        assert process.wait(timeout=seconds) == 0, said
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    parts = said.replace("\r\n", "\n").split("\0")
    assert parts[1::2] == ["0"] * len(commands), said
    return parts[:-1:2]


def _read(terminal: int, deadline: float) -> str:
    said = b""
    while True:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"it did not end in time; it said\n{said.decode(errors='replace')}"
        try:
            read = os.read(terminal, 65_536)
        except OSError:  # how a terminal says that its last process has gone
            read = b""
        if not read:
            return said.decode()
        said += read
