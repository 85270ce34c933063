"""Natural compression: a sign and an exponent, without a mantissa."""

import math

import torch
from torch import Tensor

from fnddp.codecs.packing import is_negative, pack_bits, unpack_bits
from fnddp.core.codec import Codec, Key, Payload
from fnddp.core.sync import Sync, transform
from fnddp.torch_private import reinterpreted

BIAS, MANTISSA = 127, 23  # of float32
NOT_FINITE = 255 << MANTISSA


@transform
class natural(Codec):
    """Round each element to one of the two powers of two around it, at random: unbiased, in 9 bits.

    Its variance is at most 1 / 8 of the square of each element, whatever the others are, so it needs neither memory
    nor blocks nor scales. The wrong choice where 8 bits and a scale do (`quantize` errs less for elements near the
    largest of their block), and for float64 gradients beyond the range of float32.

    Nothing is rounded beyond the largest power of two of the gradients' dtype, and below 2 ** -126 to 0 or 2 ** -126.

    Args:
        inner: The carrier; a codec inside has nothing to encode.

    Shapes: exponents `[rows, n]`, one byte each, and signs `[rows, ceil(n / 8)]`.

    Source: Horvath et al., "Natural compression for distributed deep learning", arXiv 1905.10988, definition 1 and
    theorem 1.

    >>> from fnddp import allgather
    >>> sync = natural(allgather)
    >>> grads = {"w": torch.tensor([4.0, -0.5, 0.0])}
    >>> sync(grads, sync.init(grads))[0]
    {'w': tensor([ 4.0000, -0.5000,  0.0000])}
    """

    inner: Sync
    seed: int = 0

    draws = True
    has_fractions = False

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
