"""What an engine asks of what runs a step."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from fnddp.core.tree import Leaves
from fnddp.ir.program import LeafSpec
from fnddp.plan.plan import Plan
from fnddp.run.inbox import Inbox


class Runner(Protocol):
    """Runs one step after another. Control flows down: it calls nobody back.

    A step is `start`, a `feed` for each gradient that is there, `drain`, `wait`, `commit`. Before `commit` nothing is
    written over that a step which fails must leave alone.
    """

    @property
    def missing(self) -> dict[str, LeafSpec]:
        """The leaves that have not arrived in this step."""
        ...

    @property
    def plan(self) -> Plan | None:
        """What it runs; None for a pipeline as it stands."""
        ...

    @property
    def has_sent(self) -> bool:
        """Whether a collective of this step has been issued."""
        ...

    def start(self, parts: Sequence[Any], ranks: Mapping[str | None, int]) -> None:
        """Begins a step.

        Args:
            parts: The leaves of the pipeline's state.
            ranks: What means divide by, by group.
        """
        ...

    @property
    def inbox(self) -> Inbox | None:
        """Where gradients may be put by their position instead of `feed`; None where there is no plan."""
        ...

    def feed(self, path: str, grad: Tensor, *, keep: bool = False) -> bool:
        """Takes the gradient of a leaf. With a plan that donates, it is the runner's from now on.

        Args:
            path: Of the leaf.
            grad: Its gradient.
            keep: It stays the caller's, even with a plan that donates.

        Returns:
            Whether it is time for `advance`. That is not so for most: what runs for each gradient is short.

        Raises:
            ValueError: There is no such leaf, it has arrived already, or it differs from what the plan is for.
        """
        ...

    def is_due(self) -> bool:
        """Now and then, whether a collective is complete for which a segment waits: a look that costs little."""
        ...

    def advance(self, *, block: bool = False) -> None:
        """Runs what can run now; with `block`, all that needs no missing gradient."""
        ...

    def drain(self) -> None:
        """Issues every collective. Leaves that have not arrived are zeros."""
        ...

    def wait(self) -> None:
        """Returns when all collectives are complete."""
        ...

    def commit(self) -> tuple[Leaves, list[Any]]:
        """Ends the step: the means by path and the leaves of the next state.

        They may be parts of the runner's buffers, which are not written again while somebody holds them.
        """
        ...

    def abort(self) -> None:
        """Gives the step up without leaving other ranks alone: sends zeros where this rank had still to send."""
        ...

    def forget(self) -> None:
        """Gives up a step that has nothing under way."""
        ...


class UnexpectedGradient(ValueError):
    """A gradient is not of a leaf that is missing, or `is_unlike` it."""

    def __init__(self, message: str, path: str, grad: Tensor, is_unlike: bool) -> None:
        super().__init__(message)
        self.path, self.grad, self.is_unlike = path, grad, is_unlike


def unexpected(path: str, grad: Tensor, leaves: Mapping[str, LeafSpec], missing: LeafSpec | None) -> UnexpectedGradient:
    """What is wrong with a gradient.

    Args:
        path: Of the leaf that it is said to be of.
        grad: It.
        leaves: The plan's.
        missing: The leaf at `path`, if it is one that has not arrived in this step.
    """
    if missing is None:
        problem = "has arrived already in this step" if path in leaves else "is not among the plan's leaves"
        return UnexpectedGradient(f"gradient {path!r} {problem}", path, grad, is_unlike=False)
    message = (
        f"gradient {path!r} is {LeafSpec.of(grad)} on {grad.device}, but the plan was made for {missing} on "
        f"{missing.device}; lower the pipeline again for the new parameters"
    )
    return UnexpectedGradient(message, path, grad, is_unlike=True)
