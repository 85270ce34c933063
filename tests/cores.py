"""Threads that are ranks, on one core: one of them computes at a time, and across cores they wake each other at every
operation, which takes longer than the operation.
"""

import os
import threading


class OnOneCore(threading.Thread):
    """A thread that stays on a core: each worker of xdist has its own, as far as there are."""

    def run(self) -> None:
        if hasattr(os, "sched_setaffinity"):
            worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
            cores = sorted(os.sched_getaffinity(os.getpid()))
            os.sched_setaffinity(0, {cores[worker % len(cores)]})  # of this thread alone
        super().run()
