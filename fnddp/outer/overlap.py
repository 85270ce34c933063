"""Exchanges that continue while ranks train: started in one call, finished in a later one."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from fnddp.core.sync import State, Sync
from fnddp.core.tree import Leaves
from fnddp.outer.contract import Exchanges
from fnddp.plan.draft import Donation
from fnddp.run.engine import Engine, Engines
from fnddp.run.step import Step
from fnddp.run.vote import StepFailedError
from fnddp.wire.protocol import Wire


class Overlapped(Exchanges):
    """Exchanges over any wire: lowered, run in the background between calls, and ended on all ranks alike.

    An error on one rank, or in its `check` as an exchange begins, ends an exchange on all of them: that rank raises it,
    the others `StepFailedError`. Parameters and state are then unchanged, and the next call exchanges again.
    """

    def __init__(self, wire: Wire, check: Callable[[], None]) -> None:
        self._wire, self._check = wire, check
        self._engines: dict[tuple[str, Sync], Engines] = {}
        self._open: dict[str, _Open] = {}

    @property
    def under_way(self) -> tuple[str, ...]:
        """Names of the exchanges that have started and not ended, in the order of their starts."""
        return tuple(self._open)

    def poll(self) -> None:
        """Advance open exchanges without waiting. Errors are raised where they end."""
        for each in self._open.values():
            each.advance(each.step.advance)

    def begin(self, name: str, sync: Sync, leaves: Leaves, state: State) -> None:
        """Start an exchange; if it fails, `end` raises the error, as on the other ranks."""
        self.discard([name])
        if (name, sync) not in self._engines:
            self._engines[name, sync] = Engines(sync, donation=Donation(), learns_order=False, wire=self._wire)
        engine = self._engines[name, sync].of(leaves, state)
        step = engine.begin(state)
        self._open[name] = _Open(engine, step, leaves)
        self._open[name].advance(self._check)
        self._open[name].advance(lambda: step.feed_all(dict(reversed(leaves.items())), keep=True))

    def end(self, name: str, sync: Sync, leaves: Leaves, state: State) -> tuple[Leaves, State]:
        """Finish the open exchange of this name, or run a whole one if it is not of these leaves."""
        if name not in self._open or self._open[name].leaves is not leaves:
            self.begin(name, sync, leaves, state)
        return self._open.pop(name).finish()

    def discard(self, names: Iterable[str]) -> None:
        """Finish the open ones of these exchanges, on all ranks, and drop their results."""
        for name in names:
            found = self._open.pop(name, None)
            if found is not None and found.error is None:
                with suppress(StepFailedError):
                    found.finish()


@dataclass
class _Open:
    """An exchange under way; `error` is its failure on this rank, of which the other ranks have been notified."""

    engine: Engine
    step: Step
    leaves: Leaves
    error: Exception | None = None

    def advance(self, run: Callable[[], None]) -> None:
        if self.error is None:
            try:
                run()
            except Exception as error:
                self.step.fail(error)
                self.error = error

    def finish(self) -> tuple[Leaves, State]:
        if self.error is not None:
            raise self.error
        try:
            done = self.step.finish()
        except BaseException as error:
            self.step.fail(error)
            raise
        return {path: done.mean[path] for path in self.leaves}, self.engine.hand_over()
