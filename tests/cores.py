"""Threads that are ranks, on one core: one of them computes at a time, and across cores they wake each other at every
operation, which takes longer than the operation.
"""

import os
import threading
from contextlib import suppress


class OnOneCore(threading.Thread):
    """A thread that stays on a core, with the processes it starts: each session, and worker of xdist, has its own."""

    def run(self) -> None:
        if hasattr(os, "sched_setaffinity"):
            worker = int(os.environ.get("PYTEST_XDIST_WORKER", f"gw{os.getpid()}").removeprefix("gw"))
            with suppress(OSError):  # it is only for speed
                cores = sorted(os.sched_getaffinity(os.getpid()))
                os.sched_setaffinity(0, {cores[worker % len(cores)]})  # of this thread alone
        super().run()
