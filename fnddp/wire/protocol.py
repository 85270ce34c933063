"""Who moves bytes between ranks: what an engine asks of a wire."""

import abc
from typing import Protocol

from torch import Tensor

from fnddp.wire.kinds import Kind


class CollectiveError(RuntimeError):
    """A collective failed: another rank has died or left, or it took longer than the process group's timeout."""


class Work(Protocol):
    """A collective that has been started."""

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> object:
        """Returns when it is done; on CUDA, when the current stream will wait for it. False says that it failed."""
        ...


class Wire(Protocol):
    """Moves bytes between the ranks of process groups, which have names; None is the default one.

    The default is `fnddp.wire.c10d.C10d`: torch.distributed. All ranks start the same collectives of a group in the
    same order. A wire need not know which dtypes there are: kinds that compute nothing hand it bytes. It can be hashed
    and weakly referred to, as objects can; where ranks are threads, each has one of its own.
    """

    def size(self, group: str | None) -> int:
        """The number of ranks of `group` that take part in the next step: what a mean divides by."""
        ...

    def rank(self, group: str | None) -> int:
        """This rank's place among them: its row where a kind has one for each."""
        ...

    def start(self, kind: Kind, send: Tensor, receive: Tensor, op: str | None, group: str | None, tag: int = 0) -> Work:
        """Starts a collective and returns at once; `send` and `receive` are its own until it is waited for.

        Args:
            kind: Which collective.
            send: What this rank hands over: flat, or `[ranks, width]` where the kind sends a row to each rank.
            receive: Where the result goes: the same tensor as `send` for an all_reduce, else flat or
                `[ranks, width]`.
            op: "sum", "max" or "min" for a kind that computes; None for one that carries bytes.
            group: The name of the group.
            tag: Tells collectives apart that are under way at the same time; the same on all ranks.

        Raises:
            RuntimeError: It cannot be started.
        """
        ...

    def vote(self, flags: Tensor, group: str | None) -> tuple[Tensor, Work]:
        """Starts to gather the flags of all ranks, with which they end a step alike: no payload, never counted.

        Returns:
            What will be `[ranks, *flags.shape]` once the work is waited for, and the work.
        """
        ...


class Elastic(abc.ABC):
    """A wire whose ranks may leave between two steps, and others join: a `Wire` that is this, too.

    What a newcomer cannot know is not learnt from a step: the order in which gradients arrive. A collective that loses
    a rank does not raise: it is reported, its result means nothing, and the vote of the step raises.
    """

    @property
    @abc.abstractmethod
    def epoch(self) -> int:
        """Another number after each change of its ranks, with which all of them begin anew, in step."""

    @property
    @abc.abstractmethod
    def lost(self) -> Exception | None:
        """What a collective of this epoch has failed with."""

    @abc.abstractmethod
    def report(self, error: Exception) -> None:
        """The step is none, because of `error`. Who asks the wire whether it is to be taken is told so."""


def waited(work: Work) -> None:
    """Waits for `work`.

    Raises:
        RuntimeError: It failed, also where it says so by returning False.
    """
    if work.wait() is False:
        raise RuntimeError("its wait() returned False: it did not complete")
