"""The outer optimizer: SGD with momentum, on the differences between an anchor and the ranks' parameters."""

from typing import Any

import torch
from torch import Tensor

from fnddp import tree
from fnddp.outer.contract import Outer, require_options
from fnddp.sync import Sync, require_state
from fnddp.tree import Leaves, Tree, require_leaves


class Descending(Outer):
    """Base of outer steps that move an anchor, equal on all ranks, by a step of SGD on mean differences to it.

    These options are fields of subclasses; their states have a field `anchor`.
    """

    sync: Sync
    every: int
    lr: float
    momentum: float
    nesterov: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        require_options(self, self.sync, every=1)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"{type(self).__name__}: momentum must be in [0, 1), got {self.momentum!r}")

    @property
    def period(self) -> int:
        return self.every

    def anchored(self, params: Tree) -> tuple[Leaves, Leaves]:
        """Return the anchor and the velocity before the first step: copies, and zeros (nothing without momentum).

        Raises:
            TypeError: A leaf has no fractions.
        """
        leaves, _ = tree.flatten(params)
        for path, leaf in leaves.items():
            if not tree.is_inexact(leaf):
                raise TypeError(
                    f"{type(self).__name__}: leaf {path!r} is {leaf.dtype}, which has no descent; leave it out of the "
                    "tree"
                )
        anchor = {path: leaf.detach().clone() for path, leaf in leaves.items()}
        return anchor, {path: torch.zeros_like(leaf) for path, leaf in anchor.items() if self.momentum}

    def descended(self, anchor: Leaves, delta: Leaves, velocity: Leaves) -> tuple[Leaves, Leaves]:
        """Return anchor and velocity after a step with `delta` as the gradient, equal to `torch.optim.SGD` to the bit.

        Args:
            anchor: Leaves to move.
            delta: The mean over ranks of `anchor` minus their parameters.
            velocity: Of these leaves and others, or empty without momentum.
        """
        moved: dict[str, Tensor] = {}
        velocities: dict[str, Tensor] = {}
        for path, leaf in anchor.items():
            direction = delta[path]
            if self.momentum:
                velocities[path] = velocity[path] * self.momentum + delta[path]
                direction = velocities[path]
                if self.nesterov:
                    direction = torch.add(delta[path], velocities[path], alpha=self.momentum)
            moved[path] = torch.add(leaf, direction, alpha=-self.lr)
        return moved, velocities

    def require_own(self, params: Leaves, state: Any, kind: type) -> None:
        """Raise a ValueError unless `state` is a `kind` made for these leaves, which may have a row for each rank."""
        owner = type(self).__name__
        require_leaves(owner, params)
        require_state(owner, state, kind)
        for path in [*state.anchor, *params]:
            want = state.anchor[path].shape if path in state.anchor else None
            has = params[path].shape if path in params else None
            if want is None or has is None or has not in (want, (*has[:1], *want)):
                shown = ["none" if shape is None else str(tuple(shape)) for shape in (has, want)]
                raise ValueError(
                    f"{owner}: leaf {path!r} has shape {shown[0]}, but the state was made for {shown[1]}; call init on "
                    "these parameters"
                )


def below(anchor: Leaves, params: Leaves) -> Leaves:
    """Return how far each of `params` is below its anchor: the gradient of an outer step."""
    return {path: leaf - params[path] for path, leaf in anchor.items()}
