"""DiLoCo: ranks train independently; an outer SGD with momentum then applies the mean change of their parameters."""

from typing import Any, NamedTuple, TypeVar

import torch

from fnddp.core import tree
from fnddp.core.sync import Replicated, State, Sync, require_state
from fnddp.core.tree import Leaves, Tree, replaced
from fnddp.outer.contract import Exchanges, Outer, outer, require_options

S = TypeVar("S", bound=Any)


class Descending(Outer):
    """Base of outer steps that move an anchor (parameters equal on all ranks) by SGD on the mean difference from it.

    Subclasses have these fields, and states with `anchor` and `velocity`.
    """

    sync: Sync
    lr: float
    momentum: float
    nesterov: bool
    alpha: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_options(self, self.sync, every=1)
        if not self.sync.agrees:
            problem = "gives ranks different means of some leaves, but the anchor is the same on all; use local_sgd"
            raise TypeError(f"{type(self).__name__}: {self.sync!r} {problem}")
        for name in ("momentum", "alpha"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{type(self).__name__}: {name} must be in [0, 1), got {getattr(self, name)!r}")

    def anchored(self, params: Tree) -> tuple[Leaves, Leaves]:
        """Return the initial anchor, a copy of the parameters, and the velocity: zeros, or empty if `momentum` is 0."""
        leaves, _ = tree.flatten(params)
        for path, leaf in leaves.items():
            if not tree.is_inexact(leaf):
                problem = f"leaf {path!r} is {leaf.dtype}, which SGD cannot update; leave it out of the tree"
                raise TypeError(f"{type(self).__name__}: {problem}")
        anchor = {path: leaf.detach().clone() for path, leaf in leaves.items()}
        return anchor, {path: torch.zeros_like(leaf) for path, leaf in anchor.items() if self.momentum}

    def anchors(self, state: Any) -> Leaves:
        return state.anchor

    def ended(
        self, name: str, delta: Leaves, params: Leaves, state: S, inner: State, exchanges: Exchanges
    ) -> tuple[Leaves, S, State]:
        """Finish the exchange of `delta`, and move the anchor by its mean, bit-identically to `torch.optim.SGD`.

        Returns the parameters (merged with the anchor for each leaf of `delta`), the step's state and the pipeline's.
        """
        mean, inner = exchanges.end(name, self.sync, delta, inner)
        anchor, velocity, merged = dict(state.anchor), dict(state.velocity), dict(params)
        for path in delta:
            direction = mean[path]
            if self.momentum:
                velocity[path] = velocity[path] * self.momentum + mean[path]
                direction = velocity[path]
                if self.nesterov:
                    direction = torch.add(mean[path], velocity[path], alpha=self.momentum)
            anchor[path] = torch.add(anchor[path], direction, alpha=-self.lr)
            if self.alpha:  # two products, each rounded: a fused operation rounds rows of a simulation differently
                merged[path] = (1 - self.alpha) * anchor[path] + self.alpha * params[path]
            else:  # a copy, because the local optimizer writes to its parameters
                merged[path] = anchor[path].clone()
        return merged, replaced(state, anchor=anchor, velocity=velocity), inner

    def require_own(self, params: Leaves, state: Any, kind: type) -> None:
        """Raise a ValueError unless `state` is a `kind` for these leaves; leaves may have a row for each rank."""
        owner = type(self).__name__
        require_state(owner, state, kind)
        like = {path: state.anchor.get(path, leaf) for path, leaf in params.items()}
        shapes = {path: tuple(leaf.shape[leaf.ndim > like[path].ndim :]) for path, leaf in params.items()}
        tree.check_entries(owner, state.anchor, shapes)


def outer_gradient(anchor: Leaves, params: Leaves) -> Leaves:
    """Return anchor - params of each leaf: the gradient for the outer optimizer."""
    return {path: leaf - params[path] for path, leaf in anchor.items()}


class DiLoCoState(NamedTuple):
    """`step`: local steps since the last exchange, below `every`. `inner`: the pipeline's state.

    `anchor`: the parameters after the last exchange. `velocity`: the outer momentum; empty if `momentum` is 0.
    """

    step: Replicated[int]
    anchor: Replicated[Leaves]
    velocity: Replicated[Leaves]
    inner: State


@outer
class diloco(Descending):
    """Every `every` local steps, update the parameters by SGD with Nesterov momentum on the ranks' mean change.

    Let `a` be the parameters after the last exchange and `x` the current parameters of this rank. The pipeline computes
    d = mean(a - x); then v = momentum * v + d; a = a - lr * (d + momentum * v); x = a. All ranks thus continue from
    bit-identical parameters, also with lossy pipelines. Put `error_feedback(...)` around strongly lossy ones.

    It stores two copies of the parameters (one if `momentum` is 0); each rank has its own local optimizer state. The
    wrong choice if the link is fast enough to average the gradients of every step: that trains better on the same data.

    Args:
        sync: The pipeline that averages the differences.
        every: Local steps from one exchange to the next (the paper's H); at least 1.
        lr: The outer learning rate.
        momentum: The outer momentum, in [0, 1).
        nesterov: Look ahead, as above; otherwise a = a - lr * v.

    Raises:
        TypeError: `sync` does not average every leaf in every exchange, or (`init`) a leaf is an integer or a boolean.
        ValueError: An option is out of range.

    Source: Douillard et al., "DiLoCo", arXiv 2311.08105, Algorithm 1, with its outer optimizer. With `lr=1` and
    `momentum=0` it is local SGD on differences; with `every=1` too, it is data-parallel SGD, except for the rounding of
    a - (a - x).

    >>> import torch
    >>> from fnddp import allreduce
    >>> step, params = diloco(allreduce, every=1, lr=0.5, momentum=0), {"w": torch.tensor([4.0])}
    >>> state = step.init(params)
    >>> params, state = step({"w": params["w"] - 1}, state)  # after a local step
    >>> params["w"].item()
    3.5
    """

    sync: Sync
    every: int
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def init(self, params: Tree) -> State:
        anchor, velocity = self.anchored(params)
        return DiLoCoState(0, anchor, velocity, self.sync.init(anchor))

    def step(self, params: Leaves, state: DiLoCoState, exchanges: Exchanges) -> tuple[Leaves, State]:
        self.require_own(params, state, DiLoCoState)
        if state.step + 1 < self.every:
            return params, replaced(state, step=state.step + 1)
        delta = outer_gradient(state.anchor, params)
        params, state, inner = self.ended("params", delta, params, state, state.inner, exchanges)
        return params, replaced(state, step=0, inner=inner)
