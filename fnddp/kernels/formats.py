"""How Triton's kernels encode and decode a block of each codec: two functions for each, with the bits of its reference.

`encode(value, counter, ...)` returns scales `[MANY]` and codes of `BITS` bits, `[MANY, BLOCK]` in int32, of blocks in
float32; `counter` numbers their elements for random numbers. `decode(scale, code, ...)` returns float32; the sign of
codes is extended. `SCALE` and `OPTION` are those of `fnddp.core.codec.Form`.
"""

# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number of float32


@triton.jit
def divided(x, by, BY_INVERSE: tl.constexpr):
    """Divide by a number as PyTorch does: on CUDA it multiplies by the inverse."""
    divisor = tl.full(x.shape, by, tl.float32)
    if BY_INVERSE:
        return x * tl.div_rn(tl.full(x.shape, 1.0, tl.float32), divisor)
    return tl.div_rn(x, divisor)


@triton.jit
def _largest(value):
    is_nan = tl.max((value != value).to(tl.int32), 1) > 0  # a maximum may ignore NaN
    return tl.where(is_nan, float("nan"), tl.max(tl.abs(value), 1))


@triton.jit
def _inverse(scale):
    return tl.where(scale < TINY, 0.0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale))


@triton.jit
def _nearest(x):
    """Round to the nearest integer, ties to even, below 2 ** 22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _uniform(counter):
    """Return the numbers of `fnddp.core.random.uniform`."""
    word = counter.to(tl.uint32, bitcast=True)
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x68E31DA5
    return (word.to(tl.int32, bitcast=True) >> 9).to(tl.float32) * 2.0**-23 + (0.5 + 2.0**-24)


@triton.jit
def _encode_quantize(value, counter, BITS: tl.constexpr, SCALE: tl.constexpr, OPTION: tl.constexpr, BY_INVERSE):
    largest = _largest(value)
    scale = divided(largest, 2 ** (BITS - 1) - 1, BY_INVERSE)
    is_finite = (largest - largest == 0.0)[:, None]
    q = tl.where(is_finite, value, 0.0) * _inverse(scale)[:, None]
    if OPTION == "stochastic":
        q = tl.minimum(tl.maximum(tl.floor(q + _uniform(counter)), 1 - 2 ** (BITS - 1)), 2 ** (BITS - 1) - 1)
    else:
        q = _nearest(q)
    return scale, tl.where(is_finite, q, 0.0).to(tl.int32)


@triton.jit
def _decode_quantize(scale, code, BITS: tl.constexpr, SCALE: tl.constexpr, OPTION: tl.constexpr):
    return code.to(tl.float32) * scale[:, None]


FORMATS = {"quantize": (_encode_quantize, _decode_quantize)}
