"""Triton's kernel that keeps memory: it copies old or new tensors of a list, by a flag on the device, where needed."""

# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportGeneralTypeIssues=false

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from fnddp.kernels.blocks import first_blocks
from fnddp.kernels.constants import on_device

ELEMENTS = 16384  # of a program
BLOCK = tl.constexpr(1024)  # of them, at a time
FIELDS = tl.constexpr(11)  # of a tensor in a table: see `run`
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def kernel(table, tiles, found, WORD: tl.constexpr, ELEMENTS: tl.constexpr):
    tile = tiles + 2 * tl.program_id(0)
    entry = table + tl.load(tile).to(tl.int64) * FIELDS
    is_old = (tl.load(found) != 0).to(tl.int64)
    source, to = tl.load(entry + is_old), tl.load(entry + 2)
    if source != to:
        count, width, strides = tl.load(entry + 3), tl.load(entry + 4), entry + 5 + 2 * is_old
        first = tl.load(tile + 1).to(tl.int64) * ELEMENTS
        for begin in range(0, ELEMENTS, BLOCK):
            at = first + begin + tl.arange(0, BLOCK)
            row, column = at // width, at % width
            read = source.to(tl.pointer_type(WORD)) + row * tl.load(strides) + column * tl.load(strides + 1)
            write = to.to(tl.pointer_type(WORD)) + row * tl.load(entry + 9) + column * tl.load(entry + 10)
            tl.store(write, tl.load(read, at < count), at < count)


def run(old: Sequence[Tensor], new: Sequence[Tensor], found: Tensor, out: Sequence[Tensor]) -> bool:
    """Write `old` to `out` if `found` is true, otherwise `new`; return False for layouts without a kernel.

    A tensor is a matrix for the kernel, whose entry of a table has its addresses (new, old, out), its number of
    elements and of columns, and the strides of rows and of columns of each of the three.
    """
    entries: list[tuple[int, ...]] = []
    for three in zip(new, old, out, strict=True):
        dims = _joined(three)
        if len(dims) > 2 or any(each.dtype != out[0].dtype for each in three) or out[0].itemsize not in WORDS:
            return False
        (_, *rows), (width, *columns) = [(1, 0, 0, 0), *dims][-2:]
        strides = [stride for pair in zip(rows, columns, strict=True) for stride in pair]
        entries.append((*(each.data_ptr() for each in three), three[0].numel(), width, *strides))
    device, counts = out[0].device, tuple(entry[3] for entry in entries)

    table = tuple(number for entry in entries for number in entry)
    entries_on_device = on_device(table, lambda: table, torch.int64, device)
    blocks = [-(-n // ELEMENTS) for n in counts]
    tiles = on_device(("keep", counts), lambda: first_blocks(blocks, 1), torch.int32, device)
    launched, grid = cast(Any, kernel), (tiles.numel() // 2,)
    if grid[0]:
        launched[grid](entries_on_device, tiles, found.view(torch.uint8), WORDS[out[0].itemsize], ELEMENTS)
    return True


def _joined(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return size and strides of each dimension of tensors of one shape; dimensions are joined where all can be."""
    first = tensors[0]
    dims = [(n, *(each.stride(i) for each in tensors)) for i, n in enumerate(first.shape) if n != 1]
    found: list[tuple[int, ...]] = []
    for n, *strides in sorted(dims, key=lambda dim: dim[1:], reverse=True):
        if found and all(outer == n * inner for outer, inner in zip(found[-1][1:], strides, strict=True)):
            found[-1] = (found[-1][0] * n, *strides)
        else:
            found.append((n, *strides))
    return found or [(1, 0, 0, 0)]
