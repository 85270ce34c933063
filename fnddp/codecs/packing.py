"""Packing of small integers, signs and indices into bytes, and splitting of rows into blocks, for codecs."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fnddp.core.opaque import product, shortened
from fnddp.torch_private import reinterpreted

# Numbers that will share a byte are the bytes of one word, so that one product packs them.
_WORDS = {4: torch.int16, 2: torch.int32}
_LOWEST = {4: 0x0F0F, 2: 0x03030303}
# Factors that move the numbers of a word side by side into its highest byte, without carries.
_PACK = {4: 1 << 8 | 1 << 4, 2: 1 << 24 | 1 << 18 | 1 << 12 | 1 << 6}

_INTEGERS = {16: torch.int16, 32: torch.int32, 64: torch.int64}

# For bits, in words of eight bytes.
_ONES = 0x0101010101010101
_GATHER = 0x0102040810204080  # a factor: moves the lowest bits of all bytes into the highest byte
_DIAGONAL = 0x8040201008040201 - (1 << 64)
_BELOW_TOP = 0x7F7F7F7F7F7F7F7F  # a term: carries into the highest bit of each byte that is not 0

INDEX_DTYPES = {"small": None, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64}


def block_size(block: int | None, n: int) -> int:
    """Return the number of elements of a block in rows of `n`: `n` if `block` is None or larger."""
    return min(n, block or n)


def blocks_of(length: Tensor, block: int | None, n: int) -> Tensor:
    """Return the number of blocks that hold the first `length` elements of a row of `n`.

    >>> blocks_of(torch.tensor([[5], [0]]), 4, 12)
    tensor([[2],
            [0]])
    """
    return -(-length // block_size(block, n))


def in_blocks(x: Tensor, block: int | None) -> Tensor:
    """Return rows in blocks, the last one padded with zeros: `[..., n]` becomes `[..., blocks, block]`.

    >>> in_blocks(torch.tensor([[1, 2, 3]]), 2)
    tensor([[[1, 2],
             [3, 0]]])
    """
    size = block_size(block, x.shape[-1])
    missing = -x.shape[-1] % size
    return (pad(x, (0, missing)) if missing else x).unflatten(-1, (-1, size))


def inverse(scale: Tensor) -> Tensor:
    """Return 1 / `scale`, or 0 for zero and subnormal scales: multiplying takes a third of the time of dividing.

    >>> inverse(torch.tensor([4.0, 0.0]))
    tensor([0.2500, 0.0000])
    """
    return torch.where(scale < torch.finfo(scale.dtype).tiny, 0, scale.reciprocal())


def pack(q: Tensor, bits: int) -> Tensor:
    """Pack integers of 8, 4, 2 or 1 bits in two's complement, 8 / `bits` to a byte: `[..., ceil(n bits / 8)]`.

    For 3 bits, the lower two bits of all integers are packed first, then their signs.

    >>> pack(torch.tensor([1, -1, 0, 1], dtype=torch.int8), bits=2)
    tensor([77], dtype=torch.uint8)
    """
    if bits == 8:
        return q
    if bits == 3:
        return torch.cat([pack(q, 2), pack_bits(torch.bitwise_right_shift(q, 2))], -1)
    if bits == 1:
        return pack_bits(q)
    # Not `>>`: its out= form makes new memory in each step, and copies.
    words = product(reinterpreted(_padded(q, 8 // bits), _WORDS[bits]) & _LOWEST[bits], _PACK[bits])
    return torch.bitwise_right_shift(words, 8 * words.element_size() - 8).to(torch.uint8)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """Return the inverse of `pack`: `[..., n]`.

    >>> unpack(torch.tensor([77], dtype=torch.uint8), bits=2, n=3)
    tensor([ 1, -1,  0], dtype=torch.int8)
    """
    if bits == 8:
        return packed
    if bits == 3:
        lower, signs = packed.split([-(-n // 4), -(-n // 8)], -1)
        return unpack(lower, 2, n) & 3 | unpack(signs, 1, n) * 4
    if bits == 1:
        return -reinterpreted(unpack_bits(packed, n), torch.int8)
    words = packed.to(_WORDS[bits])
    # Each number to the top of its byte, and back: a right shift of a signed number keeps its sign.
    if bits == 4:
        spread = torch.add(words * 16, words & 0xF0, alpha=240)
    else:
        pairs = words * (1 << 6 | 1 << 18) & 0x03C003C0
        spread = product(pairs, 1 | 1 << 6) & 0xC0C0C0C0 - (1 << 32)
    return shortened(torch.bitwise_right_shift(reinterpreted(spread, torch.int8), 8 - bits), n)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack the lowest bits of bytes, `[..., n]`, as one bit each: `[..., ceil(n / 8)]`, the first one lowest.

    >>> pack_bits(torch.tensor([1, 0, -1], dtype=torch.int8))
    tensor([5], dtype=torch.uint8)
    """
    eights = reinterpreted(_padded(bits, 8), torch.int64) & _ONES
    return torch.bitwise_right_shift(eights * _GATHER, 56).to(torch.uint8)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """Return the inverse of `pack_bits`, zeros and ones: `[..., n]`.

    >>> unpack_bits(torch.tensor([5], dtype=torch.uint8), 3)
    tensor([1, 0, 1], dtype=torch.uint8)
    """
    eights = packed.to(torch.int64) * _ONES & _DIAGONAL  # bit i in byte i
    return shortened(reinterpreted(torch.bitwise_right_shift(eights + _BELOW_TOP, 7) & _ONES, torch.uint8), n)


