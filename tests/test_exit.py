"""How a process ends in which gloo has threads."""

import subprocess
import sys

import pytest

ENDS = """
import atexit, os, threading, time
import fnddp.wire.c10d

fnddp.wire.c10d.EXIT_SECONDS = 1
ended = threading.Event()
atexit.register(ended.set)

def drop():
    ended.wait()
    time.sleep(0.1)
    os.write(1, b"dropped")

threading.Thread(target=drop, daemon=True).start()
"""


@pytest.mark.timeout(100)
def test_a_thread_that_drops_a_tensor_has_the_time_before_the_interpreter_ends() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ENDS], capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout, done.stderr) == (0, "dropped", "")
