"""Momentum correction: momentum of this rank's gradients, before they are made sparse."""

from typing import ClassVar, NamedTuple

import torch

from fnddp.core import tree
from fnddp.core.codec import wide_zeros
from fnddp.core.options import Limit
from fnddp.core.sync import Exchange, Local, State, Sync, transform
from fnddp.core.tree import Leaves, Tree, check_entries, is_inexact, replaced


class MomentumCorrectionState(NamedTuple):
    """By leaf path, shaped like the gradients, in float32 or wider.

    `u`: the momentum. `v`: the part of its sum that has not been sent.
    """

    u: Local[Leaves]
    v: Local[Leaves]
    inner: State


@transform
class momentum_correction(Sync):
    """Accumulate momentum, not gradients, until they are sent, as deep gradient compression does.

    With g the gradient: u = momentum * u + g; v = v + u; exchange v; v = v - sent; and, masking, u = 0 where something
    was sent. It is memory of its own: no `error_feedback` around it or in it, and an optimizer *without* momentum
    after it, `torch.optim.SGD(params, lr)`. Integer leaves have none.

    Error feedback holds a gradient back for some hundred steps and sends their sum, to which an optimizer's momentum
    is applied at once; here each element gets the momentum that it would have had. Masking forgets the momentum of sent
    elements, which is stale by then. The wrong choice for Adam and its kin, and, masking, for dense compressors
    (PowerSGD, sign, casts), which send something of everything: give those `masking=False`. Over `two_shot` the owner's
    elements also count as sent where its second hop has lost something.

    Without compression and masking the outputs are the steps of SGD with momentum; with masking those of plain SGD.

    Args:
        inner: The pipeline that makes it sparse: `topk(allgather, ratio=0.001)`. Put a warm-up of the ratio in here
            too, so that u and v stay: `warmup(topk(allgather, ratio=0.001), 100, before=topk(allgather, ratio=0.25))`.
        momentum: In [0, 1). Higher remembers longer; 0 is error feedback.
        masking: Set the momentum of sent elements to zero ("momentum factor masking").

    Raises:
        TypeError: `inner` takes a max or min, or remembers what is lost itself.

    Source: Lin et al., "Deep Gradient Compression", ICLR 2018, Algorithms 1 and 4, sections 3.1 to 3.3. Deviations:
    v keeps what the wire rounds of the values that are sent, where the paper zeroes v; no clipping of local gradients.

    >>> from fnddp import allgather, topk
    >>> sync = momentum_correction(topk(allgather, k=1), momentum=0.5)
    >>> grads = {"w": torch.tensor([4.0, 2.0])}
    >>> first, state = sync(grads, sync.init(grads))
    >>> second, state = sync(grads, state)
    >>> first["w"], second["w"], state.u["w"]
    (tensor([4., 0.]), tensor([0., 5.]), tensor([4., 0.]))
    """

    inner: Sync
    momentum: float = 0.9
    masking: bool = True

    remembers: ClassVar[bool] = True
    needs_sums: ClassVar[str] = "whose losses do not add up"
    limits: ClassVar = {"momentum": Limit(lambda momentum: 0 <= momentum < 1, "in [0, 1)")}

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        return MomentumCorrectionState(wide_zeros(leaves), wide_zeros(leaves), self.inner.init(grads))

    def exchange(self, leaves: Leaves, state: MomentumCorrectionState) -> Exchange:
        shapes = {path: leaf.shape for path, leaf in leaves.items() if is_inexact(leaf)}
        check_entries("momentum_correction", state.u, shapes)
        check_entries("momentum_correction", state.v, shapes)
        u = {path: leaves[path] + self.momentum * state.u[path] for path in shapes}
        v = {path: state.v[path] + u[path] for path in shapes}
        x = {path: v[path].to(leaf.dtype) if path in v else leaf for path, leaf in leaves.items()}
        inner = self.inner.exchange(x, state.inner)
        v = {path: v[path] - inner.sent[path] for path in shapes}
        if self.masking:
            u = {path: torch.where(inner.sent[path] == 0, u[path], 0) for path in shapes}
        return replaced(inner, state=MomentumCorrectionState(u, v, inner.state))
