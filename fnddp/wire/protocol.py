"""The interface of wires. A wire moves bytes between ranks."""

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
    """An object that moves bytes between the ranks of process groups. Groups are given by name; None is the default.

    The default wire is torch.distributed, `fnddp.wire.c10d.C10d`. All ranks start the same collectives of a group in
    the same order. Kinds that do not reduce send bytes of any dtype. A wire must be hashable and weakly referenceable.
    If ranks are threads, each needs its own wire.
    """

    def size(self, group: str | None) -> int:
        """Return the number of ranks of `group` in the next step. Means are divided by it."""
        ...

    def rank(self, group: str | None) -> int:
        """Return this rank's index in `group`. It is its row, for kinds with a row for each rank."""
        ...

    def start(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: str | None) -> Work:
        """Start a collective and return at once. It owns `send` and `receive` until the caller has waited for it.

        Args:
            kind: The kind of collective.
            send: This rank's payload: flat, or `[ranks, width]` if the kind sends a row to each rank.
            receive: Memory for the result: the same tensor as `send` for an all_reduce, else flat or `[ranks, width]`.
            op: "sum", "max" or "min" for a kind that reduces; None for a kind that moves bytes.
            group: The name of the group.

        Raises:
            RuntimeError: The collective cannot be started.
        """
        ...

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, Work]:
        """Start to gather the flags by which all ranks agree on a step's outcome. They never count as payload.

        Returns:
            Memory of shape `[ranks, *flags.shape]`, filled once the caller has waited for the work; and the work.
        """
        ...


class Elastic(abc.ABC):
    """An additional base class for a `Wire` with ranks that may leave or join between two steps.

    With it, the order in which gradients arrive is not learnt from a step, because newcomers cannot know it. A
    collective that loses a rank does not raise: it reports the failure, its result is undefined, and the vote raises.
    """

    @property
    @abc.abstractmethod
    def epoch(self) -> int:
        """A number that is incremented when the ranks change. All ranks then start anew."""

    @property
    @abc.abstractmethod
    def lost(self) -> Exception | None:
        """The error of a collective that failed in this epoch; None if there is none."""

    @abc.abstractmethod
    def report(self, error: BaseException) -> None:
        """Mark the step as failed with `error`, so that no rank applies it."""


def reporting(wire: Wire, run: Run) -> Run:
    """Wrap `run`, a call that begins and ends a step, to report its errors to `wire` if the wire is elastic."""
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
