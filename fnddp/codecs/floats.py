"""Short floats: 8 or 4 bits with a scale for each block, or a sign and an exponent alone."""

import math
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fnddp.codecs.packing import (
    block_size,
    blocks_of,
    in_blocks,
    inverse,
    is_negative,
    pack,
    pack_bits,
    unpack,
    unpack_bits,
)
from fnddp.core.codec import Carrying, Codec, Form, Key, Payload, wide
from fnddp.core.opaque import rounded, shortened
from fnddp.core.options import at_least
from fnddp.core.sync import transform
from fnddp.torch_private import reinterpreted


class Format(NamedTuple):
    """Floats of `bits` bits; the largest one is `largest`, and the largest power of two is 2 ** `top`.

    To decode, extend the sign to 16 bits, shift left by `shift`, and clear the bits `copies` (copies of the sign). The
    result has the bits of a float16 that is smaller by the factor 2 ** `less`, because its exponent has a larger bias.
    """

    bits: int
    largest: float
    top: int
    shift: int
    copies: int
    less: int
    dtype: torch.dtype | None = None


FORMATS = {
    "e4m3": Format(8, 448, 8, 7, 1 << 14, 8, torch.float8_e4m3fn),
    "e5m2": Format(8, 57344, 15, 8, 0, 0, torch.float8_e5m2),
    "e2m1": Format(4, 6, 2, 9, 7 << 12, 14),
}
BIAS, MANTISSA = 127, 23  # of float32
NOT_FINITE = 255 << MANTISSA


