"""Memory: transforms that add what a lossy pipeline has lost in earlier steps to later gradients."""

from typing import ClassVar, NamedTuple

import torch

from fnddp.core import tree
from fnddp.core.codec import wide_zeros
from fnddp.core.options import Limit
from fnddp.core.sync import Exchange, Local, Replicated, State, Sync, transform
from fnddp.core.tree import Leaves, Tree, check_entries, is_inexact, replaced


class Memory(Sync):
    """A pipeline whose state holds tensors for each leaf, in its shape and in float32 or wider; none for integers.

    It wraps no other memory, which would add the same losses twice.
    """

    inner: Sync

    remembers: ClassVar[bool] = True
    needs_sums: ClassVar[str] = "whose losses do not add up"

    def _require_entries(self, leaves: Leaves, *entries: Leaves) -> list[str]:
        """Return the paths of leaves with a memory, for which all `entries` have one."""
        shapes = {path: leaf.shape for path, leaf in leaves.items() if is_inexact(leaf)}
        for each in entries:
            check_entries(type(self).__name__, each, shapes)
        return list(shapes)


class ErrorFeedbackState(NamedTuple):
    """`residual`: losses of earlier exchanges on this rank, by leaf path."""

    residual: Local[Leaves]
    inner: State


@transform
class error_feedback(Memory):
    """Add to each gradient what earlier exchanges lost of it on this rank.

    With e the residual and g the gradient: x = g + decay * e; exchange x; e = x - sent. `sent` accounts for all losses
    of `inner`, so the sum of all outputs plus the mean residual equals the sum of all mean gradients (with decay 1, and
    but for the rounding of sums in 16 bits). Biased compressors (PowerSGD, top-k, sign) converge with it, at the price
    of one more copy of the gradients. The wrong choice around a lossless pipeline: it costs memory and does nothing.

    Args:
        decay: Factor on the residual, in [0, 1]. Lower forgets faster; below 1 the sum above no longer telescopes.

    Source: Seide et al., "1-Bit SGD", Interspeech 2014; Karimireddy et al., ICML 2019, Algorithm 2; the local form
    of the residual as in PowerSGD, NeurIPS 2019, Algorithm 2 (torch's hook keeps `input - mean`, whose norm grows).

    >>> from fnddp import allreduce, fp16
    >>> sync = error_feedback(fp16(allreduce))
    >>> grads = {"w": torch.tensor([1 / 3])}
    >>> mean, state = sync(grads, sync.init(grads))
    >>> bool(mean["w"] + state.residual["w"] == grads["w"])
    True
    """

    inner: Sync
    decay: float = 1.0

    wraps_skipping: ClassVar[bool] = True
    limits: ClassVar = {"decay": Limit(lambda decay: 0 <= decay <= 1, "in [0, 1]")}

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        return ErrorFeedbackState(wide_zeros(leaves), self.inner.init(grads))

    def exchange(self, leaves: Leaves, state: ErrorFeedbackState) -> Exchange:
        whole: Leaves = {}
        for path in self._require_entries(leaves, state.residual):
            # Two operations, each rounded: a fused one is rounded differently under vmap.
            residual = state.residual[path] if self.decay == 1 else self.decay * state.residual[path]
            whole[path] = leaves[path] + residual
        x = {path: whole[path].to(leaf.dtype) if path in whole else leaf for path, leaf in leaves.items()}
        inner = self.inner.exchange(x, state.inner)
        residual = {path: each - inner.sent[path] for path, each in whole.items()}
        return replaced(inner, state=ErrorFeedbackState(residual, inner.state))


class MomentumCorrectionState(NamedTuple):
    """`u`: the momentum, by leaf path. `v`: the part of its sum that has not been sent."""

    u: Local[Leaves]
    v: Local[Leaves]
    inner: State


