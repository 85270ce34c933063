"""Triton's kernels of `quantize` on the blocks of many leaves: each element is read once and written once.

A program reads where its blocks are from a table of leaves, so leaves are neither joined nor padded. Division is IEEE's
(`div_rn`), and products and sums are not fused: so the bits are those of PyTorch's operations.
"""

# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportGeneralTypeIssues=false

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fnddp.device import device_of
from fnddp.kernels.constants import on_device

TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number of float32
ELEMENTS = 1024  # of a program
LARGEST = 4096  # elements of a block
MOST_ROWS = 65535  # of a launch: its second dimension
FIELDS = tl.constexpr(8)  # of a leaf in a table: its address, those of `Place`, and the addresses of two residuals
UNFUSED: Any = {"enable_fp_fusion": False}
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Place(NamedTuple):
    """The blocks of a leaf of `count` elements in each row of a payload, from `width` elements of the leaf.

    `unit` is the size of a block; `block` and `byte` are the first block and the first byte of codes in the row.
    """

    count: int
    width: int
    unit: int
    block: int
    byte: int


@triton.jit
def _nearest(x):
    """Round to the nearest integer, ties to even, below 2 ** 22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _places(table, tiles, row, BLOCK: tl.constexpr, BITS: tl.constexpr, MANY: tl.constexpr):
    """Return the entry of a leaf, and this program's first element, scale and byte; then offsets from these, masked.

    Offsets have 32 bits: an element then takes fewer registers.
    """
    tile = tiles + 2 * tl.program_id(0)
    entry, block = table + tl.load(tile).to(tl.int64) * FIELDS, tl.load(tile + 1).to(tl.int64)
    count, width, unit = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    first = block * unit
    left = tl.minimum(tl.minimum(width, count - row * width) - first, 1 << 30).to(tl.int32)
    blocks = tl.minimum((width + unit - 1) // unit - block, MANY).to(tl.int32)
    unit = unit.to(tl.int32)
    nbytes = (unit * BITS + 7) // 8
    at, inside, byte = tl.arange(0, MANY), tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK * BITS // 8)[None, :]
    element, is_at = at[:, None] * unit + inside, at < blocks
    is_element, is_byte = (inside < unit) & (element < left), is_at[:, None] & (byte < nbytes)
    begin = row * width + first, tl.load(entry + 4) + block, tl.load(entry + 5) + block * nbytes
    return entry, begin, element, is_element, at, is_at, at[:, None] * nbytes + byte, is_byte


@triton.jit
def _encode(value, BLOCK: tl.constexpr, BITS: tl.constexpr, MANY: tl.constexpr):
    """Return the scales and bytes of blocks, `value: [MANY, BLOCK]` in float32."""
    is_nan = tl.max((value != value).to(tl.int32), 1) > 0  # a maximum may ignore NaN
    largest = tl.where(is_nan, float("nan"), tl.max(tl.abs(value), 1))
    scale = tl.div_rn(largest, tl.full([MANY], 2 ** (BITS - 1) - 1, tl.float32))
    factor = tl.where(scale < TINY, 0.0, tl.div_rn(tl.full([MANY], 1.0, tl.float32), scale))
    is_finite = (largest - largest == 0.0)[:, None]
    code = tl.where(is_finite, _nearest(tl.where(is_finite, value, 0.0) * factor[:, None]), 0.0).to(tl.int8)
    if BITS != 8:
        low = tl.reshape((code & (2**BITS - 1)).to(tl.int32), (MANY, BLOCK * BITS // 8, 8 // BITS))
        code = tl.sum(low << (tl.arange(0, 8 // BITS) * BITS)[None, None, :], 2).to(tl.uint8)
    return scale, code


@triton.jit
def _decode(scale, code, BLOCK: tl.constexpr, BITS: tl.constexpr, MANY: tl.constexpr):
    """Return blocks in float32, `[MANY, BLOCK]`."""
    code = code.to(tl.int32)
    if BITS != 8:
        code = code[:, :, None] >> (tl.arange(0, 8 // BITS) * BITS)[None, None, :]
        code = tl.reshape((code << (32 - BITS)) >> (32 - BITS), (MANY, BLOCK))
    return code.to(tl.float32) * scale[:, None]


@triton.jit
def _added(
    scale,
    q,
    scales,
    bytes,
    N: tl.constexpr,
    at,
    is_at,
    byte,
    is_byte,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    MANY: tl.constexpr,
):
    """Return the sum of the blocks of `N` rows, in the order of rows."""
    total = _decode(tl.load(scale + at, is_at, 0.0), tl.load(q + byte, is_byte, 0), BLOCK, BITS, MANY)
    for _ in range(1, N):
        scale += scales
        q += bytes
        total += _decode(tl.load(scale + at, is_at, 0.0), tl.load(q + byte, is_byte, 0), BLOCK, BITS, MANY)
    return total


@triton.jit
def _mean(total, ranks, BY_INVERSE: tl.constexpr):
    """Divide as PyTorch does: on CUDA it multiplies by the inverse of a number."""
    divisor = tl.full(total.shape, ranks, tl.float32)
    if BY_INVERSE:
        return total * tl.div_rn(tl.full(total.shape, 1.0, tl.float32), divisor)
    return tl.div_rn(total, divisor)


@triton.jit
def _bits(value):
    """Return the upper bits of float32 rounded to bfloat16, ties to even. (Triton's interpreter truncates.)"""
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where(value == value, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)


@triton.jit
def _rounded(value, DTYPE: tl.constexpr):
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        return (_bits(value) << 16).to(tl.float32, bitcast=True)
    return value.to(DTYPE).to(tl.float32)


@triton.jit
def _load(entry, first, element, is_element, DTYPE: tl.constexpr):
    """Return elements in float32. (Triton's interpreter reads subnormal numbers of bfloat16 as zeros.)"""
    leaf = tl.load(entry)
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = tl.load(leaf.to(tl.pointer_type(tl.int16)) + first + element, is_element, 0).to(tl.int32)
        return (bits << 16).to(tl.float32, bitcast=True)
    return tl.load(leaf.to(tl.pointer_type(DTYPE)) + first + element, is_element, 0.0).to(tl.float32)


@triton.jit
def _store(entry, first, element, value, is_element, DTYPE: tl.constexpr):
    leaf = tl.load(entry)
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        tl.store(leaf.to(tl.pointer_type(tl.int16)) + first + element, _bits(value).to(tl.int16), is_element)
    else:
        tl.store(leaf.to(tl.pointer_type(DTYPE)) + first + element, value.to(DTYPE), is_element)


@triton.jit(do_not_specialize=["rank", "ranks", "decay"])
def kernel(
    table, tiles, scale, q, scales, bytes, moved, q_moved, moves, bytes_moved, again, q_again, rank, ranks,
    decay, nonfinite, N: tl.constexpr, WHAT: tl.constexpr, BY_INVERSE: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK: tl.constexpr, BITS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Do one of the operations of `fnddp.kernels.leaves`; rows of payloads are `scales` and `bytes` elements apart.

    encode: leaves to `scale` and `q`. reduce: the `N` rows of `moved`, which ranks sent to `rank`, to their mean,
    encoded `again`. decode: `scale` and `q` to leaves. sent: the same, with `ranks` times the loss of `again`.
    encode_sum: encode, with `decay` times a residual added. residual: that sum less sent, or the old residual.
    """
    row = tl.program_id(1).to(tl.int64)
    if WHAT == "reduce_leaves":
        row += rank
    entry, begin, element, is_element, at, is_at, byte, is_byte = _places(table, tiles, row, BLOCK, BITS, MANY)
    scale, moved, again = scale + row * scales + begin[1], moved + begin[1], again + begin[1]
    q, q_moved, q_again = q + row * bytes + begin[2], q_moved + begin[2], q_again + begin[2]
    if WHAT == "encode_leaves" or WHAT == "encode_sum_leaves":
        value = _load(entry, begin[0], element, is_element, DTYPE)
        if WHAT == "encode_sum_leaves":
            value += decay * _load(entry + 6, begin[0], element, is_element, tl.float32)
            value = _rounded(value, DTYPE)
        step, code = _encode(value, BLOCK, BITS, MANY)
        tl.store(scale + at, step, is_at)
        tl.store(q + byte, code, is_byte)
    elif WHAT == "reduce_leaves":
        total = _added(moved, q_moved, moves, bytes_moved, N, at, is_at, byte, is_byte, BLOCK, BITS, MANY)
        mean = tl.where(is_element, _mean(total, ranks, BY_INVERSE), 0.0)
        step, code = _encode(_rounded(mean, DTYPE), BLOCK, BITS, MANY)
        tl.store(again + at, step, is_at)
        tl.store(q_again + byte, code, is_byte)
    else:
        value = _added(scale, q, 0, 0, 1, at, is_at, byte, is_byte, BLOCK, BITS, MANY)
        if WHAT == "sent_leaves" or WHAT == "residual_leaves":
            lost = tl.zeros_like(value)
            if row == rank:
                total = _added(moved, q_moved, moves, bytes_moved, N, at, is_at, byte, is_byte, BLOCK, BITS, MANY)
                lost = _added(again, q_again, 0, 0, 1, at, is_at, byte, is_byte, BLOCK, BITS, MANY)
                lost = (lost - _mean(total, ranks, BY_INVERSE)) * ranks
            value += lost
        if WHAT == "residual_leaves":
            before = _load(entry + 6, begin[0], element, is_element, tl.float32)
            total = _load(entry, begin[0], element, is_element, DTYPE) + decay * before
            value = tl.where(tl.load(nonfinite) != 0, before, total - _rounded(value, DTYPE))
            _store(entry + 7, begin[0], element, value, is_element, tl.float32)
        else:
            _store(entry, begin[0], element, value, is_element, DTYPE)


def _tiles(places: tuple[Place, ...], many: int) -> list[int]:
    """Return for each program its leaf, and its first block of that leaf."""
    blocks = [-(-place.width // place.unit) for place in places]
    return [at for leaf, n in enumerate(blocks) for first in range(0, n, many) for at in (leaf, first)]


def run(
    what: str, bits: int, places: tuple[Place, ...], given: Mapping[str, Sequence[Tensor]], n: int, dtype: torch.dtype,
    *, rank: int = 0, ranks: int = 1, decay: float = 1.0, nonfinite: Tensor | None = None,
) -> bool:  # fmt: skip
    """Run an operation on lists of tensors by name; return False where no kernel supports the blocks or the dtype."""
    largest, device = max(place.unit for place in places), next(iter(given.values()))[0].device
    parts = [given.get(name) for name in ("payload", "moved", "again")]
    any_parts = next(part for part in parts if part is not None)
    scale, moved, again = (any_parts if part is None else part for part in parts)
    if largest > LARGEST or n > MOST_ROWS or dtype not in DTYPES or any_parts[0].dtype != torch.float32:
        return False
    block = max(16, triton.next_power_of_2(largest))
    many = max(1, ELEMENTS // block)
    lists = [[each.contiguous() for each in given.get(name, ())] for name in ("x", "residual", "following")]
    addresses = [[each.data_ptr() for each in leaves] or [0] * len(places) for leaves in lists]
    entries = zip(addresses[0], places, *addresses[1:], strict=True)
    table = tuple(number for leaf, place, *residuals in entries for number in (leaf, *place, *residuals))
    leaves_on_device = on_device(table, lambda: table, torch.int64, device)
    tiles = on_device((places, many), lambda: _tiles(places, many), torch.int32, device)
    strides = [[part.stride(0) for part in each] for each in (scale, moved)]
    by_inverse = not device_of(device).divides_lists_alike
    is_kept = tiles if nonfinite is None else nonfinite.to(device).view(torch.uint8)
    launched: Any = kernel
    launched[tiles.numel() // 2, 1 if what == "reduce_leaves" else n](
        leaves_on_device, tiles, *scale, *strides[0], *moved, *strides[1], *again, rank, ranks,
        decay, is_kept, n, what, by_inverse, DTYPES[dtype], block, bits, many, **UNFUSED,
    )  # fmt: skip
    return True


def encode(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor] | None:
    """Return scales `[..., blocks]` and bytes `[..., blocks, block * bits / 8]` of `x: [..., n]`."""
    if not x.numel():
        return None
    scale = x.new_empty((*x.shape[:-1], -(-x.shape[-1] // block)), dtype=torch.float32)
    q = x.new_empty((*scale.shape, -(-block * bits // 8)), dtype=torch.int8 if bits == 8 else torch.uint8)
    return (scale, q) if _run_one("encode_leaves", bits, block, x, [scale, q]) else None


def decode(scale: Tensor, q: Tensor, bits: int, block: int, n: int) -> Tensor | None:
    """Return `[..., n]` in float32."""
    x = scale.new_empty((*scale.shape[:-1], n))
    return x if q.numel() and _run_one("decode_leaves", bits, block, x, [scale, q]) else None


def _run_one(what: str, bits: int, block: int, x: Tensor, parts: Sequence[Tensor]) -> bool:
    """Run an operation on the rows of one tensor; on all of it as one row if no block is short."""
    width = x.numel() if x.shape[-1] % block == 0 else x.shape[-1]
    rows = x.numel() // width
    given = {"x": [x], "payload": [part.reshape(rows, -1) for part in parts]}
    return run(what, bits, (Place(x.numel(), width, block, 0, 0),), given, rows, x.dtype)
