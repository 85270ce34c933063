"""Ranks that are threads share a core, and what takes longest is done once for all of them."""

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from fnddp.plan.draft import Draft, Request, copied
from fnddp.plan.lower import Traces, plan_of
from fnddp.plan.passes.trace import sizes_of, trace
from fnddp.plan.plan import Plan
from fnddp.wire.c10d import C10D
from fnddp.wire.groups import rank, within
from fnddp.wire.protocol import Wire


class OnOneCore(threading.Thread):
    """A thread that stays on a core, with the processes it starts: each session, and worker of xdist, has its own.

    Of ranks one computes at a time, and across cores they wake each other at every operation, which takes longer.
    """

    def run(self) -> None:
        if hasattr(os, "sched_setaffinity"):
            worker = int(os.environ.get("PYTEST_XDIST_WORKER", f"gw{os.getpid()}").removeprefix("gw"))
            with suppress(OSError):  # it is only for speed
                cores = sorted(os.sched_getaffinity(os.getpid()))
                os.sched_setaffinity(0, {cores[worker % len(cores)]})  # of this thread alone
        super().run()


class _Shared(NamedTuple):
    """A trace, the rank that it is for (None for all), and the plans made of it, by what they were asked for."""

    owner: int | None
    sizes: Mapping[str | None, int]
    traced: Draft
    plans: dict[Any, Plan]


class AskedWire:
    """A wire that notes whether a pipeline has asked on which rank it is."""

    def __init__(self, wire: Wire) -> None:
        self._wire, self.for_rank = wire, False
        self.size = wire.size

    def rank(self, group: str | None) -> int:
        self.for_rank = True
        return self._wire.rank(group)


class TracesOfThreads(Traces):
    """Traces and plans of one pipeline that threaded ranks share, where it does not ask on which rank it is.

    Where it does, each rank has its own. Ranks on gloo trace for themselves, whatever the pipeline.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._made: list[_Shared] = []

    def plan(self, request: Request) -> Plan:
        asked = tuple(request.buckets.items()), request.donation, request.dropped, request.backend
        with self._lock:
            shared = self._shared(request)
            if asked not in shared.plans:
                shared.plans[asked] = plan_of(copied(shared.traced, request))
            return shared.plans[asked]

    def _shared(self, request: Request) -> _Shared:
        sizes = sizes_of(request)
        with within(request.world):
            me = rank(None)  # not the thread: its number becomes that of another one
        for shared in self._made:
            is_for_me = shared.owner in (None, me) and shared.sizes == sizes
            if is_for_me and shared.traced.phase.holds_for(request.state, sizes):
                return shared
        asked = AskedWire(request.world.wire or C10D)
        traced = trace(replace(request, world=replace(request.world, wire=asked)))
        self._made.append(_Shared(me if asked.for_rank else None, sizes, replace(traced, request=request), {}))
        return self._made[-1]