@transform
class momentum_correction(Memory):
    """Accumulate momentum, not gradients, until they are sent, as deep gradient compression does.

    With g the gradient: u = momentum * u + g; v = v + u; exchange v; v = v - sent; and, masking, u = 0 where something
    was sent. It is memory itself: no `error_feedback` around it or in it, and an optimizer *without* momentum
    after it, `torch.optim.SGD(params, lr)`.

    Error feedback sends a sum of gradients, to which an optimizer's momentum is applied at once; here each element gets
    the momentum that it would have had. Masking forgets the momentum of sent elements, which is stale by then. The
    wrong choice for Adam and its kin, and, masking, for dense compressors (PowerSGD, sign, casts), which send something
    of everything: give those `masking=False`. Over `two_shot` the owner's elements also count as sent where its second
    hop has lost something.

    Without compression and masking the outputs are the steps of SGD with momentum; with masking those of plain SGD.

    Args:
        inner: The sparse pipeline: `topk(allgather, ratio=0.001)`. Put a warm-up of the ratio in here
            too, so that u and v stay: `warmup(topk(allgather, ratio=0.001), 100, before=topk(allgather, ratio=0.25))`.
        momentum: In [0, 1). Higher remembers longer; 0 is error feedback.
        masking: Set the momentum of sent elements to zero ("momentum factor masking").

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

    limits: ClassVar = {"momentum": Limit(lambda momentum: 0 <= momentum < 1, "in [0, 1)")}

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        return MomentumCorrectionState(wide_zeros(leaves), wide_zeros(leaves), self.inner.init(grads))

    def exchange(self, leaves: Leaves, state: MomentumCorrectionState) -> Exchange:
        paths = self._require_entries(leaves, state.u, state.v)
        u = {path: leaves[path] + self.momentum * state.u[path] for path in paths}
        v = {path: state.v[path] + u[path] for path in paths}
        x = {path: v[path].to(leaf.dtype) if path in v else leaf for path, leaf in leaves.items()}
        inner = self.inner.exchange(x, state.inner)
        v = {path: v[path] - inner.sent[path] for path in paths}
        if self.masking:
            u = {path: torch.where(inner.sent[path] == 0, u[path], 0) for path in paths}
        return replaced(inner, state=MomentumCorrectionState(u, v, inner.state))


class EF21State(NamedTuple):
    """`h`: the others' estimate of this rank's gradient, by leaf path. `mean_h`: its mean over ranks, the paper's g.

    `v`: the running mean of this rank's gradients (empty where eta is 1).
    """

    h: Local[Leaves]
    mean_h: Replicated[Leaves]
    v: Local[Leaves]
    inner: State


@transform
class ef21(Memory):
    """Send compressed differences: all ranks hold an estimate of each rank's gradient, and step along their mean.

    With h the estimate, g the gradient and C the compressor `inner`: v = (1 - eta) v + eta g; c = C(v - h); h = h + c;
    the output is the mean of h over ranks, which is kept as the sum of all mean c. Where gradients settle, differences
    and losses vanish: unlike error feedback it converges with a constant step under gradients that differ between
    ranks. With stochastic gradients take eta below 1 (EF21-SGDM), or their noise travels and is compressed in every
    step.

    The wrong choice: around lossless pipelines; for gradients that change wholly from step to step; and around sums in
    16 bits such as `bf16(allreduce)`, whose rounding is in the mean but in no rank's h, so that the sum of all mean c
    drifts from the mean of h. Carriers (`allgather`, `two_shot`) add in float32. `inner` gets differences in float32
    or wider: send 16 bits with `topk(bf16(allgather))`. Float32 drifts by about 6e-8 of h times the root of the steps.

    Args:
        inner: The compressor: `topk(allgather, ratio=0.01)`, `powersgd(allreduce)`, `sign(two_shot)`.
        eta: Weight of the new gradient in v, in (0, 1]. 1: no v, EF21. Lower averages over more steps, about 1 / eta.

    Source: Richtarik, Sokolov and Fatkhullin, "EF21", NeurIPS 2021, Algorithm 2; with eta below 1 Fatkhullin, Tyurin
    and Richtarik, "Momentum provably improves error feedback!", NeurIPS 2023, Algorithm 1. Deviation: h and v begin
    at zero, where the latter begins with a batch's gradient, so the first 1 / eta outputs are shorter.

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

    needs_sums: ClassVar[str] = "whose estimates do not add up"
    limits: ClassVar = {"eta": Limit(lambda eta: 0 < eta <= 1, "in (0, 1]")}

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        h = wide_zeros(leaves)
        v = wide_zeros(leaves) if self.eta < 1 else {}
        return EF21State(h, wide_zeros(leaves), v, self.inner.init({**leaves, **h}))

    def exchange(self, leaves: Leaves, state: EF21State) -> Exchange:
        paths = self._require_entries(leaves, state.h)
        self._require_entries(leaves if self.eta < 1 else {}, state.v)
        v = {path: leaves[path].to(state.h[path].dtype) for path in paths}
        if self.eta < 1:
            v = {path: (1 - self.eta) * state.v[path] + self.eta * g for path, g in v.items()}
        c = self.inner.exchange({**leaves, **{path: v[path] - state.h[path] for path in paths}}, state.inner)
        h = {path: state.h[path] + c.sent[path] for path in paths}
        mean_h = {path: state.mean_h[path] + c.mean[path] for path in paths}
        mean, sent = dict(c.mean), dict(c.sent)
        for path in paths:
            # Copies, so that in-place operations on an output do not change the state.
            mean[path] = mean_h[path].to(leaves[path].dtype, copy=True)
            sent[path] = h[path].to(leaves[path].dtype, copy=True)
        return Exchange(mean, sent, EF21State(h, mean_h, v if self.eta < 1 else {}, c.state))
