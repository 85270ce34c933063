"""The largest elements, or the largest coefficients of a cosine transform, as values and indices."""

import math
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from fnddp.codecs.packing import INDEX_DTYPES, block_size, blocks_of, in_blocks, pack_indices, unpack_indices
from fnddp.core import tree
from fnddp.core.codec import Carrying, Codec, Layer, Payload, takes_averages, wide
from fnddp.core.layout import in_format_of
from fnddp.core.opaque import rounded, shortened
from fnddp.core.options import Share, at_least, one_of, require_share
from fnddp.core.sync import Exchange, State, all_in, transform
from fnddp.core.tree import Leaves, Tree
from fnddp.reducers.halves import to_all, to_owners
from fnddp.torch_private import reinterpreted


@transform
class topk(Codec):
    """Send the largest elements of each row, or of each chunk of a row, and zeros for all others.

    Biased, a contraction by 1 - k / n: wrap it in `error_feedback`. The wrong choice for dense gradients at small
    ratios without memory; on links above a few Gbit/s, because selection costs tens of copies; and over `allgather` on
    many ranks, because each rank receives all payloads.

    Indices are sent as int16 for up to 32,768 elements, else as int32; for chunks of 4,096 and an even k, in 12 bits. A
    row shorter than k, or than a chunk, is sent whole or padded. Ties and NaN are selected as by `torch.topk`.

    Args:
        ratio: The fraction of elements to keep, in (0, 1], at least one element. Give either `ratio` or `k`.
        k: Number of elements to keep of each row or chunk.
        chunk: Number of elements among which the largest are selected. None for a row: a leaf, or a rank's part of it.

    Source: Aji and Heafield, EMNLP 2017; chunks as in SparseLoCo (arXiv 2603.08163), 64 of 4,096.

    >>> from fnddp import allgather
    >>> grads = {"w": torch.tensor([3.0, -1.0, 0.5, -4.0])}
    >>> topk(allgather, ratio=0.5)(grads, ())[0]
    {'w': tensor([ 3.,  0.,  0., -4.])}
    """

    inner: Carrying
    ratio: float | None = None
    k: int | None = None
    chunk: int | None = None

    limits: ClassVar = {"chunk": at_least(1)}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("topk", self.ratio, "k", self.k)

    def encode(self, x: Tensor) -> Payload:
        chunk, k = self._sizes(x.shape[1])
        chunks = in_blocks(x, chunk)
        # A codec inside averages only the first ones: zeros that pad a chunk of fewer than k must come last.
        indices = chunks.abs().topk(k, sorted=takes_averages(self.inner)).indices
        return {"values": chunks.gather(-1, indices), "indices": pack_indices(indices, chunk)}

    def lengths(self, n: int, length: Tensor) -> dict[str, Tensor]:
        chunk, k = self._sizes(n)
        return {"values": length // chunk * k + (length % chunk).clamp(max=k)}

    def decode(self, payload: Payload, n: int) -> Tensor:
        chunk, _ = self._sizes(n)
        values, indices = payload["values"], unpack_indices(payload["indices"])
        chunks = values.new_zeros((*values.shape[:2], chunk)).scatter(-1, indices, values)
        return shortened(chunks.flatten(1), n)

    def _sizes(self, n: int) -> tuple[int, int]:
        chunk = block_size(self.chunk, n)
        return chunk, Share(self.ratio, self.k).of(chunk)


@transform
class dct_topk(Codec):
    """Send the k largest coefficients of the two-dimensional DCT of each tile of a matrix.

    A leaf of shape `[n, ...]` is the matrix `[n, m]`. If it has at least `chunk` rows and columns, it is cut into
    square tiles, padded with zeros. Other leaves, and complex ones, are read as a row of numbers, and each chunk *
    chunk of them make a tile. Over `two_shot` a tile is cut where a rank's part ends: use `allgather`.

    Magnitudes are compared to 12 bits, and the first of equal ones are selected: coefficients of 16-bit numbers often
    differ only by rounding, and rounding varies between machines, and between simulated and real ranks.

    The transform is orthonormal, so this is a contraction by 1 - k / (numbers in a tile), like top-k: wrap it in
    `error_feedback`. DeMo's momentum is that residual: m = beta m + g, m -= sent, is `decay=beta`. The wrong choice for
    gradients with unrelated neighbours: `topk` is as good then, and saves 8 * chunk operations an element.

    Args:
        inner: The carrier, or a codec for the coefficients: `dct_topk(bf16(allgather))`.
        chunk: The side of a tile.
        k: Number of coefficients sent of each tile; all of a tile with fewer.
        index: "small": 12 bits for tiles of 4,096 numbers and even k, else int16 or int32; or the name of a torch
            integer dtype, "int16", "int32" or "int64" (as DeMo sends them).

    Source: Peng et al., "DeMo: decoupled momentum optimization", arXiv 2411.19870, Algorithm 1. Deviations: the mean is
    over all ranks, not over those that sent a coefficient; each index of a tile is written once, in any order, so that
    all ranks get the same bits; sides that `chunk` does not divide are padded, where DeMo takes the next divisor.

    >>> from fnddp import allgather
    >>> smooth = torch.outer(torch.ones(64), torch.linspace(-1, 1, 64))
    >>> mean, _ = dct_topk(allgather, k=4)({"w": smooth}, ())
    >>> bool((mean["w"] - smooth).norm() < 0.02 * smooth.norm())
    True
    """

    inner: Carrying
    chunk: int = 64
    k: int = 8
    index: str = "small"

    nests: ClassVar[Any] = frozenset({"inside"})  # tiles are cut from the leaves themselves
    limits: ClassVar = {"chunk": at_least(1), "k": at_least(1), "index": one_of(*INDEX_DTYPES)}

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen = INDEX_DTYPES[self.index]
        if chosen is not None and self.chunk**2 - 1 > torch.iinfo(chosen).max:
            raise ValueError(f"dct_topk: {self.index} cannot index the {self.chunk**2} numbers of a tile; use small")
        *_, carrier = all_in(self.inner)
        if isinstance(carrier, to_owners | to_all):
            raise TypeError(f"dct_topk: it needs whole matrices, but {carrier!r} gives each rank some rows; use topk")

    def init(self, grads: Tree) -> State:
        leaves, _ = tree.flatten(grads)
        return self.inner.init({path: self._tiled(leaf.detach()) for path, leaf in leaves.items()})

    def exchange(self, leaves: Leaves, state: State) -> Exchange:
        tiled = {path: self._tiled(leaf) for path, leaf in leaves.items()}
        done = self.inner.carry((Layer(self),), tiled, state)
        return done.decoded(lambda of: {path: self._untiled(of[path], leaf) for path, leaf in leaves.items()})

    def encode(self, x: Tensor) -> Payload:
        height, width = self._tile(x.shape[1])
        numbers = pad(x.to(wide(x.dtype)), (0, -x.shape[1] % (height * width)))
        tiles = rearrange(numbers, "rows (tiles h w) -> rows tiles h w", h=height, w=width)
        coefficients = (cosines(height, tiles) @ tiles @ cosines(width, tiles).mT).flatten(-2)
        indices = _ranked(coefficients.abs()).topk(min(self.k, height * width), sorted=False).indices
        return {
            "values": rounded(coefficients.gather(-1, indices) / _range(height, width), x.dtype),
            "indices": pack_indices(indices, height * width, self.index),
        }

    def lengths(self, n: int, length: Tensor) -> dict[str, Tensor]:
        height, width = self._tile(n)
        return {"values": blocks_of(length, height * width, n) * min(self.k, height * width)}

    def decode(self, payload: Payload, n: int) -> Tensor:
        height, width = self._tile(n)
        values = payload["values"].to(wide(payload["values"].dtype)) * _range(height, width)
        flat = values.new_zeros((*values.shape[:2], height * width))
        coefficients = flat.scatter(-1, unpack_indices(payload["indices"]), values).unflatten(-1, (height, width))
        tiles = cosines(height, values).mT @ coefficients @ cosines(width, values)
        return rearrange(tiles, "rows tiles h w -> rows (tiles h w)")[:, :n]

    def _tile(self, n: int) -> tuple[int, int]:
        width = min(self.chunk, n)
        return min(self.chunk, -(-n // width)), width

    def _is_tiled(self, leaf: Tensor) -> bool:
        if leaf.ndim < 2 or not leaf.is_floating_point() or not leaf.numel():
            return False
        return min(leaf.shape[0], leaf.numel() // leaf.shape[0]) >= self.chunk

    def _tiled(self, leaf: Tensor) -> Tensor:
        if not self._is_tiled(leaf):
            return leaf
        matrix = leaf.reshape(leaf.shape[0], -1)
        matrix = pad(matrix, (0, -matrix.shape[1] % self.chunk, 0, -matrix.shape[0] % self.chunk))
        return rearrange(matrix, "(y h) (x w) -> (y x) h w", h=self.chunk, w=self.chunk)

    def _untiled(self, tiles: Tensor, leaf: Tensor) -> Tensor:
        if not self._is_tiled(leaf):
            return tiles
        rows, columns = leaf.shape[0], leaf.numel() // leaf.shape[0]
        matrix = rearrange(tiles, "(y x) h w -> (y h) (x w)", y=-(-rows // self.chunk))
        return in_format_of(leaf, matrix[:rows, :columns].reshape(leaf.shape))


def _ranked(magnitudes: Tensor) -> Tensor:
    """Return integers that rank `magnitudes` by their first 12 bits, and equal ones by their position."""
    # The bits of floats that are not negative are in the order of the floats: the upper ones are rounded to nearest,
    # the lower ones replaced.
    as_ints, lower = (torch.int64, 41) if magnitudes.dtype == torch.float64 else (torch.int32, 12)
    upper = reinterpreted(magnitudes, as_ints) + (1 << lower - 1)
    places = magnitudes.shape[-1]
    place = torch.arange(places, dtype=torch.int64, device=magnitudes.device) * (1 << lower) // max(places, 1 << lower)
    return (upper | (1 << lower) - 1) - place.to(as_ints)


def _range(height: int, width: int) -> int:
    """Return the factor by which a coefficient may exceed the largest element and still fit float16: a power of 2."""
    return 1 << math.ceil(math.log2(height * width) / 2)


def cosines(n: int, like: Tensor) -> Tensor:
    """Return the orthonormal DCT-II of `n` numbers as a matrix, `[n, n]`: row f is a cosine of frequency f.

    >>> basis = cosines(4, torch.empty(0, dtype=torch.float64))
    >>> torch.allclose(basis @ basis.mT, torch.eye(4, dtype=torch.float64))
    True
    """
    frequency = torch.arange(n, dtype=torch.float64, device=like.device).unsqueeze(1)
    place = torch.arange(n, dtype=torch.float64, device=like.device) + 0.5
    basis = (math.pi / n * frequency * place).cos() * math.sqrt(2 / n)
    return torch.where(frequency == 0, math.sqrt(1 / n), basis).to(like.dtype)
