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
    if BY_INVERSE:
        return x * tl.div_rn(tl.full([1], 1.0, tl.float32), tl.full([1], by, tl.float32))
    return tl.div_rn(x, tl.full(x.shape, by, tl.float32))


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


@triton.jit
def _encode_fp8(value, counter, BITS: tl.constexpr, SCALE: tl.constexpr, OPTION: tl.constexpr, BY_INVERSE):
    """`OPTION` has `largest`, `top`, `shift`, `copies` and `less` of `fnddp.codecs.floats.Format`."""
    largest = _largest(value)
    if SCALE == "float32":
        scale = divided(largest, OPTION[0], BY_INVERSE)
        q = value * _inverse(scale)[:, None]
    else:
        exponent = largest.to(tl.int32, bitcast=True) >> 23
        scale = tl.where(exponent == 255, 255, tl.maximum(exponent - OPTION[1], 0))
        q = value * (tl.abs(254 - scale) << 23).to(tl.float32, bitcast=True)[:, None]
        q = tl.where(q > OPTION[0], 1.0 * OPTION[0], tl.where(q < -OPTION[0], -1.0 * OPTION[0], q))  # NaN stays
    bits = q.to(tl.int32, bitcast=True)
    size, sign = bits & 0x7FFFFFFF, (bits >> 31) & (1 << (BITS - 1))
    # The last digits are rounded off, ties to even. A sum with a large number does this to subnormal ones.
    normal = (size + ((1 << (12 + OPTION[2])) - 1) + ((size >> (13 + OPTION[2])) & 1)) >> (13 + OPTION[2])
    normal -= (112 + OPTION[4]) << (10 - OPTION[2])
    large = 2.0 ** (OPTION[2] + OPTION[4] - 1)
    subnormal = (tl.abs(q) + large).to(tl.int32, bitcast=True) - ((126 + OPTION[2] + OPTION[4]) << 23)
    code = tl.where(size < ((113 + OPTION[4]) << 23), subnormal, tl.minimum(normal, 127)) | sign  # 127: NaN
    if BITS != 8:  # has no NaN
        code = tl.where(q == q, code, 0)
    return scale, code


@triton.jit
def _decode_fp8(scale, code, BITS: tl.constexpr, SCALE: tl.constexpr, OPTION: tl.constexpr):
    value = ((code << OPTION[2]) & (-1 - OPTION[3])).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    if SCALE == "e8m0":
        exponent = scale.to(tl.int32)
        power = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
        scale = tl.where(exponent == 255, float("nan"), power)
    if BITS == 8:
        value *= (scale * 2.0 ** OPTION[4])[:, None]
    else:  # the scale may be too large for the factor
        value = (value * 2.0 ** OPTION[4]) * scale[:, None]
    return value


@triton.jit
def _encode_sign(value, counter, BITS: tl.constexpr, SCALE: tl.constexpr, OPTION: tl.constexpr, BY_INVERSE):
    return _largest(value), value.to(tl.int32, bitcast=True) >> 31


@triton.jit
def _decode_sign(scale, code, BITS: tl.constexpr, SCALE: tl.constexpr, OPTION: tl.constexpr):
    if SCALE == "none":  # noqa: SIM108
        value = 1 + 2.0 * code
    else:
        value = (-code).to(tl.float32) * (-2 * scale)[:, None] + scale[:, None]
    return value


@triton.jit
def encoded_in_int8(value, BY_INVERSE: tl.constexpr):
    """Return scales `[MANY]` and codes `[MANY, BLOCK]` of residuals, as `fnddp.kernels.int8.to_int8` does."""
    largest = _largest(value)
    scale = tl.where(largest < 127 * TINY, 0.0, divided(largest, 127, BY_INVERSE))
    by = tl.where(scale > 0, scale, 1.0)[:, None]
    q = _nearest(tl.div_rn(value, tl.broadcast_to(by, value.shape)))
    return scale, q.to(tl.int8)


FORMATS = {
    "quantize": (_encode_quantize, _decode_quantize),
    "fp8": (_encode_fp8, _decode_fp8),
    "sign": (_encode_sign, _decode_sign),
}
