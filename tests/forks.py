"""Processes for tests, forked from one that has imported torch: to import it takes seconds, to fork milliseconds.

One such server serves all tests of a session. What they fork has its environment, not what a test has set since.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch.distributed as dist


def forks() -> ForkServerContext:
    """Return the context of `multiprocessing` for processes that are forked from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


class Scripts:
    """A script as `python SCRIPT` runs it or, with ranks, as `torchrun` does: each rank is a process.

    The store is held here, as it is by torchrun's agent.
    """

    def __init__(self, script: Path, *arguments: str, ranks: int = 0, strict: bool = True) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="fnddp-scripts-")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks else None
        self.outputs = [Path(self.folder.name) / str(rank) for rank in range(max(1, ranks))]
        self.processes: list[Any] = []
        for rank, output in enumerate(self.outputs):
            environment = {} if self.store is None else _of_torchrun(rank, ranks, self.store.port)
            process = forks().Process(
                target=_run_script, args=(str(script), arguments, environment, str(output), strict), daemon=False
            )
            process.start()
            self.processes.append(process)

    def said(self, seconds: float) -> str:
        """Return the output of the script on all ranks together, which have to end well."""
        try:
            for process in self.processes:
                process.join(seconds)
            text = "\n".join(output.read_text() for output in self.outputs)
            assert [process.exitcode for process in self.processes] == [0] * len(self.processes), text
            return text
        finally:
            for process in self.processes:
                process.kill()
                process.join()
                process.close()
            self.folder.cleanup()


def _of_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    names = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {**names, **{name: str(number) for name, number in numbers.items()}}


def _run_script(
    script: str, arguments: tuple[str, ...], environment: Mapping[str, str], output: str, strict: bool
) -> None:
    with Path(output).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    if strict:
        warnings.simplefilter("error")
    runpy.run_path(script, run_name="__main__")
