"""Top-k: the largest elements, as values and indices."""

from typing import ClassVar

from torch import Tensor

from fnddp.codecs.packing import block_size, in_blocks, pack_indices, unpack_indices
from fnddp.core.codec import Codec, Payload, takes_averages
from fnddp.core.options import Share, at_least, require_share
from fnddp.core.sync import Sync, transform


@transform
class topk(Codec):
    """Send the largest elements of each row, or of each chunk of it, and zeros for all others.

    Biased, a contraction by 1 - k / n: wrap it in `error_feedback`. The wrong choice for dense gradients at small
    ratios without memory, on links above a few Gbit/s (finding the largest costs tens of copies), and over `allgather`
    on many ranks, of which each receives all payloads.

    Indices travel as int16 for up to 32,768 elements, else as int32; for chunks of 4,096, of an even k, as 12 bits.
    A row shorter than k, or than a chunk, is sent whole or padded. Ties and NaN are chosen as `torch.topk` does.

    Args:
        ratio: The fraction of elements to keep, in (0, 1], at least one; or
        k: how many elements to keep of each row or chunk. Exactly one of both.
        chunk: Elements among which the largest are found; None for the row: a leaf, or a rank's part of it.

    Source: Aji and Heafield, EMNLP 2017; chunks as in SparseLoCo (arXiv 2603.08163), 64 of 4,096.

    >>> import torch
    >>> from fnddp import allgather
    >>> grads = {"w": torch.tensor([3.0, -1.0, 0.5, -4.0])}
    >>> topk(allgather, ratio=0.5)(grads, ())[0]
    {'w': tensor([ 3.,  0.,  0., -4.])}
    """

    inner: Sync
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
        # An average inside is of the first ones: in a chunk of fewer than k, zeros that pad it are to be the last.
        indices = chunks.abs().topk(k, sorted=takes_averages(self.inner)).indices
        return {"values": chunks.gather(-1, indices), "indices": pack_indices(indices, chunk)}

    def lengths(self, n: int, length: Tensor) -> dict[str, Tensor]:
        chunk, k = self._sizes(n)
        return {"values": length // chunk * k + (length % chunk).clamp(max=k)}

    def decode(self, payload: Payload, n: int) -> Tensor:
        chunk, _ = self._sizes(n)
        values, indices = payload["values"], unpack_indices(payload["indices"])
        chunks = values.new_zeros((*values.shape[:2], chunk)).scatter(-1, indices, values)
        return chunks.flatten(1)[:, :n]

    def _sizes(self, n: int) -> tuple[int, int]:
        chunk = block_size(self.chunk, n)
        return chunk, Share(self.ratio, self.k).of(chunk)
