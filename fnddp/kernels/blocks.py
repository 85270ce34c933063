"""Triton's kernels of `quantize`: each element is read once and written once.

Division is IEEE's (`div_rn`), and products and sums are not fused: so the bits are those of PyTorch's operations.
"""

# pyright: basic, reportMissingImports=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number of float32
ELEMENTS = 2048  # of a program
SIZES = tuple(1 << i for i in range(4, 13))  # of blocks
MOST_ROWS = 65535  # of a launch: its second dimension
UNFUSED: Any = {"enable_fp_fusion": False}


@triton.jit
def _nearest(x):
    """Round to the nearest integer, ties to even, below 2 ** 22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def encode_kernel(x, scale, q, n, blocks, BLOCK: tl.constexpr, BITS: tl.constexpr, MANY: tl.constexpr):
    """x: [rows, n] -> scale: [rows, blocks], q: [rows, blocks, BLOCK * BITS / 8]; MANY blocks a program."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.load(x + row * n + at, mask=at < n, other=0.0).to(tl.float32)
    is_nan = tl.max((value != value).to(tl.int32), 1) > 0  # a maximum may ignore NaN
    largest = tl.where(is_nan, float("nan"), tl.max(tl.abs(value), 1))
    step = tl.div_rn(largest, tl.full([MANY], 2 ** (BITS - 1) - 1, tl.float32))
    factor = tl.where(step < TINY, 0.0, tl.div_rn(tl.full([MANY], 1.0, tl.float32), step))
    is_finite = (largest - largest == 0.0)[:, None]
    code = tl.where(is_finite, _nearest(tl.where(is_finite, value, 0.0) * factor[:, None]), 0.0).to(tl.int8)
    tl.store(scale + row * blocks + block, step, mask=block < blocks)
    if BITS == 8:
        tl.store(q + row * blocks * BLOCK + at, code, mask=block[:, None] < blocks)
    else:
        SHARED: tl.constexpr = 8 // BITS
        BYTES: tl.constexpr = BLOCK // SHARED
        low = tl.reshape((code & (2**BITS - 1)).to(tl.int32), (MANY, BYTES, SHARED))
        byte = tl.sum(low << (tl.arange(0, SHARED) * BITS)[None, None, :], 2).to(tl.uint8)
        to = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
        tl.store(q + row * blocks * BYTES + to, byte, mask=block[:, None] < blocks)


@triton.jit
def decode_kernel(scale, q, x, n, blocks, BLOCK: tl.constexpr, BITS: tl.constexpr, MANY: tl.constexpr):
    """The inverse: x: [rows, n], in float32."""
    SHARED: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = BLOCK // SHARED
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)
    step = tl.load(scale + row * blocks + block, mask=block < blocks, other=0.0)
    at = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    code = tl.load(q + row * blocks * BYTES + at, mask=block[:, None] < blocks, other=0).to(tl.int32)
    if BITS != 8:
        code = code[:, :, None] >> (tl.arange(0, SHARED) * BITS)[None, None, :]
        code = tl.reshape((code << (32 - BITS)) >> (32 - BITS), (MANY, BLOCK))
    to = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(x + row * n + to, code.to(tl.float32) * step[:, None], mask=to < n)


def encode(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor] | None:
    """Return scales `[..., blocks]` and bytes `[..., blocks, block * bits / 8]` of `x: [..., n]`."""
    if block not in SIZES or not x.numel() or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    scale = x.new_empty((*x.shape[:-1], -(-x.shape[-1] // block)), dtype=torch.float32)
    q = x.new_empty((*scale.shape, block * bits // 8), dtype=torch.int8 if bits == 8 else torch.uint8)
    return (scale, q) if _launch(encode_kernel, (x.contiguous(), scale, q), x, block, bits) else None


def decode(scale: Tensor, q: Tensor, bits: int, block: int, n: int) -> Tensor | None:
    """Return `[..., n]` in float32."""
    if block not in SIZES or not q.numel() or scale.dtype != torch.float32:
        return None
    x = scale.new_empty((*scale.shape[:-1], n))
    return x if _launch(decode_kernel, (scale.contiguous(), q.contiguous(), x), x, block, bits) else None


def _launch(kernel: Any, tensors: tuple[Tensor, ...], x: Tensor, block: int, bits: int) -> bool:
    """Run `kernel` for the rows of `x`; as one row if no block is short. Return False for too many rows."""
    n = x.numel() if x.shape[-1] % block == 0 else x.shape[-1]
    rows, blocks, many = x.numel() // n, -(-n // block), max(1, ELEMENTS // block)
    if rows > MOST_ROWS:
        return False
    kernel[triton.cdiv(blocks, many), rows](*tensors, n, blocks, block, bits, many, **UNFUSED)
    return True
