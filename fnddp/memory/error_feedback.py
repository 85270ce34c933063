"""Error feedback: adds to the next gradient the loss of this one."""

from typing import ClassVar, NamedTuple

from fnddp.core import tree
from fnddp.core.codec import wide_zeros
from fnddp.core.options import Limit
from fnddp.core.sync import Exchange, Local, State, Sync, transform
from fnddp.core.tree import Leaves, Tree, check_entries, is_inexact, replaced


class ErrorFeedbackState(NamedTuple):
    """`residual`: by leaf path, shaped like the gradients, in float32 or wider."""

    residual: Local[Leaves]
    inner: State


@transform
class error_feedback(Sync):
    """Add to each gradient what earlier exchanges lost of it on this rank.

    With e the residual and g the gradient: x = g + decay * e; exchange x; e = x - sent. `sent` accounts for all losses
    of `inner`, so the sum of all outputs plus the mean residual equals the sum of all mean gradients (with decay 1, and
    but for the rounding of sums in 16 bits). Biased compressors (PowerSGD, top-k, sign) converge with it, at the price
    of one more copy of the gradients, in float32 or wider. The wrong choice around a lossless pipeline: it costs memory
    and does nothing. Integer leaves have no residual.

    Args:
        decay: Factor on the residual, in [0, 1]. Lower forgets faster; below 1 the sum above no longer telescopes.

    Raises:
        TypeError: `inner` takes a max or min, which has no residual, or remembers what is lost itself.

    Source: Seide et al., "1-Bit SGD", Interspeech 2014; Karimireddy et al., ICML 2019, Algorithm 2; the local form
    of the residual as in PowerSGD, NeurIPS 2019, Algorithm 2 (torch's hook keeps `input - mean`, whose norm grows).

    >>> import torch
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
    remembers: ClassVar[bool] = True
    needs_sums: ClassVar[str] = "whose losses do not add up"
    limits: ClassVar = {"decay": Limit(lambda decay: 0 <= decay <= 1, "in [0, 1]")}

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        return ErrorFeedbackState(wide_zeros(leaves), self.inner.init(grads))

    def exchange(self, leaves: Leaves, state: ErrorFeedbackState) -> Exchange:
        remembered = {path: leaf for path, leaf in leaves.items() if is_inexact(leaf)}
        check_entries("error_feedback", state.residual, {path: leaf.shape for path, leaf in remembered.items()})
        whole: Leaves = {}
        for path, leaf in remembered.items():
            # Two operations, each rounded: one that scales and adds is rounded otherwise under vmap.
            residual = state.residual[path] if self.decay == 1 else self.decay * state.residual[path]
            whole[path] = leaf + residual
        x = {path: whole[path].to(leaf.dtype) if path in whole else leaf for path, leaf in leaves.items()}
        inner = self.inner.exchange(x, state.inner)
        residual = {path: whole[path] - inner.sent[path] for path in remembered}
        return replaced(inner, state=ErrorFeedbackState(residual, inner.state))
