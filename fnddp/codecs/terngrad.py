"""TernGrad: -1, 0 or 1 times the largest magnitude."""

from typing import ClassVar

import torch
from torch import Tensor

from fnddp.codecs.packing import block_size, blocks_of, in_blocks, pack, unpack
from fnddp.core.codec import Codec, Key, Payload, wide
from fnddp.core.options import POSITIVE, at_least
from fnddp.core.sync import Sync, transform


@transform
class terngrad(Codec):
    """Send s sign(x_i) with probability |x_i| / s, else 0, where s is the largest |x_i|: unbiased, in 2 bits.

    It needs no memory, but its variance is large: sum over i of |x_i| (s - |x_i|). The wrong choice for gradients with
    few large elements, which make s large: clip them, at the price of a bias, or take smaller blocks. It is
    `quantize(bits=2, rounding="stochastic")` with clipping.

    Args:
        inner: The carrier, or a codec around one, which encodes the scales.
        clip: First clip elements beyond this number of standard deviations of the row, as the paper does with 2.5;
            biased, so use `error_feedback`. None does not clip.
        block: Elements that share a scale; None for the row: a leaf, or a rank's part of it.

    Shapes: scales `[rows, blocks]` in float32 or wider, elements `[rows, blocks, ceil(block / 4)]`.

    Source: Wen et al., "TernGrad", NeurIPS 2017, equations 2 and 3, and 12 for clipping. Deviation: ranks do not share
    a scale, which takes another round there.

    >>> from fnddp import allgather
    >>> sync = terngrad(allgather)
    >>> grads = {"w": torch.tensor([3.0, -3.0, 0.0])}
    >>> sync(grads, sync.init(grads))[0]
    {'w': tensor([ 3., -3.,  0.])}
    """

    inner: Sync
    clip: float | None = None
    block: int | None = None
    seed: int = 0

    draws = True
    averages = True
    limits: ClassVar = {"clip": POSITIVE, "block": at_least(1)}

    def encode(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, key: Key, length: Tensor | None = None
    ) -> Payload:
        x = x.to(wide(x.dtype))
        if self.clip is not None:
            bound = self.clip * _spread(x, length)
            x = x.clamp(-bound, bound)
        blocks = in_blocks(x, self.block)
        scale = blocks.abs().amax(-1)
        q = blocks / torch.where(scale > 0, scale, 1).unsqueeze(-1)
        q = (q + key.uniform(q.shape, like=q)).floor().clamp(-1, 1)
        return {"scale": scale, "q": pack(q.to(torch.int8), bits=2)}

    def lengths(self, n: int, length: Tensor) -> dict[str, Tensor]:
        return {"scale": blocks_of(length, self.block, n)}

    def decode(self, payload: Payload, n: int) -> Tensor:
        q = unpack(payload["q"], 2, block_size(self.block, n))
        return (q * payload["scale"].unsqueeze(-1)).flatten(1)[:, :n]


def _spread(x: Tensor, length: Tensor | None) -> Tensor:
    """Return the standard deviation of each row, `[rows, 1]`. (Under vmap, x.std() adds in another order.)"""
    if length is None:
        return (x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True).sqrt()
    counted = length.clamp(min=1)
    deviation = x - x.sum(-1, keepdim=True) / counted
    # Padding, which is zeros, does not count.
    deviation = torch.where(torch.arange(x.shape[1], device=x.device) < length, deviation, 0)
    return (deviation.square().sum(-1, keepdim=True) / counted).sqrt()
