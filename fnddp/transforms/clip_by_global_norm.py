"""Clip the mean gradient by its global norm."""

from typing import ClassVar

import torch
from torch import Tensor

from fnddp.core.codec import wide
from fnddp.core.options import POSITIVE
from fnddp.core.sync import Exchange, State, Sync, require_agreement, transform
from fnddp.core.tree import Leaves, Tree, is_inexact

_EPSILON = 1e-6  # torch's


@transform
class clip_by_global_norm(Sync):
    """Scale the mean down to a Euclidean norm of `max_norm` over all of its leaves, if its norm is larger.

    It has the effect of `torch.nn.utils.clip_grad_norm_` on synchronized gradients, with the same factor on all ranks.
    The norm is computed in float32, or wider where a leaf is. Integer leaves are neither counted nor scaled. As in
    torch, a NaN makes all elements NaN, and an infinite element becomes NaN and all others 0. `inner` must give all
    ranks the same mean.

    The wrong choice inside memory, because memory sends the clipped part later: put it outside; and where gradients are
    accumulated over several synchronized backwards, or are scaled by a loss scaler.

    Args:
        max_norm: The largest norm of a mean; positive.

    Source: Pascanu et al., ICML 2013, Algorithm 1; the factor is torch's, max_norm / (norm + 1e-6), at most 1.

    >>> from fnddp import allreduce
    >>> clip_by_global_norm(allreduce, max_norm=1)({"w": torch.tensor([3.0, 4.0])}, ())[0]
    {'w': tensor([0.6000, 0.8000])}
    """

    inner: Sync
    max_norm: float

    wraps_skipping: ClassVar[bool] = True
    wants_whole_leaves: ClassVar[bool] = True
    limits: ClassVar = {"max_norm": POSITIVE}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_agreement("clip_by_global_norm", self.inner)

    def init(self, grads: Tree) -> State:
        return self.inner.init(grads)

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        inner = self.inner.exchange(leaves, state)
        norms = [
            torch.linalg.vector_norm(leaf, dtype=wide(leaf.dtype)) for leaf in inner.mean.values() if is_inexact(leaf)
        ]
        if not norms:
            return inner
        norm = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]))
        factor = (self.max_norm / (norm + _EPSILON)).clamp(max=1.0)

        def scaled(leaf: Tensor) -> Tensor:
            return (leaf * factor.to(leaf.device)).to(leaf.dtype) if is_inexact(leaf) else leaf

        return inner.decoded(lambda leaves: {path: scaled(leaf) for path, leaf in leaves.items()})
