"""DiLoCo: an outer optimizer steps by how far the ranks have come, each by itself."""

from typing import NamedTuple

import torch

from fnddp import tree
from fnddp.outer.contract import Exchanges, Outer, outer, require_at_least, require_inexact, require_means
from fnddp.outer.descent import below, copies, descended, require_anchored
from fnddp.sync import Replicated, State, Sync, require_state
from fnddp.tree import Leaves, Tree, replaced, require_leaves


class DiLoCoState(NamedTuple):
    """`step`: local steps since the last exchange, below `every`.

    `anchor`: the parameters after it. `velocity`: the outer momentum; empty without any.
    """

    step: Replicated[int]
    anchor: Replicated[Leaves]
    velocity: Replicated[Leaves]
    inner: State


@outer
class diloco(Outer):
    """After every so many local steps, one step of SGD with Nesterov momentum, by what all ranks have moved on average.

    With a the parameters after the last exchange and x this rank's now: d = mean(a - x), over the pipeline;
    v = momentum v + d; a = a - lr (d + momentum v); x = a. So all ranks go on from the same parameters to the bit,
    whatever the pipeline loses; one that compresses far wants memory, `error_feedback(...)`.

    It costs two copies of the parameters, one without momentum. The local optimizer's state stays each rank's own. The
    wrong choice where the link keeps up with the gradients: the same tokens seldom train as well.

    Args:
        sync: What takes the mean of the differences.
        every: Local steps from one exchange to the next, H; at least 1.
        lr: The outer learning rate.
        momentum: The outer momentum, in [0, 1).
        nesterov: Whether the step looks ahead, as above; otherwise it is a - lr v.

    Raises:
        TypeError: `sync` takes no mean, or not of every leaf in every exchange; in `init`: a leaf holds no fractions.
        ValueError: An option is out of range.

    Source: Douillard et al., "DiLoCo", arXiv 2311.08105, Algorithm 1, with its outer optimizer. With `lr=1` and
    `momentum=0` it is local SGD on differences, and with `every=1` as well the step of data-parallel SGD, but for the
    rounding of a - (a - x).

    >>> from fnddp import allgather, error_feedback, quantize, topk
    >>> diloco(error_feedback(topk(quantize(allgather, bits=2), k=64, chunk=4096), decay=0.95), every=30)
    diloco(error_feedback(topk(quantize(allgather, bits=2), k=64, chunk=4096), decay=0.95), every=30)
    """

    sync: Sync
    every: int
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("diloco", "every", self.every, 1)
        require_means("diloco", self.sync)
        require_momentum("diloco", self.momentum)

    @property
    def period(self) -> int:
        return self.every

    def init(self, params: Tree) -> State:
        leaves, _ = tree.flatten(params)
        require_inexact("diloco", leaves)
        anchor = {path: leaf.detach().clone() for path, leaf in leaves.items()}
        velocity = {path: torch.zeros_like(leaf) for path, leaf in anchor.items()} if self.momentum else {}
        return DiLoCoState(0, anchor, velocity, self.sync.init(anchor))

    def step(self, params: Leaves, state: DiLoCoState, exchanges: Exchanges) -> tuple[Leaves, State]:
        require_leaves("diloco", params)
        require_state("diloco", state, DiLoCoState)
        require_anchored("diloco", params, state.anchor)
        if state.step + 1 < self.every:
            return params, replaced(state, step=state.step + 1)
        mean, inner = exchanges.end("params", self.sync, below(state.anchor, params), state.inner)
        anchor, velocity = descended(
            state.anchor, mean, state.velocity, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov
        )
        return copies(anchor, params), DiLoCoState(0, anchor, velocity, inner)


def require_momentum(owner: str, momentum: float) -> None:
    """Raises a ValueError unless it is in [0, 1)."""
    if not 0 <= momentum < 1:
        raise ValueError(f"{owner}: momentum must be in [0, 1), got {momentum!r}")
