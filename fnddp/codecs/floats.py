"""Short floats: 8 bits with a scale for each block, or a sign and an exponent alone."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from fnddp.codecs.packing import block_size, blocks_of, in_blocks, inverse, is_negative, pack_bits, unpack_bits
from fnddp.core.codec import Carrying, Codec, Key, Payload, wide
from fnddp.core.opaque import rounded, shortened
from fnddp.core.options import at_least, one_of
from fnddp.core.sync import transform
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
        inner: The carrier, or a codec for the scales: `fp8(bf16(two_shot))`.
        format: "e4m3" (torch.float8_e4m3fn, up to 448) or "e5m2" (torch.float8_e5m2, up to 57,344).
        block: Elements that share a scale; None for the row: a leaf, or a rank's part of it.

    Source: Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433; a scale for a block as in torchft's
    quantized all-reduce, which has one for a row.

    >>> from fnddp import allgather
    >>> fp8(allgather)({"w": torch.tensor([448.0, 19.0, -1.0, 0.0])}, ())[0]
    {'w': tensor([448.,  20.,  -1.,   0.])}
    """

    inner: Carrying
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
        return {"scale": scale, "q": reinterpreted(rounded(q, dtype), torch.uint8)}

    def lengths(self, n: int, length: Tensor) -> dict[str, Tensor]:
        return {"scale": blocks_of(length, self.block, n)}

    def unit(self, n: int) -> int:
        return block_size(self.block, n)

    def decode(self, payload: Payload, n: int) -> Tensor:
        scale = payload["scale"] * (256 if self.format == "e4m3" else 1)
        # A float16 has the bits of both and zeros behind: converting that is many times as fast as converting a byte.
        signed = reinterpreted(payload["q"], torch.int8).to(torch.int16)
        half = signed * 128 & ~(1 << 14) if self.format == "e4m3" else signed * 256  # e4m3's bias is less by 8
        return shortened((reinterpreted(half, torch.float16).to(scale.dtype) * scale.unsqueeze(-1)).flatten(-2), n)


BIAS, MANTISSA = 127, 23  # of float32
NOT_FINITE = 255 << MANTISSA


@transform
class natural(Codec):
    """Round each element to one of the two powers of two around it, at random: unbiased, in 9 bits.

    Its variance is at most 1 / 8 of the square of each element, whatever the others are, so it needs neither memory
    nor blocks nor scales. The wrong choice where 8 bits and a scale do (`quantize` errs less for elements near the
    largest of their block), and for float64 gradients beyond the range of float32.

    Nothing is rounded beyond the largest power of two of the gradients' dtype, and below 2 ** -126 to 0 or 2 ** -126.

    Source: Horvath et al., "Natural compression for distributed deep learning", arXiv 1905.10988, definition 1 and
    theorem 1.

    >>> from fnddp import allgather
    >>> sync = natural(allgather)
    >>> grads = {"w": torch.tensor([4.0, -0.5, 0.0])}
    >>> sync(grads, sync.init(grads))[0]
    {'w': tensor([ 4.0000, -0.5000,  0.0000])}
    """

    inner: Carrying
    seed: int = 0

    draws = True
    nests = frozenset({"around"})  # its payload has no fractions

    def encode(self, x: Tensor, key: Key) -> Payload:  # pyright: ignore[reportIncompatibleMethodOverride]
        top = min(math.frexp(torch.finfo(x.dtype).max)[1] - 1, BIAS) + BIAS
        x = x.float()
        # NaN and infinity alike, so that no sum overflows.
        bits = reinterpreted(x.abs(), torch.int32).clamp(max=NOT_FINITE)
        # The carry of a random mantissa into the exponent is as likely as the paper has it.
        raised = bits + key.integers(x.shape, bits=MANTISSA, like=x)
        exponent = torch.minimum(raised, bits.clamp(min=top << MANTISSA)).bitwise_right_shift(MANTISSA)
        return {"exponent": exponent.to(torch.uint8), "sign": pack_bits(is_negative(x))}

    def decode(self, payload: Payload, n: int) -> Tensor:
        # Products are left shifts that can write into memory that is there.
        sign = unpack_bits(payload["sign"], n).to(torch.int32) * -(1 << 31)
        return reinterpreted(payload["exponent"].to(torch.int32) * (1 << MANTISSA) | sign, torch.float32)
