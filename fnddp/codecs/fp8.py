"""Block-wise 8-bit floating point: a scale for each block, and a sign, exponent and mantissa in a byte."""

from typing import ClassVar

import torch
from torch import Tensor

from fnddp.codecs.packing import blocks_of, in_blocks, inverse
from fnddp.core.codec import Codec, Payload, wide
from fnddp.core.options import at_least, one_of
from fnddp.core.sync import Sync, transform
from fnddp.torch_private import reinterpreted

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@transform
class fp8(Codec):
    """Send each element as an 8-bit float, after scaling its block to the format's range.

    Its error is relative to the element, that of `quantize` to the block: e4m3 errs by at most 1 / 16 of an element
    down to 2 ** -14 of the block's largest one, e5m2 by 1 / 8 down to 2 ** -29. The wrong choice for blocks of elements
    of one magnitude, which int8 rounds finer; and, being biased, without `error_feedback`. A block whose largest
    element is below the smallest normal number times the format's largest (5.3e-36 for e4m3 of float32) becomes zeros.

    Args:
        inner: The carrier, or a codec around one, which encodes the scales: `fp8(bf16(two_shot))`.
        format: "e4m3" (torch.float8_e4m3fn, up to 448) or "e5m2" (torch.float8_e5m2, up to 57,344).
        block: Elements that share a scale; None for the row: a leaf, or a rank's part of it.

    Shapes: scales `[rows, blocks]` in float32 or wider, elements `[rows, blocks, block]` as bytes; the last block of a
    row is padded with zeros that travel.

    Source: Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433; a scale for a block as in torchft's
    quantized all-reduce, which has one for a row.

    >>> from fnddp import allgather
    >>> fp8(allgather)({"w": torch.tensor([448.0, 19.0, -1.0, 0.0])}, ())[0]
    {'w': tensor([448.,  20.,  -1.,   0.])}
    """

    inner: Sync
    format: str = "e4m3"
    block: int | None = 128

    limits: ClassVar = {"format": one_of(*FORMATS), "block": at_least(1)}

    def encode(self, x: Tensor) -> Payload:
        dtype = FORMATS[self.format]
        largest = torch.finfo(dtype).max
        blocks = in_blocks(x.to(wide(x.dtype)), self.block)
        scale = torch.maximum(blocks.amax(-1), -blocks.amin(-1)).abs() / largest  # never -0.0
        q = blocks * inverse(scale).unsqueeze(-1)  # up to rounding within the format's range, and rounded into it
        # Bytes: no codec inside may take them for fractions, and gloo and NCCL do not know the dtype.
        return {"scale": scale, "q": reinterpreted(q.to(dtype), torch.uint8)}

    def lengths(self, n: int, length: Tensor) -> dict[str, Tensor]:
        return {"scale": blocks_of(length, self.block, n)}

    def decode(self, payload: Payload, n: int) -> Tensor:
        scale = payload["scale"] * (256 if self.format == "e4m3" else 1)
        # A float16 has the bits of both and zeros behind: converting that is many times as fast as converting a byte.
        signed = reinterpreted(payload["q"], torch.int8).to(torch.int16)
        half = signed * 128 & ~(1 << 14) if self.format == "e4m3" else signed * 256  # e4m3's bias is less by 8
        return (reinterpreted(half, torch.float16).to(scale.dtype) * scale.unsqueeze(-1)).flatten(1)[:, :n]
