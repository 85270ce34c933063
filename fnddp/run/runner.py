"""What an engine asks of what runs a step."""

from collections.abc import Container, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from fnddp.plan.ir import LeafSpec
from fnddp.plan.plan import Plan
from fnddp.tree import Leaves


class Runner(Protocol):
    """Runs one step after another. Control flows down: it calls nobody back.

    A step is `start`, a `feed` for each gradient that is there, `drain`, `wait`, `commit`. Before `commit` nothing is
    written over that a step which fails must leave alone.
    """

    missing: dict[str, None]
    """The leaves that have not arrived in this step."""

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

    def feed(self, path: str, grad: Tensor) -> None:
        """Takes the gradient of a leaf. With a plan that donates, it is the runner's from now on.

        Raises:
            ValueError: There is no such leaf, it has arrived already, or it differs from what the plan is for.
        """
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


def require_expected(path: str, grad: Tensor, leaves: Mapping[str, LeafSpec], missing: Container[str]) -> LeafSpec:
    """What is known of the leaf at `path`. Raises a ValueError unless it is missing yet and `grad` is like it."""
    leaf = leaves.get(path)
    if leaf is None or path not in missing:
        problem = "has arrived already in this step" if leaf is not None else "is not among the plan's leaves"
        raise ValueError(f"gradient {path!r} {problem}")
    if (grad.shape, grad.dtype, grad.device) != (leaf.shape, leaf.dtype, leaf.device):
        raise ValueError(
            f"gradient {path!r} is {LeafSpec.of(grad)} on {grad.device}, but the plan was made for {leaf} on "
            f"{leaf.device}; lower the pipeline again for the new parameters"
        )
    return leaf
