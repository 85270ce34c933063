"""Block-wise integers: a scale for each block, and 8, 4 or 2 bits for each element."""

from typing import ClassVar

import torch
from torch import Tensor

from fnddp.codecs.packing import block_size, blocks_of, in_blocks, inverse, pack, unpack
from fnddp.core.codec import Codec, Key, Payload, wide
from fnddp.core.options import one_of
from fnddp.core.sync import Sync, transform


@transform
class quantize(Codec):
    """Round each element to one of 2 ** bits - 1 multiples of its block's scale, the largest magnitude of the block.

    Rounded to the nearest it is biased, by less than half a multiple: wrap it in `error_feedback` below 8 bits.
    Rounded stochastically it is unbiased, with a larger error. The wrong choice for gradients with few large elements
    in each block, which leave the others nothing; smaller blocks help, at 32 bits of scale each.

    Args:
        inner: The carrier, or a codec around one, which encodes the scales: `quantize(bf16(two_shot))`.
        bits: 8, 4 or 2. Below 8, several elements share a byte.
        block: Elements that share a scale, a multiple of 8 / bits; None for the row: a leaf, or a rank's part of it.
        rounding: "nearest", halves to even, or "stochastic": up with the probability of what is above.

    Shapes: scales `[rows, blocks]` in float32 or wider, elements `[rows, blocks, ceil(block * bits / 8)]`; the last
    block of a row is padded with zeros that travel; a row shorter than a block is one.

    Source: Alistarh et al., "QSGD", NeurIPS 2017, with the largest magnitude for the norm; Dettmers, "8-bit
    approximations", ICLR 2016.

    >>> from fnddp import allgather
    >>> quantize(allgather, bits=4, block=4)({"w": torch.tensor([7.0, 3.2, -1.4, 0.0])}, ())[0]
    {'w': tensor([ 7.,  3., -1.,  0.])}
    """

    inner: Sync
    bits: int = 8
    block: int | None = 128
    rounding: str = "nearest"
    seed: int = 0

    limits: ClassVar = {"bits": one_of(8, 4, 2), "rounding": one_of("nearest", "stochastic")}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block is not None and (self.block < 1 or self.block * self.bits % 8):
            raise ValueError(f"quantize: block must be a positive multiple of {8 // self.bits}, got {self.block!r}")
        if self.seed and not self.draws:
            raise ValueError(f"quantize: seed={self.seed} is for rounding='stochastic', and this one rounds to nearest")

    @property
    def draws(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rounding == "stochastic"

    def encode(self, x: Tensor, key: Key | None = None) -> Payload:
        blocks = in_blocks(x.to(wide(x.dtype)), self.block)
        largest = 2 ** (self.bits - 1) - 1
        scale = torch.maximum(blocks.amax(-1), -blocks.amin(-1)) / largest
        q = blocks * inverse(scale).unsqueeze(-1)
        q = q.round() if key is None else (q + key.uniform(q.shape, like=q)).floor().clamp(-largest, largest)
        return {"scale": scale, "q": pack(q.to(torch.int8), self.bits)}

    def lengths(self, n: int, length: Tensor) -> dict[str, Tensor]:
        return {"scale": blocks_of(length, self.block, n)}

    def decode(self, payload: Payload, n: int) -> Tensor:
        scale = payload["scale"].unsqueeze(-1)
        q = unpack(payload["q"], self.bits, block_size(self.block, n))
        return (q.to(scale.dtype) * scale).flatten(1)[:, :n]
