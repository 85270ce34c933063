"""What takes longest on ranks that are threads, once for all of them."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from fnddp.laws import Grads, check_on_rank
from fnddp.plan.draft import Draft, Request, copied
from fnddp.plan.lower import Traces
from fnddp.plan.passes.trace import sizes_of, trace
from fnddp.ranks import run_threads
from fnddp.sync import Sync

Pass = Callable[[Draft], Draft]


def in_turn(passes: Iterable[Pass]) -> tuple[Pass, ...]:
    """Passes of which only one runs at a time: two may not compute with a trace's fake tensors at once."""
    lock = threading.Lock()

    def locked(step: Pass) -> Pass:
        def run(draft: Draft) -> Draft:
            with lock:
                return step(draft)

        return run

    return tuple(map(locked, passes))


class TracesOfThreads(Traces):
    """Traces of one pipeline that threaded ranks share, where it does not ask on which rank it is.

    Where it does, each rank has its own. Ranks on gloo trace for themselves, whatever the pipeline. Passes over what is
    shared must be `in_turn`, as conftest.py makes them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._made: list[tuple[int | None, Mapping[str | None, int], Draft]] = []

    def of(self, request: Request) -> Draft:
        sizes, me = sizes_of(request), threading.get_ident()
        with self._lock:
            for owner, of_sizes, made in self._made:
                if owner in (None, me) and of_sizes == sizes and made.phase.holds_for(request.state, sizes):
                    return copied(made, request)
            traced = trace(request)
            self._made.append((me if traced.is_of_rank else None, sizes, replace(traced, request=request)))
            return copied(traced, request)

    def clear(self) -> None:
        """Others may still ask."""


def check_laws(n: int, sync: Sync, grads: Grads) -> None:
    """`fnddp.laws.check` on `n` ranks, with one trace for all of them and for all laws."""
    run_threads(n, check_on_rank, sync, grads, TracesOfThreads(), seconds=300)
