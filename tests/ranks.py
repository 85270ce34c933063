"""A pool of gloo processes for tests; for breadth there are the threads of `fnddp.simulation.ranks`."""

import faulthandler
import functools
import gc
import importlib
import inspect
import logging
import os
import pickle
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from fnddp.simulation.ranks import RankFailed, run_threads
from tests.forks import forks

POOL_SECONDS = 120
POOL_RANKS = 4


class GlooPool:
    """Processes that outlive tests, with a process group for each; they import `module` first."""

    def __init__(self, ranks: int = POOL_RANKS, module: str = __name__) -> None:
        context = forks()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.jobs = [context.Queue() for _ in range(ranks)]
        self.results = context.Queue()
        self.traces = tempfile.TemporaryDirectory(prefix="fnddp-ranks-")
        self.processes = [
            context.Process(
                target=_serve,
                args=(rank, self.store.port, self.jobs[rank], self.results, self.traces.name, module),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()
        self.count = 0

    def run(
        self,
        n: int,
        fn: Callable[..., Any],
        *arguments: Any,
        timeout: float = POOL_SECONDS,
        may_die: bool = False,
        backend: str = "gloo",
    ) -> list[Any]:
        """Run `fn(rank, *arguments)` on the first `n` processes; `fn` must be a module-level function.

        With `may_die` one that is killed in it returns None, and the pool ends with this job."""
        self.count += 1
        waits = timedelta(seconds=max(timeout, POOL_SECONDS) / 2)  # one rank for another, as for its compiler
        for rank in range(n):
            self.jobs[rank].put((self.count, n, may_die, backend, waits, pickle.dumps((fn, arguments))))
        results: list[Any] = [None] * n
        errors: dict[int, BaseException] = {}
        traces: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        waiting = set(range(n))
        while waiting:
            try:
                rank, result, error, trace = self.results.get(timeout=1)
            except queue.Empty:
                dead = {rank for rank in waiting if not self.processes[rank].is_alive()}
                waiting -= dead
                if not may_die:
                    errors |= {rank: ChildProcessError(f"rank {rank} died") for rank in dead}
                    traces |= {rank: f"died: {self.processes[rank].exitcode}\n{self._stack(rank)}" for rank in dead}
                if waiting and time.monotonic() > deadline:
                    self._ask_for_stacks(waiting)
                    late = {rank: f"did not finish in {timeout} s\n{self._stack(rank)}" for rank in waiting}
                    self.close()
                    raise TimeoutError(_told(late | traces)) from None
                continue
            waiting.remove(rank)
            results[rank] = pickle.loads(result)
            if trace:
                errors[rank] = pickle.loads(error)
                traces[rank] = trace
        if may_die:
            self.close()
        if errors:
            raise RankFailed(_told(traces), errors)
        return results

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.traces.cleanup()

    def _ask_for_stacks(self, ranks: set[int]) -> None:
        for process in (self.processes[rank] for rank in ranks):
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(10)  # for faulthandler to write, where others compute

    def _stack(self, rank: int) -> str:
        return _trace_file(self.traces.name, rank).read_text()


def _told(traces: dict[int, str]) -> str:
    return "".join(f"\nrank {rank}: {trace}" for rank, trace in sorted(traces.items()))


def _trace_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.txt"


def _serve(rank: int, port: int, jobs: Any, results: Any, traces: str, module: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    importlib.import_module(module)
    with _trace_file(traces, rank).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        faulthandler.enable(file)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        while True:
            job, n, may_die, backend, waits, payload = jobs.get()
            result, error, trace = None, None, ""
            try:
                prefixed = dist.PrefixStore(f"job{job}", store)
                dist.init_process_group(backend, rank=rank, world_size=n, store=prefixed, timeout=waits)
                prefixed.set(f"rank {rank} has begun", "")  # none ends before others are connected
                prefixed.wait([f"rank {other} has begun" for other in range(n)], waits)
                fn, arguments = pickle.loads(payload)
                result = fn(rank, *arguments)
            except BaseException as raised:
                error, trace = _picklable(raised), traceback.format_exc()
            finally:
                if dist.is_initialized() and not may_die:
                    dist.destroy_process_group()
                    _clear_sharding_prop_cache()  # which keeps meshes, and so threads of gloo that wake all the time,
                    if job % 8 == 0:
                        gc.collect()  # as cycles do
            results.put((rank, pickle.dumps(result), pickle.dumps(error), trace))
            if may_die:
                results.close()
                results.join_thread()
                os._exit(0)  # gloo's threads may not join a dead peer


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def on_ranks(
    *sizes: Any, seconds: float = POOL_SECONDS, threads: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes the body of a test, whose first parameter is `rank`, what each of n gloo processes runs, for n in `sizes`.

    Or, with `threads`, each of n threads. Its other parameters come from `parametrize`, or are fixtures whose values
    pickle.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            n = arguments.pop("ranks", sizes[0])
            if threads:
                run_threads(n, functools.partial(body, **arguments))
                return
            arguments.pop("gloo")(n, _run_body, body.__module__, body.__qualname__, arguments, timeout=seconds)

        _, *others = inspect.signature(body).parameters.values()
        names = [*([] if threads else ["gloo"]), *(["ranks"] if len(sizes) > 1 else [])]
        ours = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        test.__signature__ = inspect.Signature(
            [*ours, *(other.replace(default=inspect.Parameter.empty) for other in others)]
        )
        return pytest.mark.parametrize("ranks", sizes)(test) if len(sizes) > 1 else test

    return decorate


@contextmanager
def logged() -> Iterator[list[str]]:
    """What fnddp logs on this rank, where pytest's caplog does not reach."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("fnddp")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def _run_body(rank: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    inspect.unwrap(getattr(importlib.import_module(module), name))(rank, **arguments)
