"""Random block: a run of neighbouring elements that all ranks draw alike."""

import torch
from torch import Tensor

from fnddp.core import random
from fnddp.core.options import Share, require_share
from fnddp.core.sync import Sync, transform
from fnddp.transforms.drawn import Drawn


@transform
class random_block(Drawn):
    """Send one run of neighbouring elements of each leaf, drawn anew in each step, and zeros for all others.

    The run goes on at the front where the leaf ends, so that each element is as likely to travel. All ranks draw from
    one seed, so nothing but the elements travels and the payloads add: it wraps any pipeline, and it is the cheapest
    of all compressors, a copy. As with `random_k` it contracts by 1 - k / n in expectation and belongs into
    `error_feedback`, without `unbiased`. The wrong choice where neighbours are much alike (rows of an embedding), and
    for gradients with few large elements.

    Args:
        inner: The pipeline of the run, a flat leaf.
        ratio: The fraction of elements to send, in (0, 1], at least one; or
        block: how many elements to send of each leaf. Exactly one of both.
        unbiased: Multiply by n / block, so that the expected mean is the mean; not with memory, see `random_k`.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019, section 4.1 (random block).

    >>> import torch
    >>> from fnddp import allreduce
    >>> sync = random_block(allreduce, block=2)
    >>> grads = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    >>> sync(grads, sync.init(grads))[0]
    {'w': tensor([1., 2., 0., 0.])}
    """

    inner: Sync
    ratio: float | None = None
    block: int | None = None
    unbiased: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("random_block", self.ratio, "block", self.block)

    @property
    def share(self) -> Share:
        return Share(self.ratio, self.block)

    def draw(self, path: str, leaf: Tensor, step: int) -> Tensor:
        n = leaf.numel()
        word = random.integers((1,), bits=31, name=path, seed=self.seed, step=step, device=leaf.device)
        # The high half of the product: uniform over all starts of a leaf of up to 2 ** 31 elements.
        return ((word.long() * n >> 31) + torch.arange(self.share.of(n), device=leaf.device)) % n
