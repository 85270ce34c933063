"""What takes longest on ranks that are threads, once for all of them."""

import threading
from collections.abc import Mapping
from dataclasses import replace

from fnddp.plan.draft import Draft, Request, copied
from fnddp.plan.lower import Traces
from fnddp.plan.passes.trace import sizes_of, trace


class TracesOfThreads(Traces):
    """Traces of one pipeline that threaded ranks share, where it does not ask on which rank it is.

    Where it does, each rank has its own. Ranks on gloo trace for themselves, whatever the pipeline.
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
