"""DiLoCo: an outer optimizer steps by how far each rank has moved by itself."""

from typing import NamedTuple

from fnddp.core.sync import Replicated, State, Sync
from fnddp.core.tree import Leaves, Tree, replaced
from fnddp.outer.contract import Exchanges, outer
from fnddp.outer.descent import Descending, below


class DiLoCoState(NamedTuple):
    """`step`: local steps since the last exchange, below `every`.

    `anchor`: the parameters after it. `velocity`: the outer momentum; empty without any.
    """

    step: Replicated[int]
    anchor: Replicated[Leaves]
    velocity: Replicated[Leaves]
    inner: State


@outer
class diloco(Descending):
    """Every `every` local steps, take one step of SGD with Nesterov momentum by how far ranks have moved on average.

    With a the parameters after the last exchange and x this rank's now: d = mean(a - x), over the pipeline;
    v = momentum v + d; a = a - lr (d + momentum v); x = a. So all ranks continue from the same parameters to the bit,
    with lossy pipelines too; one that compresses far needs memory, `error_feedback(...)`.

    It costs two copies of the parameters, one without momentum. The local optimizer's state is each rank's own. The
    wrong choice where the link keeps up with the gradients: the same tokens seldom train as well.

    Args:
        sync: Takes the mean of the differences.
        every: Local steps from one exchange to the next, H; at least 1.
        lr: The outer learning rate.
        momentum: The outer momentum, in [0, 1).
        nesterov: Look ahead, as above; otherwise the step is a - lr v.

    Raises:
        TypeError: `sync` takes no mean, or not of every leaf in every exchange; in `init`: a leaf holds no fractions.
        ValueError: An option is out of range.

    Source: Douillard et al., "DiLoCo", arXiv 2311.08105, Algorithm 1, with its outer optimizer. With `lr=1` and
    `momentum=0` it is local SGD on differences, and with `every=1` as well the step of data-parallel SGD, but for the
    rounding of a - (a - x).

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
        delta = below(state.anchor, params)
        params, state, inner = self.ended("params", delta, params, state, state.inner, exchanges)
        return params, replaced(state, step=0, inner=inner)
