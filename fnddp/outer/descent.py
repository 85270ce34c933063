"""The outer optimizer: SGD with momentum, on what the ranks' parameters have moved."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fnddp.tree import Leaves


def descended(
    anchor: Leaves, delta: Leaves, velocity: Leaves, *, lr: float, momentum: float, nesterov: bool
) -> tuple[Leaves, Leaves]:
    """The anchor after a step of SGD with `delta` for the gradient, and the velocity; to the bit as `torch.optim.SGD`.

    Args:
        anchor: Parameters, equal on all ranks.
        delta: The mean over ranks of what `anchor` is above their own.
        velocity: Of the leaves that have one: none without momentum.
        lr, momentum, nesterov: See `diloco`.
    """
    moved: dict[str, Tensor] = {}
    velocities: dict[str, Tensor] = {}
    for path, leaf in anchor.items():
        direction = delta[path]
        if momentum:
            velocities[path] = velocity[path] * momentum + delta[path]
            direction = velocities[path]
            if nesterov:
                direction = torch.add(delta[path], velocities[path], alpha=momentum)
        moved[path] = torch.add(leaf, direction, alpha=-lr)
    return moved, velocities


def require_anchored(owner: str, params: Leaves, anchor: Leaves) -> None:
    """Raises a ValueError that names the first leaf that a state was not made for, also where leaves have rows."""
    for path in [*anchor, *params]:
        want = anchor[path].shape if path in anchor else None
        has = params[path].shape if path in params else None
        if want is None or has is None or has not in (want, (*has[:1], *want)):
            raise ValueError(
                f"{owner}: leaf {path!r} has shape {_shown(has)}, and the state was made for {_shown(want)}; call init "
                "on these parameters"
            )


def _shown(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(tuple(shape))


def below(anchor: Leaves, params: Leaves) -> Leaves:
    """How far each of `params` is below its anchor: what an outer step takes for a gradient."""
    return {path: leaf - params[path] for path, leaf in anchor.items()}


def copies(anchor: Leaves, paths: Iterable[str]) -> Leaves:
    """The leaves of `anchor` at `paths`, in memory of their own: parameters, which an optimizer writes to."""
    return {path: anchor[path].clone() for path in paths}
