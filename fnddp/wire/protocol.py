"""Wires, which move bytes between ranks."""

import abc
import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor

from fnddp.wire.kinds import Kind, Work

Run = TypeVar("Run", bound=Callable[..., Any])


class CollectiveError(RuntimeError):
    """A collective failed: another rank has died or left, or it took longer than the process group's timeout."""


class Wire(Protocol):
    """Moves bytes between the ranks of process groups, which are given by name; None is the default group.

    The default is `fnddp.wire.c10d.C10d`: torch.distributed. All ranks start the same collectives of a group in the
    same order. Kinds that compute nothing send bytes, whatever the dtype. A wire must be hashable and weakly
    referenceable; where ranks are threads, each has a wire of its own.
    """

    def size(self, group: str | None) -> int:
        """Return the number of ranks of `group` that take part in the next step, by which a mean divides."""
        ...

    def rank(self, group: str | None) -> int:
        """Return this rank's place among the ranks of `group`: its row, for kinds with a row for each rank."""
        ...

    def start(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: str | None) -> Work:
        """Start a collective and return at once; it owns `send` and `receive` until it is waited for.

        Args:
            kind: Which collective.
            send: This rank's payload: flat, or `[ranks, width]` where the kind sends a row to each rank.
            receive: Memory for the result: the same tensor as `send` for an all_reduce, else flat or `[ranks, width]`.
            op: "sum", "max" or "min" for a kind that computes; None for one that carries bytes.
            group: The name of the group.

        Raises:
            RuntimeError: It cannot be started.
        """
        ...

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, Work]:
        """Start to gather the flags of all ranks, by which they agree on a step's outcome: never counted as payload.

        Returns:
            Memory for `[ranks, *flags.shape]`, filled once the work is waited for; and the work.
        """
        ...


class Elastic(abc.ABC):
    """An additional base class of a `Wire` whose ranks may leave between two steps, and others join.

    The order in which gradients arrive is not learnt from a step, since newcomers cannot know it. A collective that
    loses a rank does not raise: its failure is reported, its result is undefined, and the vote of the step raises.
    """

    @property
    @abc.abstractmethod
    def epoch(self) -> int:
        """A number that is incremented when the ranks change, upon which all of them start afresh."""

    @property
    @abc.abstractmethod
    def lost(self) -> Exception | None:
        """The error with which a collective of this epoch has failed."""

    @abc.abstractmethod
    def report(self, error: BaseException) -> None:
        """Mark the step as failed with `error`: no rank may apply it."""


def reporting(wire: Wire, run: Run) -> Run:
    """Return `run`, a call whose step ends in it: each of its errors is reported to `wire` if that is elastic."""
    if not isinstance(wire, Elastic):
        return run

    @functools.wraps(run)
    def reported(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            wire.report(error)
            raise

    return reported  # pyright: ignore[reportReturnType]