def is_negative(x: Tensor) -> Tensor:
    """Return -1 in int8 where the sign bit is set, also of -0.0 and some NaN, else 0. (Comparing takes 4 times longer.)

    >>> is_negative(torch.tensor([2.0, -3.0]))
    tensor([ 0, -1], dtype=torch.int8)
    """
    bits = 8 * x.element_size()
    return torch.bitwise_right_shift(reinterpreted(x.contiguous(), _INTEGERS[bits]), bits - 1).to(torch.int8)


def _padded(q: Tensor, multiple: int) -> Tensor:
    missing = -q.shape[-1] % multiple
    return pad(q, (0, missing)) if missing else q.contiguous()


def pack_indices(indices: Tensor, among: int, dtype: str = "small") -> Tensor:
    """Pack indices below `among`: in the fewest of 16, 32 and 64 bits; in 12 if `among` is 4,096 and their number even.

    Two of 12 bits are three bytes: `[..., k]` becomes `[..., k / 2, 3]`. `dtype` may be one of `INDEX_DTYPES` instead.

    >>> pack_indices(torch.tensor([1, 4095]), 4096)
    tensor([[  0,  31, 255]], dtype=torch.uint8)
    >>> pack_indices(torch.tensor([1, 4095]), 4097)
    tensor([   1, 4095], dtype=torch.int16)
    """
    chosen = INDEX_DTYPES[dtype]
    if chosen is not None:
        return indices.to(chosen)
    if among == 1 << 12 and indices.shape[-1] % 2 == 0:
        first, second = indices[..., 0::2], indices[..., 1::2]
        return torch.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], -1).to(torch.uint8)
    return indices.to(next(dtype for bits, dtype in _INTEGERS.items() if among <= 1 << bits - 1))


def unpack_indices(packed: Tensor) -> Tensor:
    """Return the inverse of `pack_indices`, in int64.

    >>> unpack_indices(torch.tensor([[0, 31, 255]], dtype=torch.uint8))
    tensor([   1, 4095])
    """
    if packed.dtype != torch.uint8:
        return packed.long()
    high, middle, low = packed.long().unbind(-1)
    return torch.stack([high << 4 | middle >> 4, (middle & 15) << 8 | low], -1).flatten(-2)
