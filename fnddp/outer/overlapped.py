"""Exchanges of outer steps that run in the background, each with a `Backward` of its own."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch

from fnddp.adapters.backward import Backward
from fnddp.core.sync import State, Sync
from fnddp.core.tree import Leaves
from fnddp.outer.contract import Exchanges
from fnddp.plan.draft import Donation
from fnddp.run.engine import Engines, delegated
from fnddp.run.lane import Lane
from fnddp.run.step import Step, require_noticed
from fnddp.wire.protocol import CollectiveError, Wire
from fnddp.wire.weights import Weight


class Overlapped(Exchanges):
    """Exchanges over any wire: lowered, run in the background between calls, and ended with one result on all ranks.

    An error on one rank, or in its `check` when an exchange begins, ends the exchange on all ranks: that rank raises
    the error, the others raise `StepFailedError`. Parameters and state are then unchanged, and the next call exchanges
    again. Exchanges send one after the other, in the order in which they began.
    """

    def __init__(
        self,
        wire: Wire,
        check: Callable[[], None],
        other_groups: Collection[str | None],
        weight: Callable[[str], Weight],  # of this rank, in the named exchange that begins
    ) -> None:
        self._wire, self._check, self._other_groups, self._weight = wire, check, other_groups, weight
        self._engines: dict[tuple[str, Sync], Engines] = {}
        self.lane = Lane()  # of all exchanges
        self._open: dict[str, _Open] = {}

    @property
    def under_way(self) -> tuple[str, ...]:
        return tuple(self._open)

    @property
    def steps(self) -> int:
        """The number of exchanges that have succeeded."""
        return sum(engines.last.steps for engines in self._engines.values() if engines.last is not None)

    broken = delegated("lane.broken")

    def connect(self, groups: Iterable[str | None], device: torch.device) -> None:
        """Create the communicators of exchanges over `groups`. All ranks must call it."""
        self.lane.connect(self._wire, groups, device)

    def require_noticed(self) -> None:
        """Raise a CollectiveError if another rank failed in an exchange that the host has not waited for."""
        require_noticed(self.lane.notices)

    def poll(self) -> None:
        """Advance the oldest open exchange, without waiting. Errors are raised where it ends."""
        for each in [*self._open.values()][:1]:
            each.step.is_early = each.is_early
            each.attempt(each.step.advance)

    def begin(self, name: str, sync: Sync, leaves: Leaves, state: State) -> None:
        """Start an exchange; if it fails, `end` raises the error, as on the other ranks."""
        self.discard([name])
        if (name, sync) not in self._engines:
            self._engines[name, sync] = Engines(
                sync,
                donation=Donation(),
                learns_order=False,
                wire=self._wire,
                other_groups=self._other_groups,
                lane=self.lane,
            )
        engine = self._engines[name, sync].of(leaves, state)
        backward = Backward(engine)
        weight = self._weight(name) if sync.takes_weight else None
        step = backward.begin(state=state, weight=weight, sends=False)
        self._open[name] = opened = _Open(backward, step, leaves, step.is_early)
        step.is_early = False
        opened.attempt(self._check)
        opened.attempt(lambda: step.feed_all(dict(reversed(leaves.items())), keep=True))
        self.poll()

    def end(self, name: str, sync: Sync, leaves: Leaves, state: State) -> tuple[Leaves, State]:
        """Finish the open exchange `name` of these leaves; without one, run a whole exchange."""
        if name not in self._open or self._open[name].leaves is not leaves:
            self.begin(name, sync, leaves, state)
        return self._end(name)

    def _end(self, name: str) -> tuple[Leaves, State]:
        first = next(iter(self._open))
        if first != name:
            self._open[first].send()
        return self._open.pop(name).end()

    def discard(self, names: Iterable[str]) -> None:
        """Finish the open exchanges among `names`, on all ranks, and drop their results."""
        for name in names:
            if name in self._open:
                try:
                    self._end(name)
                except CollectiveError:
                    raise
                except Exception:  # on all ranks: there is no result to drop
                    continue


@dataclass
class _Open:
    """An open exchange. If it fails on this rank, the other ranks are notified where it ends.

    They wait for this rank there. Until then it must take its local steps: these run collectives in a sharded worker.
    """

    backward: Backward
    step: Step
    leaves: Leaves
    is_early: bool  # see `Step`

    def attempt(self, run: Callable[[], object]) -> None:
        """Call `run`, and keep its error for the end; raise interrupts now: the end may be many local steps away."""
        try:
            if self.backward.failure is None:
                run()
        except Exception as error:
            self.backward.keep(error)
        except BaseException as error:
            self.backward.keep(RuntimeError(f"{type(error).__name__} interrupted this exchange"))
            raise

    def send(self) -> None:
        """Send all remaining messages, as all ranks do, before another exchange ends; zeros if this one failed here."""
        self.attempt(lambda: self.step.advance(block=True))
        if self.backward.failure is not None:
            self.step.send_zeros()

    def end(self) -> tuple[Leaves, State]:
        done = self.backward.end()
        return {path: done.mean[path] for path in self.leaves}, self.backward.engine.release_state()
