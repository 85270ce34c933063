"""Exchanges that continue while ranks train: started in one call, finished in a later one."""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from fnddp.outer.contract import Exchanges
from fnddp.plan.draft import Donation
from fnddp.run.engine import Engine, Engines
from fnddp.run.vote import StepFailedError
from fnddp.sync import State, Sync
from fnddp.tree import Leaves
from fnddp.wire.protocol import Wire


class _Open(NamedTuple):
    """`error`: the exchange's error on this rank, of which the other ranks have been notified."""

    engine: Engine
    leaves: Leaves
    error: BaseException | None


class Overlapped(Exchanges):
    """Exchanges over any wire: lowered, run in the background between calls, and ended on all ranks alike.

    An error on one rank ends an exchange on all of them: that rank raises it, the others `StepFailedError`. Parameters
    and state are then unchanged, and the next call exchanges again.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._engines: dict[tuple[str, Sync], Engines] = {}
        self._open: dict[str, _Open] = {}

    @property
    def under_way(self) -> tuple[str, ...]:
        """Names of the exchanges that have started and not ended, in the order of their starts."""
        return tuple(self._open)

    def poll(self) -> None:
        """Advance open exchanges without waiting. Errors are raised where they end."""
        for name in self.under_way:
            self._carry_on(name, self._open[name].engine.poll)

    def begin(self, name: str, sync: Sync, leaves: Leaves, state: State) -> None:
        """Start an exchange; if it fails, `end` raises the error, as on the other ranks."""
        self._discard(name)
        engine = self._engine(name, sync, leaves, state)
        engine.start(state)
        self._open[name] = _Open(engine, leaves, None)
        self._carry_on(name, lambda: engine.feed_all(dict(reversed(leaves.items())), keep=True))

    def end(self, name: str, sync: Sync, leaves: Leaves, state: State) -> tuple[Leaves, State]:
        """Finish the open exchange of this name, or run a whole one if it is not of these leaves."""
        found = self._open.get(name)
        if found is None or found.leaves is not leaves:
            self.begin(name, sync, leaves, state)
        return self._finish(name)

    def discard(self) -> None:
        """Finish open exchanges, on all ranks, and drop their results."""
        for name in self.under_way:
            self._discard(name)

    def _carry_on(self, name: str, run: Callable[[], None]) -> None:
        under_way = self._open[name]
        if under_way.error is None:
            try:
                run()
            except Exception as error:
                under_way.engine.fail(error)
                self._open[name] = under_way._replace(error=error)

    def _finish(self, name: str) -> tuple[Leaves, State]:
        engine, leaves, failed = self._open.pop(name)
        if failed is not None:
            raise failed
        try:
            done = engine.finish()
        except BaseException as error:
            engine.fail(error)
            raise
        return {path: done.mean[path] for path in leaves}, engine.hand_over()

    def _discard(self, name: str) -> None:
        found = self._open.get(name)
        if found is not None and found.error is None:
            with suppress(StepFailedError):
                self._finish(name)
        self._open.pop(name, None)

    def _engine(self, name: str, sync: Sync, leaves: Leaves, state: State) -> Engine:
        engines = self._engines.get((name, sync))
        if engines is None:
            engines = Engines(sync, donation=Donation(), learns_order=False, wire=self._wire)
            self._engines[name, sync] = engines
        return engines.of(leaves, state)
