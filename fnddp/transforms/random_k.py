"""Random-k: elements that all ranks draw alike, so that they add."""

from torch import Tensor

from fnddp.core import random
from fnddp.core.options import Share, require_share
from fnddp.core.sync import Sync, transform
from fnddp.transforms.drawn import Drawn


@transform
class random_k(Drawn):
    """Send k elements of each leaf, drawn anew in each step, and zeros for all others.

    All ranks draw from one seed, so no indices travel and the payloads add: it wraps any pipeline. It is a contraction
    by 1 - k / n in expectation: wrap it in `error_feedback`. The wrong choice for gradients with few large elements,
    which `topk` finds; and where drawing (a hash of each element, and the largest k of them) costs more than it saves:
    `random_block` draws one number for each leaf.

    An element that is not finite shows in the mean only once it is drawn. Integer leaves travel whole.

    Args:
        inner: The pipeline of the drawn elements, a flat leaf of k.
        ratio: The fraction of elements to send, in (0, 1], at least one; or
        k: how many elements to send of each leaf. Exactly one of both.
        unbiased: Multiply by n / k, so that the expected mean is the mean; the variance is n / k - 1 times the square.
            Wrong with memory, whose residual then grows by n / k - 1 in each step.

    Source: Stich et al., "Sparsified SGD with memory", NeurIPS 2018, definition 2.1 (rand-k).

    >>> import torch
    >>> from fnddp import allreduce
    >>> sync = random_k(allreduce, k=1)
    >>> grads = {"w": torch.ones(4)}
    >>> first, state = sync(grads, sync.init(grads))
    >>> first["w"].sum(), state.step
    (tensor(1.), 1)
    """

    inner: Sync
    ratio: float | None = None
    k: int | None = None
    unbiased: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("random_k", self.ratio, "k", self.k)

    @property
    def share(self) -> Share:
        return Share(self.ratio, self.k)

    def draw(self, path: str, leaf: Tensor, step: int) -> Tensor:
        n = leaf.numel()
        return random.lots(n, name=path, seed=self.seed, step=step, device=leaf.device).topk(self.share.of(n)).indices
