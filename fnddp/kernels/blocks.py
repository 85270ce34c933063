"""Triton's kernels of codecs on the blocks of many leaves: each element is read once and written once.

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

from fnddp.core.codec import Form
from fnddp.device import device_of
from fnddp.kernels.constants import INT8_BLOCK, on_device
from fnddp.kernels.formats import FORMATS, divided, encoded_in_int8

ELEMENTS = 1024  # of a program
LARGEST = 4096  # elements of a block
ROWS_IN_INT8 = 4  # blocks of residuals in int8 of a program
INT8 = tl.constexpr(INT8_BLOCK)
MOST_ROWS = 65535  # of a launch: its second dimension
FIELDS = tl.constexpr(11)  # of a leaf in a table: its address, those of `Place`, those of residuals and their scales
UNFUSED: Any = {"enable_fp_fusion": False}
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Place(NamedTuple):
    """The blocks of a leaf of `count` elements in each row of a payload, from `width` elements of the leaf.

    `unit` is the size of a block; `block` and `byte` are the first block and the first byte of codes in the row; `key`
    is the key of its random numbers.
    """

    count: int
    width: int
    unit: int
    block: int
    byte: int
    key: int = 0


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
def _counter(table, tiles, row, rank, step, element):
    """Return the words that become the random numbers of elements in a row of a payload: see `fnddp.core.random`."""
    tile = tiles + 2 * tl.program_id(0)
    entry, block = table + tl.load(tile).to(tl.int64) * FIELDS, tl.load(tile + 1).to(tl.int64)
    width, unit = tl.load(entry + 2), tl.load(entry + 3)
    first = (row * ((width + unit - 1) // unit) + block) * unit + tl.load(entry + 6)
    return (first + rank.to(tl.int64) * 0x85EBCA6B + tl.load(step) * 0x9E3779B9).to(tl.int32) + element


@triton.jit
def _packed(code, BLOCK: tl.constexpr, BITS: tl.constexpr, MANY: tl.constexpr):
    """Return integers `[MANY, BLOCK]` as bytes."""
    if BITS != 8:
        low = tl.reshape(code & (2**BITS - 1), (MANY, BLOCK * BITS // 8, 8 // BITS))
        code = tl.sum(low << (tl.arange(0, 8 // BITS) * BITS)[None, None, :], 2)
    return code


@triton.jit
def _unpacked(code, BLOCK: tl.constexpr, BITS: tl.constexpr, MANY: tl.constexpr):
    """Return bytes as integers `[MANY, BLOCK]` with a sign."""
    code = code.to(tl.int32)
    if BITS != 8:
        code = code[:, :, None] >> (tl.arange(0, 8 // BITS) * BITS)[None, None, :]
        code = tl.reshape(code, (MANY, BLOCK))
    return (code << (32 - BITS)) >> (32 - BITS)


@triton.jit
def _added(
    scale, q, scales, bytes, at, is_at, byte, is_byte, N: tl.constexpr, DECODE: tl.constexpr, BLOCK: tl.constexpr,
    BITS: tl.constexpr, MANY: tl.constexpr, SCALE: tl.constexpr, OPTION: tl.constexpr,
):  # fmt: skip
    """Return the sum of the blocks of `N` rows, in the order of rows."""
    code = _unpacked(tl.load(q + byte, is_byte, 0), BLOCK, BITS, MANY)
    total = DECODE(tl.load(scale + at, is_at, 0), code, BITS, SCALE, OPTION)
    for _ in range(1, N):
        scale += scales
        q += bytes
        code = _unpacked(tl.load(q + byte, is_byte, 0), BLOCK, BITS, MANY)
        total += DECODE(tl.load(scale + at, is_at, 0), code, BITS, SCALE, OPTION)
    return total


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


@triton.jit
def _load_int8(entry, first, element, is_element):
    """Return the elements of a residual in int8, which has a scale for each block: see `fnddp.kernels.int8`."""
    size = _size_of_int8(tl.load(entry + 1))
    q = tl.load(tl.load(entry + 7).to(tl.pointer_type(tl.int8)) + first + element, is_element, 0).to(tl.float32)
    block = (((first % size).to(tl.int32) + element) // size.to(tl.int32)).to(tl.int64)
    scale = tl.load(entry + 9).to(tl.pointer_type(tl.float32)) + first // size
    return q * tl.load(scale + block, is_element, 0.0)


@triton.jit
def _size_of_int8(count):
    blocks = (count + INT8 - 1) // INT8
    return (count + blocks - 1) // blocks


@triton.jit(do_not_specialize=["rank", "ranks", "decay"])
def residual_in_int8(
    table, tiles, scale, q, scales, bytes, moved, q_moved, moves, bytes_moved, again, q_again, rank, ranks, decay,
    nonfinite, N: tl.constexpr, BY_INVERSE: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
    SCALE: tl.constexpr, OPTION: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """Do `residual_leaves` for blocks of residuals in int8, of which elements may be in any blocks of the codec."""
    tile = tiles + 2 * tl.program_id(0)
    entry, block = table + tl.load(tile).to(tl.int64) * FIELDS, tl.load(tile + 1).to(tl.int64)
    count, width, unit = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    size = _size_of_int8(count)
    at, inside = tl.arange(0, ROWS), tl.arange(0, INT8)
    first, size = block * size, size.to(tl.int32)
    element = at[:, None] * size + inside[None, :]
    left = tl.minimum(count - first, 1 << 30).to(tl.int32)
    is_element, is_at = (inside[None, :] < size) & (element < left), at * size < left
    # The place of each element in the payload, with offsets of 32 bits from the first one.
    begin = first % width
    ahead, turn = tl.minimum(width - begin, 1 << 30).to(tl.int32), tl.minimum(width, 1 << 30).to(tl.int32)
    unit = unit.to(tl.int32)
    is_first, later = element < ahead, element - ahead
    column = tl.where(is_first, (begin % unit).to(tl.int32) + element, later % turn)
    row = first // width + tl.where(is_first, 0, 1 + later // turn)
    number = tl.where(is_first, begin // unit, 0) + column // unit
    bit = column % unit * BITS
    of_scale = tl.load(entry + 4) + number
    byte, shift = tl.load(entry + 5) + number * ((unit * BITS + 7) // 8) + bit // 8, bit % 8
    scale, q, is_own = scale + row * scales, q + row * bytes, is_element & (row == rank)
    value = _decoded(scale + of_scale, q + byte, shift, is_element, DECODE, BITS, SCALE, OPTION)
    total = _decoded(moved + of_scale, q_moved + byte, shift, is_own, DECODE, BITS, SCALE, OPTION)
    for _ in range(1, N):
        moved += moves
        q_moved += bytes_moved
        total += _decoded(moved + of_scale, q_moved + byte, shift, is_own, DECODE, BITS, SCALE, OPTION)
    lost = _decoded(again + of_scale, q_again + byte, shift, is_own, DECODE, BITS, SCALE, OPTION)
    value += tl.where(is_own, (lost - divided(total, ranks, BY_INVERSE)) * ranks, 0.0)
    x = _load(entry, first, element, is_element, DTYPE)
    value = x + decay * _load_int8(entry, first, element, is_element) - _rounded(value, DTYPE)
    made, code = encoded_in_int8(tl.where(is_element, value, 0.0), BY_INVERSE)
    if tl.load(nonfinite) != 0:
        code = tl.load(tl.load(entry + 7).to(tl.pointer_type(tl.int8)) + first + element, is_element, 0)
        made = tl.load(tl.load(entry + 9).to(tl.pointer_type(tl.float32)) + block + at, is_at, 0.0)
    tl.store(tl.load(entry + 8).to(tl.pointer_type(tl.int8)) + first + element, code, is_element)
    tl.store(tl.load(entry + 10).to(tl.pointer_type(tl.float32)) + block + at, made, is_at)


@triton.jit
def _decoded(
    scale, q, shift, is_element, DECODE: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, OPTION: tl.constexpr
):
    """Return elements of a payload, each with its own addresses."""
    size: tl.constexpr = shift.shape[0] * shift.shape[1]
    code = (tl.load(q, is_element, 0).to(tl.int32) >> shift) << (32 - BITS) >> (32 - BITS)
    scales = tl.reshape(tl.load(scale, is_element, 0), (size,))
    value = DECODE(scales, tl.reshape(code, (size, 1)), BITS, SCALE, OPTION)
    return tl.reshape(value, shift.shape)


@triton.jit(do_not_specialize=["rank", "ranks", "decay"])
def kernel(
    table, tiles, scale, q, scales, bytes, moved, q_moved, moves, bytes_moved, again, q_again, step, rank, ranks,
    decay, nonfinite, N: tl.constexpr, WHAT: tl.constexpr, BY_INVERSE: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK: tl.constexpr, MANY: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, OPTION: tl.constexpr,
    DRAWS: tl.constexpr, IN_INT8: tl.constexpr, ENCODE: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """Do one of the operations of `fnddp.kernels.leaves`; rows of payloads are `scales` and `bytes` elements apart.

    encode: leaves to `scale` and `q`. reduce: the `N` rows of `moved`, which ranks sent to `rank`, to their mean,
    encoded `again`. decode: `scale` and `q` to leaves. sent: the same, with `ranks` times the loss of `again`.
    encode_sum: encode, with `decay` times a residual added. residual: that sum less sent, or the old residual.
    """
    row = tl.program_id(1).to(tl.int64)
    in_payload = row  # the row that is encoded
    if WHAT == "reduce_leaves":
        row += rank
    entry, begin, element, is_element, at, is_at, byte, is_byte = _places(table, tiles, row, BLOCK, BITS, MANY)
    scale, moved, again = scale + row * scales + begin[1], moved + begin[1], again + begin[1]
    q, q_moved, q_again = q + row * bytes + begin[2], q_moved + begin[2], q_again + begin[2]
    counter = element
    if DRAWS:
        counter = _counter(table, tiles, in_payload, rank, step, element)
    if WHAT == "encode_leaves" or WHAT == "encode_sum_leaves" or WHAT == "reduce_leaves":
        if WHAT != "reduce_leaves":
            to, q_to = scale, q
            value = _load(entry, begin[0], element, is_element, DTYPE)
            if WHAT == "encode_sum_leaves":
                if IN_INT8:
                    value += decay * _load_int8(entry, begin[0], element, is_element)
                else:
                    value += decay * _load(entry + 7, begin[0], element, is_element, tl.float32)
                value = _rounded(value, DTYPE)
        else:
            to, q_to = again, q_again
            value = _added(
                moved, q_moved, moves, bytes_moved, at, is_at, byte, is_byte, N, DECODE, BLOCK, BITS, MANY, SCALE,
                OPTION,
            )  # fmt: skip
            value = _rounded(tl.where(is_element, divided(value, ranks, BY_INVERSE), 0.0), DTYPE)
        made, code = ENCODE(value, counter, BITS, SCALE, OPTION, BY_INVERSE)
        if SCALE != "none":
            tl.store(to + at, made.to(to.dtype.element_ty), is_at)
        tl.store(q_to + byte, _packed(code, BLOCK, BITS, MANY).to(q_to.dtype.element_ty), is_byte)
    else:
        value = _added(
            scale, q, 0, 0, at, is_at, byte, is_byte, 1, DECODE, BLOCK, BITS, MANY, SCALE, OPTION
        )  # fmt: skip
        if WHAT == "sent_leaves" or WHAT == "residual_leaves":
            lost = tl.zeros_like(value)
            if row == rank:
                total = _added(
                    moved, q_moved, moves, bytes_moved, at, is_at, byte, is_byte, N, DECODE, BLOCK, BITS, MANY, SCALE,
                    OPTION,
                )  # fmt: skip
                lost = _added(
                    again, q_again, 0, 0, at, is_at, byte, is_byte, 1, DECODE, BLOCK, BITS, MANY, SCALE, OPTION
                )  # fmt: skip
                lost = (lost - divided(total, ranks, BY_INVERSE)) * ranks
            value += lost
        if WHAT == "residual_leaves":
            before = _load(entry + 7, begin[0], element, is_element, tl.float32)
            total = _load(entry, begin[0], element, is_element, DTYPE) + decay * before
            value = tl.where(tl.load(nonfinite) != 0, before, total - _rounded(value, DTYPE))
            _store(entry + 8, begin[0], element, value, is_element, tl.float32)
        else:
            _store(entry, begin[0], element, value, is_element, DTYPE)


def first_blocks(blocks: Sequence[int], many: int) -> list[int]:
    """Return for each program its leaf, and the first of its `many` blocks; leaves have `blocks` each."""
    return [at for leaf, n in enumerate(blocks) for first in range(0, n, many) for at in (leaf, first)]


def blocks_of(block: int) -> int:
    """Return the number of blocks of a program; small blocks are fewer, because their scales take registers."""
    return max(1, ELEMENTS // max(block, 64))


def run(
    what: str, form: Form, places: tuple[Place, ...], given: Mapping[str, Sequence[Tensor]], n: int,
    dtype: torch.dtype, *, rank: int = 0, ranks: int = 1, step: Tensor | None = None, decay: float = 1.0,
    nonfinite: Tensor | None = None,
) -> bool:  # fmt: skip
    """Run an operation on lists of tensors by name; return False where no kernel supports the blocks or the dtype.

    `step` counts exchanges, for random numbers.
    """
    largest, device = max(place.unit for place in places), next(iter(given.values()))[0].device
    if largest > LARGEST or n > MOST_ROWS or dtype not in DTYPES:
        return False
    parts = [given.get(name) for name in ("payload", "moved", "again")]
    any_parts = next(part for part in parts if part is not None)
    # A payload without scales has codes alone.
    scale, moved, again = ((part[0], part[-1]) for part in (any_parts if part is None else part for part in parts))
    block = max(16, triton.next_power_of_2(largest))
    many = blocks_of(block)
    in_int8, m = bool(given.get("factor")), len(places)
    following = given.get("following", ())
    leaves = given.get("x", ()), given.get("residual", ()), following[:m], given.get("factor", ()), following[m:]
    lists = [[each.contiguous() for each in of] for of in leaves]
    addresses = [[each.data_ptr() for each in of] or [0] * m for of in lists]
    entries = zip(addresses[0], places, *addresses[1:], strict=True)
    table = tuple(number for leaf, place, *residuals in entries for number in (leaf, *place, *residuals))
    leaves_on_device = on_device(table, lambda: table, torch.int64, device)
    tiles = on_device(
        (places, many), lambda: first_blocks([-(-p.width // p.unit) for p in places], many), torch.int32, device
    )
    strides = [[part.stride(0) for part in each] for each in (scale, moved)]
    by_inverse = not device_of(device).divides_lists_alike
    is_kept = tiles if nonfinite is None else nonfinite.to(device).view(torch.uint8)
    any_kernel: Any = kernel
    if in_int8 and what == "residual_leaves":
        any_kernel = residual_in_int8
        sizes = tuple(factor.numel() for factor in given["factor"])
        tiles = on_device((sizes, "int8"), lambda: first_blocks(sizes, ROWS_IN_INT8), torch.int32, device)
        any_kernel[(tiles.numel() // 2,)](
            leaves_on_device, tiles, *scale, *strides[0], *moved, *strides[1], *again, rank, ranks, decay, is_kept, n,
            by_inverse, DTYPES[dtype], ROWS_IN_INT8, *form[1:], FORMATS[form.codec][1], **UNFUSED,
        )  # fmt: skip
        return True
    any_kernel[tiles.numel() // 2, 1 if what == "reduce_leaves" else n](
        leaves_on_device, tiles, *scale, *strides[0], *moved, *strides[1], *again, tiles if step is None else step,
        rank, ranks, decay, is_kept, n, what, by_inverse, DTYPES[dtype], block, many, *form[1:], step is not None,
        in_int8, *FORMATS[form.codec], **UNFUSED,
    )  # fmt: skip
    return True


def encode(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor] | None:
    """Return scales `[..., blocks]` and bytes `[..., blocks, block * bits / 8]` of `quantize`, of `x: [..., n]`."""
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
    return run(what, Form("quantize", bits), (Place(x.numel(), width, block, 0, 0),), given, rows, x.dtype)
