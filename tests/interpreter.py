"""A `python` for tests of commands that start many processes: each is forked from one that has imported torch.

It takes `-m MODULE`, `-c CODE` or a script, as python does. Whoever starts it sees one process: the fork has the
arguments, environment, folder, standard streams and namespaces that it was given; SIGINT, SIGTERM and SIGUSR1 go on to
the fork; and either ends as the other ends. What a fresh interpreter does is not tested by it: importing, reading its
own variables (but for OMP_NUM_THREADS), a hash seed of its own.
"""

import atexit
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from tests.forks import forks

NAMESPACES = ("net", "uts", "mnt")

# Without torch, without site: it starts in milliseconds.
CLIENT = """#!{python} -IS
import array, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
given = repr((sys.argv[1:], dict(os.environ), os.getcwd(), os.getpid())).encode()
socket.send_fds(server, [len(given).to_bytes(8, "big")], [0, 1, 2])
server.sendall(given)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: server.send(bytes([number])))
told = server.recv(2)
ended = int.from_bytes(told, "big", signed=True) if told else 1  # whoever should tell has died
if ended < 0:
    signal.signal(-ended, signal.SIG_DFL) if -ended != signal.SIGKILL else None
    os.kill(os.getpid(), -ended)
os._exit(ended)
"""


@contextmanager
def forked_python() -> Iterator[str]:
    """The path of one, which works until the end of the context."""
    with tempfile.TemporaryDirectory(prefix="fnddp-") as folder, socket.socket(socket.AF_UNIX) as listener:
        address, program = f"{folder}/interpreter", Path(folder) / "python"
        listener.bind(address)
        listener.listen(64)
        program.write_text(CLIENT.format(python=sys.executable, address=address))
        program.chmod(0o755)
        process: Any = forks().Process(target=_serve, args=(listener, folder), daemon=True)
        process.start()
        try:
            yield str(program)
        finally:
            process.kill()
            process.join()
            process.close()


def _serve(listener: socket.socket, folder: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for forks
    tests: Any = multiprocessing.parent_process()
    while listener in multiprocessing.connection.wait([listener, tests.sentinel]):
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os._exit(_run_for(client))
        client.close()
    shutil.rmtree(folder, ignore_errors=True)  # the tests were killed


def _run_for(client: socket.socket) -> int:
    """Forks, and passes on what becomes of either side."""
    size, files, _, _ = socket.recv_fds(client, 8, 3)
    given = b""
    while len(given) < int.from_bytes(size, "big"):
        given += client.recv(2**20)
    arguments, environment, folder, pid = eval(given)  # of our own
    fork = os.fork()
    if fork == 0:
        client.close()
        os._exit(_be_python(arguments, environment, folder, pid, files))
    for file in files:
        os.close(file)

    def pass_signals_on() -> None:
        while number := client.recv(1):
            os.kill(fork, number[0])
        with suppress(ProcessLookupError):
            os.kill(fork, signal.SIGKILL)  # nobody is there any more

    threading.Thread(target=pass_signals_on, daemon=True).start()
    _, status = os.waitpid(fork, 0)
    with suppress(OSError):
        client.send(os.waitstatus_to_exitcode(status).to_bytes(2, "big", signed=True))
    return 0


def _be_python(arguments: list[str], environment: dict[str, str], folder: str, pid: int, files: list[int]) -> int:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    _enter_namespaces_of(pid)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if action := environment.get("PYTHONWARNINGS"):
        warnings.simplefilter(action)  # pyright: ignore
    multiprocessing.current_process().daemon = False  # it may have children
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _run(arguments)
        code: Any = 0
    except SystemExit as stopped:
        code = stopped.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # pyright: ignore
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-u":
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _enter_namespaces_of(pid: int) -> None:
    """Where they are others: hosts of tests."""
    mine, its = (Path(f"/proc/{process}/ns") for process in ("self", pid))
    others = [name for name in NAMESPACES if mine.exists() and (mine / name).readlink() != (its / name).readlink()]
    opened = [os.open(its / name, os.O_RDONLY) for name in others]
    libc = ctypes.CDLL(None, use_errno=True)
    for file in opened:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)
