"""QSGD: multiples of a fraction of the norm, rounded so that the expectation is exact."""

from typing import ClassVar

import torch
from torch import Tensor

from fnddp.codecs.packing import block_size, blocks_of, in_blocks, inverse, pack, unpack
from fnddp.core.codec import Codec, Key, Payload, wide
from fnddp.core.options import Limit, at_least
from fnddp.core.sync import Sync, transform

BITS = {1: 2, 7: 4, 127: 8}  # how many bits hold levels up to this, with a sign


@transform
class qsgd(Codec):
    """Send ||x||_2 sign(x_i) l_i / s of each element, l_i in 0..s rounded up or down at random: unbiased.

    Its variance is at most min(d / s^2, sqrt(d) / s) times ||x||_2^2 over d elements of a block. It needs no memory;
    with `error_feedback` only where that bound is below 1. The wrong choice at few levels for large blocks, whose
    bound is sqrt(d) / s: `quantize(rounding="stochastic")` scales by the largest element and so wastes fewer levels.

    Args:
        inner: The carrier, or a codec around one, which encodes the norms.
        levels: s, in 1..127: 1 takes 2 bits an element, up to 7 take 4, more take 8.
        block: d, the elements that share a norm; None for the row: a leaf, or a rank's part of it.

    Shapes: norms `[rows, blocks]` in float32 or wider, levels `[rows, blocks, ceil(block * bits / 8)]`; the last block
    of a row is padded with zeros that travel.

    Source: Alistarh et al., "QSGD", NeurIPS 2017, section 3.1 and lemma 3.1. Deviation: the paper codes l_i in variable
    length (Elias), here shapes do not depend on values.

    >>> from fnddp import allgather
    >>> sync = qsgd(allgather, levels=5)
    >>> grads = {"w": torch.tensor([3.0, -4.0, 0.0])}
    >>> sync(grads, sync.init(grads))[0]
    {'w': tensor([ 3., -4.,  0.])}
    """

    inner: Sync
    levels: int = 7
    block: int | None = 512
    seed: int = 0

    draws = True
    limits: ClassVar = {"levels": Limit(lambda levels: 1 <= levels <= 127, "in 1..127"), "block": at_least(1)}

    def encode(self, x: Tensor, key: Key) -> Payload:  # pyright: ignore[reportIncompatibleMethodOverride]
        blocks = in_blocks(x.to(wide(x.dtype)), self.block)
        # In float64: squares of float32 overflow and underflow. (torch 2.11 traces it wrongly without keepdim.)
        norm = torch.linalg.vector_norm(blocks, dim=-1, keepdim=True, dtype=torch.float64).squeeze(-1).to(blocks.dtype)
        q = blocks * inverse(norm / self.levels).unsqueeze(-1)
        q = (q + key.uniform(q.shape, like=q)).floor().clamp(-self.levels, self.levels)
        return {"norm": norm, "q": pack(q.to(torch.int8), self._bits)}

    def lengths(self, n: int, length: Tensor) -> dict[str, Tensor]:
        return {"norm": blocks_of(length, self.block, n)}

    def decode(self, payload: Payload, n: int) -> Tensor:
        q = unpack(payload["q"], self._bits, block_size(self.block, n))
        return (q * (payload["norm"] / self.levels).unsqueeze(-1)).flatten(1)[:, :n]

    @property
    def _bits(self) -> int:
        return next(bits for levels, bits in BITS.items() if self.levels <= levels)
