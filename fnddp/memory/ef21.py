"""EF21: sends the difference between the gradient and the other ranks' estimate of it."""

from typing import ClassVar, NamedTuple

from fnddp.core import tree
from fnddp.core.codec import wide_zeros
from fnddp.core.options import Limit
from fnddp.core.sync import Exchange, Local, Replicated, State, Sync, transform
from fnddp.core.tree import Leaves, Tree, check_entries, is_inexact


class EF21State(NamedTuple):
    """By leaf path, shaped like the gradients, in float32 or wider.

    `h`: the others' estimate of this rank's gradient. `mean_h`: the mean of all ranks' h, the paper's g.
    `v`: the running mean of this rank's gradients (empty where eta is 1).
    """

    h: Local[Leaves]
    mean_h: Replicated[Leaves]
    v: Local[Leaves]
    inner: State


@transform
class ef21(Sync):
    """Send compressed differences: all ranks hold an estimate of each rank's gradient, and step along their mean.

    With h the estimate, g the gradient and C the compressor `inner`: v = (1 - eta) v + eta g; c = C(v - h); h = h + c;
    the output is the mean of h over ranks, which is kept as the sum of all mean c. Where gradients settle, differences
    and losses vanish: unlike error feedback it converges with a constant step under gradients that differ between
    ranks. With stochastic gradients take eta below 1 (EF21-SGDM), or their noise travels and is compressed in every
    step. Integer leaves are reduced as `inner` does.

    The wrong choice: around lossless pipelines; for gradients that change wholly from step to step; and around sums in
    16 bits such as `bf16(allreduce)`, whose rounding is in the mean but in no rank's h, so that the sum of all mean c
    drifts from the mean of h. Carriers (`allgather`, `two_shot`) add in float32. `inner` gets differences in float32
    or wider: send 16 bits with `topk(bf16(allgather))`. Float32 drifts by about 6e-8 of h times the root of the steps.

    Args:
        inner: The compressor: `topk(allgather, ratio=0.01)`, `powersgd(allreduce)`, `sign(two_shot)`.
        eta: Weight of the new gradient in v, in (0, 1]. 1: no v, EF21. Lower averages over more steps, about 1 / eta.

    Raises:
        TypeError: `inner` takes a max or min, or remembers what is lost itself.

    Source: Richtarik, Sokolov and Fatkhullin, "EF21", NeurIPS 2021, Algorithm 2; with eta below 1 Fatkhullin, Tyurin
    and Richtarik, "Momentum provably improves error feedback!", NeurIPS 2023, Algorithm 1. Deviation: h and v begin
    at zero, where the latter begins with a batch's gradient, so the first 1 / eta outputs are shorter.

    >>> import torch
    >>> from fnddp import allgather, topk
    >>> sync = ef21(topk(allgather, k=1))
    >>> grads = {"w": torch.tensor([3.0, -2.0])}
    >>> first, state = sync(grads, sync.init(grads))
    >>> second, state = sync(grads, state)
    >>> first["w"], second["w"]
    (tensor([3., 0.]), tensor([ 3., -2.]))
    """

    inner: Sync
    eta: float = 1.0

    remembers: ClassVar[bool] = True
    needs_sums: ClassVar[str] = "whose estimates do not add up"
    limits: ClassVar = {"eta": Limit(lambda eta: 0 < eta <= 1, "in (0, 1]")}

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        h = wide_zeros(leaves)
        v = wide_zeros(leaves) if self.eta < 1 else {}
        return EF21State(h, wide_zeros(leaves), v, self.inner.init({**leaves, **h}))

    def exchange(self, leaves: Leaves, state: EF21State) -> Exchange:
        shapes = {path: leaf.shape for path, leaf in leaves.items() if is_inexact(leaf)}
        check_entries("ef21", state.h, shapes)
        check_entries("ef21", state.v, shapes if self.eta < 1 else {})
        v = {path: leaves[path].to(state.h[path].dtype) for path in shapes}
        if self.eta < 1:
            v = {path: (1 - self.eta) * state.v[path] + self.eta * g for path, g in v.items()}
        c = self.inner.exchange({**leaves, **{path: v[path] - state.h[path] for path in shapes}}, state.inner)
        h = {path: state.h[path] + c.sent[path] for path in shapes}
        mean_h = {path: state.mean_h[path] + c.mean[path] for path in shapes}
        mean, sent = dict(c.mean), dict(c.sent)
        for path in shapes:
            # Copies: what is done to an output in place must not reach the state.
            mean[path] = mean_h[path].to(leaves[path].dtype, copy=True)
            sent[path] = h[path].to(leaves[path].dtype, copy=True)
        return Exchange(mean, sent, EF21State(h, mean_h, v if self.eta < 1 else {}, c.state))
