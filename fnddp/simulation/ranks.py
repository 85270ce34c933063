"""Ranks as threads of this process, to test code that needs several ranks without starting processes."""

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,  # pyright: ignore[reportPrivateUsage]
    _reduce_ops,  # pyright: ignore[reportPrivateUsage]
    _uninstall_threaded_pg,  # pyright: ignore[reportPrivateUsage]
)

from fnddp.device import accelerator

_c10d: Any = torch._C._distributed_c10d  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]

# torch's sum begins with 0.0, so that the sum of a single -0.0 would be 0.0.
_reduce_ops[dist.ReduceOp.SUM] = lambda x: torch.stack(x).sum(0) if x[1:] else x[0]  # pyright: ignore

GRACE_SECONDS = 60  # to wait for the other ranks' threads to end after an error


class RankFailed(AssertionError):
    """A rank raised. The message begins with the first rank's error and its notes, and has its traceback.

    Attributes:
        errors: The exceptions by rank, without ranks that were ended because another one raised.
    """

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


def run_threads(n: int, fn: Callable[..., Any], *arguments: Any, seconds: float = 180) -> list[Any]:
    """Run `fn(rank, *arguments)` on `n` threads, each a rank of a process group that lasts for this call.

    A rank that raises ends the others, because they may be waiting for it. This process must not have a default process
    group. Make one call at a time.

    Args:
        n: Number of ranks.
        fn: The function that each rank runs.
        arguments: Arguments for all ranks; shared, not copied.
        seconds: Time limit for all ranks together.

    Returns:
        The results of `fn`, in rank order.

    Raises:
        RankFailed: A rank raised, or took too long.
        RuntimeError: This process has a default process group.

    >>> import torch
    >>> from fnddp import allreduce
    >>> run_threads(3, lambda rank: allreduce({"w": torch.tensor(float(rank))}, ())[0]["w"].item())
    [1.0, 1.0, 1.0]
    """
    if dist.is_initialized():
        raise RuntimeError("threads cannot be ranks while this process is a rank: it has a default process group")
    if accelerator() is None:
        # torch 2.11 crashes where the thread that traced first has ended (pytorch#178950); this one stays.
        torch._C._ensureCUDADeviceGuardSet()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    _c10d._set_thread_isolation_mode(True)
    world: Any = _install_threaded_pg()
    if not hasattr(world, "comms"):  # torch 2.11: destroy_process_group asks for it, and threaded worlds lack it
        type(world).comms = []
    store = dist.HashStore()
    results: list[Any] = [None] * n
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=n, store=store)
            results[rank] = fn(rank, *arguments)
        except BaseException as error:
            errors.setdefault(rank, error)
            ProcessLocalGroup.exception_handle(error)  # wakes the other ranks
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(n)]
    try:
        for thread in threads:
            thread.start()
        for rank in _alive_after(threads, seconds):
            errors.setdefault(rank, TimeoutError(f"ran for {seconds} s"))
        if errors:  # late ranks would exchange with ranks of the next call
            ProcessLocalGroup.exception_handle(None)
            _alive_after(threads, GRACE_SECONDS)
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        _c10d._set_thread_isolation_mode(False)
    if errors:
        # torch raises SystemExit in the ranks that wait for a failed one.
        own = {rank: errors[rank] for rank in sorted(errors) if not isinstance(errors[rank], SystemExit)} or errors
        raise RankFailed(_message(own), own)
    return results


def _message(errors: dict[int, BaseException]) -> str:
    """Return the first rank's error, with its notes and traceback, and the different errors of other ranks."""
    said = {rank: "".join(traceback.format_exception_only(error)).strip() for rank, error in errors.items()}
    first, *others = said
    trace = traceback.TracebackException.from_exception(errors[first])
    trace.__notes__ = []  # they are above
    same = [str(rank) for rank in others if said[rank].splitlines()[0] == said[first].splitlines()[0]]
    lines = [f"rank {first}: {said[first]}", "", "".join(trace.format())]
    lines += [f"The same on rank {', '.join(same)}."] if same else []
    lines += [f"rank {rank}: {said[rank]}" for rank in others if str(rank) not in same]
    return "\n".join(lines)


def _alive_after(threads: list[threading.Thread], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [rank for rank, thread in enumerate(threads) if thread.is_alive()]