@transform
class fp8(Codec):
    """Send each element as a float of 8 or 4 bits, after scaling its block to the range of the format.

    The error is relative to the element; the error of `quantize` is relative to the block. For elements down to 2 **
    -14 of the block's largest one, e4m3 errs by at most 1 / 16 of the element; e5m2 by 1 / 8 down to 2 ** -29; e2m1 by
    1 / 4 down to 1 / 6. The wrong choice for blocks of elements of one magnitude, because int8 rounds these finer; and
    without `error_feedback`, because it is biased. A block becomes zeros if its largest element is below the smallest
    normal number times the format's largest (5.3e-36 for e4m3 of float32).

    The block formats of accelerators, bit for bit, are `fp8(two_shot, block=32, scale="e8m0")` (MXFP8) and
    `fp8(two_shot, format="e2m1", block=32, scale="e8m0")` (MXFP4). Scales of powers of two may round the largest
    element of a block down, by an eighth in e4m3 and e5m2, and by a quarter in e2m1. With these scales, gradients
    beyond the range of float32 become NaN or infinite.

    Args:
        inner: The carrier, or a codec for the scales: `fp8(bf16(two_shot))`; with scales of powers of two, a carrier.
        format: "e4m3" (torch.float8_e4m3fn, up to 448), "e5m2" (torch.float8_e5m2, up to 57,344), or "e2m1" (4 bits:
            0, 0.5, 1, 1.5, 2, 3, 4 and 6, two in a byte).
        block: Number of elements that share a scale; even for e2m1. None for a row: a leaf, or a rank's part of it.
        scale: "float32", or wider for wider gradients, maps the largest element of a block to the largest of the
            format; "e8m0" is a power of two in 8 bits, torch.float8_e8m0fnu.

    Source: Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433; with a scale for each block, unlike
    torchft's quantized all-reduce, with one for each row. OCP Microscaling Formats (MX) Specification 1.0, 2023,
    sections 5 and 6.3: the exponent of a scale is that of the largest element less that of the format's largest power
    of two; elements are rounded to nearest, ties to even, and larger ones to the largest; a block with NaN or infinite
    values is all NaN.

    >>> from fnddp import allgather
    >>> fp8(allgather)({"w": torch.tensor([448.0, 19.0, -1.0, 0.0])}, ())[0]
    {'w': tensor([448.,  20.,  -1.,   0.])}
    >>> fp8(allgather, format="e2m1", block=32, scale="e8m0")({"w": torch.tensor([7.0, 2.6, -1.0, 0.1])}, ())[0]
    {'w': tensor([ 6.,  3., -1.,  0.])}
    """

    inner: Carrying
    format: Literal["e4m3", "e5m2", "e2m1"] = "e4m3"
    block: int | None = 128
    scale: Literal["float32", "e8m0"] = "float32"

    limits: ClassVar = {"block": at_least(1)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format == "e2m1" and self.block is not None and self.block % 2:
            raise ValueError(f"fp8: block must be even for e2m1, because two numbers share a byte, got {self.block}")

    @property
    def nests(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset({"around", "inside"} if self.scale == "float32" else {"around"})

    @property
    def form(self) -> Form:  # pyright: ignore[reportIncompatibleVariableOverride]
        bits, *numbers, _ = FORMATS[self.format]
        return Form("fp8", bits, self.scale, tuple(numbers))

    def encode(self, x: Tensor) -> Payload:
        form = FORMATS[self.format]
        blocks = in_blocks(x.to(wide(x.dtype) if self.scale == "float32" else torch.float32), self.block)
        largest = torch.maximum(blocks.amax(-1), -blocks.amin(-1)).abs()  # never -0.0
        if self.scale == "float32":
            scale = largest / form.largest
            q = blocks * inverse(scale).unsqueeze(-1)  # up to rounding within the format's range
        else:
            exponent = torch.bitwise_right_shift(reinterpreted(largest, torch.int32), MANTISSA)
            scale = torch.where(exponent == 255, 255, (exponent - form.top).clamp(min=0)).to(torch.uint8)
            # The exact inverse of the scale, a normal number; for a NaN scale, any value.
            factor = reinterpreted((254 - scale.to(torch.int32)).abs() * (1 << MANTISSA), torch.float32)
            q = (blocks * factor.unsqueeze(-1)).clamp(-form.largest, form.largest)
        # Bytes: no codec inside may take them for fractions, and gloo and NCCL do not know the dtype.
        q = _in_four_bits(q) if form.dtype is None else reinterpreted(rounded(q, form.dtype), torch.uint8)
        return {"scale": scale, "q": q}

    def lengths(self, n: int, length: Tensor) -> dict[str, Tensor]:
        return {"scale": blocks_of(length, self.block, n)}

    def unit(self, n: int) -> int:
        return block_size(self.block, n)

    def decode(self, payload: Payload, n: int) -> Tensor:
        form, scale = FORMATS[self.format], payload["scale"]
        q = reinterpreted(unpack(payload["q"], form.bits, block_size(self.block, n)), torch.int8)
        # A float16 has the bits of each format, then zeros: converting it is many times as fast as converting a byte.
        half = torch.bitwise_and(q.to(torch.int16) * (1 << form.shift), ~form.copies)
        if self.scale == "e8m0":
            exponent = scale.to(torch.int32)
            powers = torch.where(exponent == 0, 1 << MANTISSA - 1, exponent * (1 << MANTISSA))
            scale = torch.where(exponent == 255, math.nan, reinterpreted(powers, torch.float32))
        value = reinterpreted(half, torch.float16).to(scale.dtype)
        if form.dtype is None:  # a scale may be too large for the factor
            value = value * 2**form.less
        else:
            scale = scale * 2**form.less
        return shortened((value * scale.unsqueeze(-1)).flatten(-2), n)


def _in_four_bits(q: Tensor) -> Tensor:
    """Round numbers of at most 6 to e2m1, ties to even, and pack sign and magnitude, two in a byte."""
    size = q.abs()
    # Steps of 0.5 up to 2, 1 up to 4, and 2 beyond: the least of three lines, each rounded by itself.
    steps = torch.minimum(torch.minimum((2 * size).round(), size.round() + 2), (size / 2).round() + 4)
    return pack((steps + 8 * is_negative(q)).to(torch.int8), 4)


@transform
class natural(Codec):
    """Round each element to one of the two powers of two around it, at random: unbiased, in 9 bits.

    The variance is at most 1 / 8 of the square of each element, whatever the others are, so it needs neither memory nor
    blocks nor scales. The wrong choice where 8 bits and a scale suffice (`quantize` errs less for elements near the
    largest of their block), and for float64 gradients beyond the range of float32.

    Elements beyond the largest power of two of the gradients' dtype become that power. Elements below 2 ** -126 become
    0 or 2 ** -126.

    Args:
        seed: Seed of the rounding. Ranks round differently.

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
    nests = frozenset({"around"})  # its payload has no floating-point numbers

    def encode(self, x: Tensor, key: Key) -> Payload:  # pyright: ignore[reportIncompatibleMethodOverride]
        top = min(math.frexp(torch.finfo(x.dtype).max)[1] - 1, BIAS) + BIAS
        x = x.float()
        # NaN and infinity become one value, so that no sum overflows.
        bits = reinterpreted(x.abs(), torch.int32).clamp(max=NOT_FINITE)
        # Adding a random mantissa carries into the exponent with the probability of the paper.
        raised = bits + key.integers(x.shape, bits=MANTISSA, like=x)
        exponent = torch.minimum(raised, bits.clamp(min=top << MANTISSA)).bitwise_right_shift(MANTISSA)
        return {"exponent": exponent.to(torch.uint8), "sign": pack_bits(is_negative(x))}

    def decode(self, payload: Payload, n: int) -> Tensor:
        # A product is a left shift that can write into existing memory.
        sign = unpack_bits(payload["sign"], n).to(torch.int32) * -(1 << 31)
        return reinterpreted(payload["exponent"].to(torch.int32) * (1 << MANTISSA) | sign, torch.float32)
