"""Memory: transforms that keep values of earlier steps: the error of a lossy pipeline, or a momentum."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fnddp.core import layout, tree
from fnddp.core.codec import wide_zeros
from fnddp.core.opaque import rounded
from fnddp.core.options import Limit
from fnddp.core.sync import (
    Exchange,
    Local,
    Remembered,
    Replicated,
    State,
    Sync,
    all_in,
    require_agreement,
    require_sums,
    transform,
)
from fnddp.core.tree import Leaves, Tree, check_entries, is_inexact, replaced
from fnddp.kernels.int8 import blocks_of, from_int8, to_int8


class Memory(Sync):
    """A pipeline with state tensors for each floating-point or complex leaf, in its shape and in float32 or wider.

    It must not wrap another memory, because both would add the same losses; only `shared_momentum` may.
    """

    inner: Sync

    remembers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sums(self, "whose compression errors do not add up")
        name = type(self).__name__
        for inner in all_in(self.inner):
            other = type(inner).__name__
            if isinstance(inner, shared_momentum):
                raise TypeError(
                    f"{name}: it contains {other}, which sends a momentum, not a gradient; put {name} inside, "
                    f"{other}({name}(...))"
                )
            if inner.remembers:
                raise TypeError(
                    f"{name}: it contains {other}, which also has a memory of compression errors; both would add the "
                    "same errors again, and training diverges; remove one of the two"
                )


def _remembered(owner: Sync, leaves: Leaves, *entries: Leaves) -> list[str]:
    """Return the paths of inexact (float or complex) leaves; raise unless all `entries` of the state have them."""
    shapes = {path: leaf.shape for path, leaf in leaves.items() if is_inexact(leaf)}
    for each in entries:
        check_entries(type(owner).__name__, each, shapes)
    return list(shapes)


class ErrorFeedbackState(NamedTuple):
    """`residual`: losses of earlier exchanges on this rank, by leaf path.

    `scale`: with `residual="int8"`, the factors of its numbers by leaf path, one for each block; else empty.
    """

    residual: Local[Remembered[Leaves]]
    scale: Local[Remembered[Leaves]]
    inner: State


def widened(state: State) -> State:
    """Return `state` with int8 residuals of `error_feedback` as floats; it keeps their scales for `narrowed`."""
    return _of_residuals(lambda x, scale: (from_int8(x, scale), scale), state)


def narrowed(state: State) -> State:
    """Return `state` with the residuals that `widened` converted in int8 again."""
    return _of_residuals(lambda x, scale: to_int8(x), state)


def _of_residuals(fn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], state: State) -> State:
    if isinstance(state, ErrorFeedbackState) and state.scale:
        made = {path: fn(state.residual[path], scale) for path, scale in state.scale.items()}
        residual, scale = ({path: each[i] for path, each in made.items()} for i in range(2))
        return ErrorFeedbackState(residual, scale, state.inner)
    if isinstance(state, dict):
        return {key: _of_residuals(fn, part) for key, part in state.items()}
    if isinstance(state, tuple | list):
        kind: Any = type(state)
        parts = [_of_residuals(fn, part) for part in state]
        return kind(*parts) if hasattr(state, "_fields") else kind(parts)
    return state


@transform
class error_feedback(Memory):
    """Add the errors of this rank's earlier exchanges to each gradient.

    With e the residual and g the gradient: x = g + decay * e; exchange x; e = x - sent. `sent` is x as the other ranks
    decoded it, so e has everything that `inner` has lost. With decay 1, the sum of all outputs plus the mean residual
    equals the sum of all mean gradients, except for the rounding of sums in 16 bits. Biased compressors (PowerSGD,
    top-k, sign) converge with it. It costs one more copy of the gradients. Around a lossless pipeline it is useless.

    Args:
        decay: Factor on the residual, in [0, 1]. Lower forgets faster; below 1 the equality above no longer holds.
        residual: "float32" (float64 for float64 gradients), or "int8": about 1 byte of memory an element instead of 4,
            with a scale for each block of at most 128. Each step then loses up to half a level of each element for
            good, 1/254 of the largest residual in its block; an element that stays smaller is never sent. The wrong
            choice around `topk`: most elements wait for many steps.

    Source: Seide et al., "1-Bit SGD", Interspeech 2014; Karimireddy et al., ICML 2019, Algorithm 2. The residual is
    local as in PowerSGD, NeurIPS 2019, Algorithm 2 (torch's hook keeps `input - mean`; its norm grows). The int8
    residual: Xie et al., "LoCo", arXiv 2407.04480, without its moving average (see `decay`) and resets.

    >>> from fnddp import allreduce, bf16
    >>> sync = error_feedback(bf16(allreduce))
    >>> grads = {"w": torch.tensor([1 / 3])}
    >>> mean, state = sync(grads, sync.init(grads))
    >>> bool(mean["w"] + state.residual["w"] == grads["w"])
    True
    """

    inner: Sync
    decay: float = 1.0
    residual: Literal["float32", "int8"] = "float32"

    wraps_skipping: ClassVar[bool] = True
    limits: ClassVar = {"decay": Limit(lambda decay: 0 <= decay <= 1, "in [0, 1]")}

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        return ErrorFeedbackState(*self._stored(wide_zeros(leaves)), self.inner.init(grads))

    def exchange(self, leaves: Leaves, state: ErrorFeedbackState) -> Exchange:
        whole: Leaves = {}
        for path, residual in self.residuals(leaves, state).items():
            # Two operations, each rounded: a fused one is rounded differently under vmap.
            whole[path] = leaves[path] + (residual if self.decay == 1 else self.decay * residual)
        x = {path: rounded(whole[path], leaf.dtype) if path in whole else leaf for path, leaf in leaves.items()}
        inner = self.inner.exchange(x, state.inner)
        residual, scale = self._stored({path: each - inner.sent[path] for path, each in whole.items()})
        return replaced(inner, state=ErrorFeedbackState(residual, scale, inner.state))

    def residuals(self, leaves: Leaves, state: ErrorFeedbackState) -> Leaves:
        """Return the residuals of floating-point and complex leaves in `state`, in float32 or wider."""
        if self.residual == "float32":
            check_entries("error_feedback", state.scale, {})
            return {path: state.residual[path] for path in _remembered(self, leaves, state.residual)}
        like = {path: layout.to_wire(leaf) for path, leaf in leaves.items() if is_inexact(leaf)}
        check_entries("error_feedback", state.residual, {path: x.shape for path, x in like.items()})
        check_entries("error_feedback", state.scale, {path: (blocks_of(x.numel()),) for path, x in like.items()})
        known = {path: from_int8(state.residual[path], state.scale[path]) for path in like}
        return {path: layout.from_wire(x, leaves[path]) for path, x in known.items()}

    def _stored(self, residuals: Leaves) -> tuple[Leaves, Leaves]:
        if self.residual == "float32":
            return residuals, {}
        stored = {path: to_int8(layout.to_wire(x)) for path, x in residuals.items()}
        q, scale = ({path: each[i] for path, each in stored.items()} for i in range(2))
        return q, scale


class MomentumCorrectionState(NamedTuple):
    """`u`: the momentum, by leaf path. `v`: the part of its sum that has not been sent."""

    u: Local[Remembered[Leaves]]
    v: Local[Remembered[Leaves]]
    inner: State


@transform
class momentum_correction(Memory):
    """Accumulate momentum instead of gradients until elements are sent, as deep gradient compression does.

    With g the gradient: u = momentum * u + g; v = v + u; exchange v; v = v - sent; with `masking`, also u = 0 for
    elements that were sent. v is its residual: do not combine it with `error_feedback`. Use an optimizer *without*
    momentum, `torch.optim.SGD(params, lr)`, not Adam or similar ones.

    With error feedback, a delayed element arrives as a sum of gradients, and the optimizer's momentum begins only then.
    Here each element gets the momentum that it would have had without the delay. Masking drops the momentum of sent
    elements, because it is stale by then. Dense compressors (PowerSGD, sign, casts) send a part of every element: use
    `masking=False` with them. Over `two_shot`, elements with an error in the second hop also count as sent on their
    owner.

    Without compression, the outputs are the steps of SGD with momentum, or with `masking` those of plain SGD.

    Args:
        inner: The sparse pipeline: `topk(allgather, ratio=0.001)`. Put a warm-up of the ratio here as well, to
            keep u and v: `warmup(topk(allgather, ratio=0.001), 100, before=topk(allgather, ratio=0.25))`.
        momentum: In [0, 1). Higher remembers longer; 0 is error feedback.
        masking: Set the momentum of sent elements to zero ("momentum factor masking").

    Source: Lin et al., "Deep Gradient Compression", ICLR 2018, Algorithms 1 and 4, sections 3.1 to 3.3. Deviations:
    v keeps the rounding error of values that are sent, where the paper zeroes v; no clipping of local gradients.

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
        paths = _remembered(self, leaves, state.u, state.v)
        u = {path: leaves[path] + self.momentum * state.u[path] for path in paths}
        v = {path: state.v[path] + u[path] for path in paths}
        x = {path: rounded(v[path], leaf.dtype) if path in v else leaf for path, leaf in leaves.items()}
        inner = self.inner.exchange(x, state.inner)
        v = {path: v[path] - inner.sent[path] for path in paths}
        if self.masking:
            u = {path: torch.where(inner.sent[path] == 0, u[path], 0) for path in paths}
        return replaced(inner, state=MomentumCorrectionState(u, v, inner.state))


class EF21State(NamedTuple):
    """`h`: the estimate of this rank's gradient, by leaf path. `mean_h`: its mean over ranks, the paper's g.

    `v`: the running mean of this rank's gradients (empty where eta is 1).
    """

    h: Local[Remembered[Leaves]]
    mean_h: Replicated[Remembered[Leaves]]
    v: Local[Remembered[Leaves]]
    inner: State


@transform
class ef21(Memory):
    """Send compressed differences to an estimate of each rank's gradient, and return the mean of the estimates.

    With h the estimate, g the gradient and C the compressor `inner`: v = (1 - eta) v + eta g; c = C(v - h); h = h + c;
    the output is the mean of h over ranks, stored as the sum of all mean c. Where gradients settle, differences and
    losses vanish. So, unlike error feedback, it converges with a constant step even if gradients differ between ranks.
    With stochastic gradients take eta below 1 (EF21-SGDM); otherwise their noise is compressed and sent in every step.

    The wrong choice: around lossless pipelines; for gradients that change completely from step to step; and around sums
    in 16 bits such as `bf16(allreduce)`, because their rounding changes the mean but no rank's h, so that the sum of
    all mean c drifts from the mean of h. Carriers (`allgather`, `two_shot`) add in float32. `inner` gets differences in
    float32 or wider: send 16 bits with `topk(bf16(allgather))`. In float32 the drift is about 6e-8 of h times the
    square root of the number of steps.

    Args:
        inner: The compressor: `topk(allgather, ratio=0.01)`, `powersgd(allreduce)`, `sign(two_shot)`.
        eta: Weight of the new gradient in v, in (0, 1]. 1: no v, EF21. Lower averages over more steps, about 1 / eta.

    Source: Richtarik, Sokolov and Fatkhullin, "EF21", NeurIPS 2021, Algorithm 2; with eta below 1 Fatkhullin, Tyurin
    and Richtarik, "Momentum provably improves error feedback!", NeurIPS 2023, Algorithm 1. Deviation: h and v begin
    at zero, not with a batch's gradient as in the latter paper, so the first 1 / eta outputs are shorter.

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

    limits: ClassVar = {"eta": Limit(lambda eta: 0 < eta <= 1, "in (0, 1]")}

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        h = wide_zeros(leaves)
        v = wide_zeros(leaves) if self.eta < 1 else {}
        return EF21State(h, wide_zeros(leaves), v, self.inner.init({**leaves, **h}))

    def exchange(self, leaves: Leaves, state: EF21State) -> Exchange:
        paths = _remembered(self, leaves, state.h)
        _remembered(self, leaves if self.eta < 1 else {}, state.v)
        v = {path: leaves[path].to(state.h[path].dtype) for path in paths}
        if self.eta < 1:
            v = {path: (1 - self.eta) * state.v[path] + self.eta * g for path, g in v.items()}
        c = self.inner.exchange({**leaves, **{path: v[path] - state.h[path] for path in paths}}, state.inner)
        h = {path: state.h[path] + c.sent[path] for path in paths}
        mean_h = {path: state.mean_h[path] + c.mean[path] for path in paths}
        mean, sent = dict(c.mean), dict(c.sent)
        for path in paths:
            # Copies, so that in-place operations on an output do not change the state.
            mean[path] = rounded(mean_h[path], leaves[path].dtype, copy=True)
            sent[path] = rounded(h[path], leaves[path].dtype, copy=True)
        return Exchange(mean, sent, EF21State(h, mean_h, v if self.eta < 1 else {}, c.state))


class SharedMomentumState(NamedTuple):
    """`momentum`: the momentum of the mean, the same on all ranks, by leaf path."""

    momentum: Replicated[Remembered[Leaves]]
    inner: State


@transform
class shared_momentum(Sync):
    """Send momentum instead of gradients, for an optimizer without momentum of its own.

    With m the momentum, the same on all ranks, and g the gradient: exchange beta * m + (1 - beta) * g; the mean is the
    next m, and the output. Momentum changes slowly, and all ranks know most of it, so codecs lose less of it. Adam
    divides each step by the size of its gradients: for Adam, put `error_feedback` *inside*,
    `shared_momentum(error_feedback(sign(allgather)))`. Without losses it is momentum as Adam computes it, except for
    the correction of bias: m begins at zero, and the first 1 / (1 - beta) outputs are shorter.

    The optimizer: see `without_momentum`. For clipping, weight decay and warm-up see `docs/memory.md`.

    The wrong choice for an optimizer with momentum of its own; around pipelines that do not keep the scale of their
    input (`majority_vote`, `sign` with `scale="none"`), because gradients no longer count there; and where `.grad` is
    added up over synchronized backwards (use `no_sync`). Other transforms belong inside: a `warmup` outside would
    begin with gradients, a `partition` outside would leave some leaves without momentum.

    Args:
        inner: A mean that is the same on all ranks, with an update of every leaf in each step. It gets momenta in
            float32 or wider: send 16 bits with `shared_momentum(bf16(allreduce))`.
        beta: In [0, 1). Higher changes more slowly and remembers longer; 0 sends gradients.

    Source: the compression stage of 1-bit Adam (Tang et al., ICML 2021, Algorithm 1). Deviation: the optimizer is
    independent of this transform, so the second moment need not be frozen after a warm-up.

    >>> from fnddp import allreduce
    >>> sync = shared_momentum(allreduce, beta=0.5)
    >>> grads = {"w": torch.tensor([4.0, -2.0])}
    >>> first, state = sync(grads, sync.init(grads))
    >>> second, state = sync(grads, state)
    >>> first["w"], second["w"]
    (tensor([ 2., -1.]), tensor([ 3.0000, -1.5000]))
    """

    inner: Sync
    beta: float = 0.9

    remembers: ClassVar[bool] = True
    limits: ClassVar = {"beta": Limit(lambda beta: 0 <= beta < 1, "in [0, 1)")}

    def __post_init__(self) -> None:
        super().__post_init__()
        for inner in all_in(self.inner):
            if isinstance(inner, shared_momentum | momentum_correction):
                raise TypeError(
                    f"shared_momentum: it contains {type(inner).__name__}, which also has a momentum; remove one"
                )
        require_agreement("shared_momentum", self.inner)
        if self.inner.ops != {"mean"}:
            taken = ", ".join(sorted(self.inner.ops))
            raise TypeError(
                f"shared_momentum: {self.inner!r} takes a {taken} over ranks, but the shared momentum needs a mean; "
                "use a mean"
            )

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        momentum = wide_zeros(leaves)
        return SharedMomentumState(momentum, self.inner.init({**leaves, **momentum}))

    def exchange(self, leaves: Leaves, state: SharedMomentumState) -> Exchange:
        x = dict(leaves)
        for path in _remembered(self, leaves, state.momentum):
            m = state.momentum[path]
            x[path] = self.beta * m + (1 - self.beta) * leaves[path].to(m.dtype)
        inner = self.inner.exchange(x, state.inner)
        # Copies, so that in-place operations on an output do not change the state.
        mean = {
            path: rounded(each, leaves[path].dtype, copy=path in state.momentum) for path, each in inner.mean.items()
        }
        sent = {path: rounded(each, leaves[path].dtype) for path, each in inner.sent.items()}
        momentum = {path: inner.mean[path] for path in state.momentum}
        return Exchange(mean, sent, SharedMomentumState(momentum, inner.state))


def without_momentum(optimizer: torch.optim.Optimizer, beta: float) -> torch.optim.Optimizer:
    """Remove an optimizer's momentum, in place, for use with `shared_momentum(..., beta=beta)`.

    Its steps stay about as long. SGD's momentum becomes 0 and its rate `lr / (1 - momentum)`: the same steps up to
    rounding, if `beta` is that momentum and nothing decays. Adam's first beta becomes 0 and its rate `lr * s` with s =
    sqrt((1 - beta) / (1 + beta)), because its second moment is now that of the momentum, and the momentum is s times as
    large where gradients are noise; AdamW's weight decay becomes `weight_decay / s`. Call it once, before making a
    scheduler of rates; parameter groups added later are not changed. The wrong choice for an optimizer that has made
    steps: its buffers stay.

    Returns:
        The optimizer.

    Raises:
        TypeError: The optimizer is not torch's SGD, Adam or AdamW, or is SGD with Nesterov's momentum or dampening;
            nothing is changed.
        ValueError: `beta` is not in [0, 1).

    >>> w = torch.zeros(1, requires_grad=True)
    >>> optimizer = without_momentum(torch.optim.SGD([w], lr=0.1, momentum=0.9), beta=0.9)
    >>> round(optimizer.param_groups[0]["lr"], 9), optimizer.param_groups[0]["momentum"]
    (1.0, 0.0)
    """
    if not 0 <= beta < 1:
        raise ValueError(f"without_momentum: beta must be in [0, 1), got {beta!r}")
    is_sgd, groups = isinstance(optimizer, torch.optim.SGD), optimizer.param_groups
    is_other = any(group.get("nesterov") or (group.get("momentum") and group.get("dampening")) for group in groups)
    if is_other or not isinstance(optimizer, torch.optim.SGD | torch.optim.Adam):
        raise TypeError(
            "without_momentum: optimizer must be torch's SGD, Adam or AdamW, without Nesterov's momentum or "
            f"dampening, got {type(optimizer).__name__}; set its first beta or momentum to 0 yourself"
        )
    shorter = math.sqrt((1 - beta) / (1 + beta))
    for group in groups:
        if is_sgd:
            # Not in place: a rate may be a shared tensor.
            group |= {"lr": group["lr"] / (1 - group["momentum"]), "momentum": 0.0}
        else:
            group |= {"lr": group["lr"] * shorter, "betas": (0.0, group["betas"][1])}
            if group["decoupled_weight_decay"]:
                group["weight_decay"] /= shorter
    return optimizer
