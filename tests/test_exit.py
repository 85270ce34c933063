"""How a process ends that has not destroyed its process group."""

import subprocess
import sys
from pathlib import Path

import pytest

ENDS = """
import atexit, os, sys, threading, time
import torch.distributed as dist
import fnddp.wire.c10d

fnddp.wire.c10d.EXIT_SECONDS = 1
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
if sys.argv[2] == "destroyed":
    dist.destroy_process_group()
ended = threading.Event()
atexit.register(ended.set)

def drop():
    ended.wait()
    time.sleep(0.1)
    os.write(1, b"dropped")

threading.Thread(target=drop, daemon=True).start()
"""


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("group", "says"), [("there", "dropped"), ("destroyed", "")])
def test_a_thread_that_drops_a_tensor_has_the_time_unless_the_group_is_destroyed(
    group: str, says: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", ENDS, str(tmp_path / "store"), group]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout, done.stderr) == (0, says, "")
