"""Signs: one bit an element, and a scale."""

from typing import ClassVar

import torch
from torch import Tensor

from fnddp.codecs.packing import block_size, blocks_of, in_blocks, is_negative, pack_bits, unpack_bits
from fnddp.core.codec import Codec, Payload, wide
from fnddp.core.options import Limit, one_of
from fnddp.core.sync import Sync, transform


@transform
class sign(Codec):
    """Send the sign of each element, eight in a byte, and one scale a row.

    With the mean magnitude as its scale it is a contraction by 1 - ||x||_1^2 / (n ||x||_2^2), which needs
    `error_feedback`; the largest magnitude is no contraction. Zeros count as positive. The wrong choice without memory,
    and for rows of very different elements: put it on single leaves, or on blocks of `chunk` elements.

    Args:
        inner: The carrier, or a codec around one, which encodes the scales.
        scale: "mean" magnitude, "max", or "none": plain signs, of magnitude 1 (signSGD).
        chunk: Elements that share a scale, a multiple of 8; None for the row: a leaf, or a rank's part of it.

    Shapes: bits `[rows, chunks, ceil(chunk / 8)]`, scales `[rows, chunks]` in float32 or wider.

    Source: Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019, Algorithm 1.

    >>> from fnddp import allgather
    >>> sign(allgather)({"w": torch.tensor([3.0, -1.0, 0.5, -4.0])}, ())[0]
    {'w': tensor([ 2.1250, -2.1250,  2.1250, -2.1250])}
    """

    inner: Sync
    scale: str = "mean"
    chunk: int | None = None

    averages = True
    limits: ClassVar = {
        "scale": one_of("mean", "max", "none"),
        "chunk": Limit(lambda chunk: chunk > 0 and chunk % 8 == 0, "a positive multiple of 8"),
    }

    @property
    def has_fractions(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.scale != "none"

    def encode(self, x: Tensor, length: Tensor | None = None) -> Payload:
        chunks = in_blocks(x, self.chunk)
        chunk = chunks.shape[2]
        payload = {"bits": pack_bits(is_negative(chunks))}
        if self.scale == "max":
            payload["scale"] = torch.maximum(chunks.amax(-1), -chunks.amin(-1)).to(wide(x.dtype))
        elif self.scale == "mean":
            # Padding of a row or its last chunk is none of its elements.
            left = (x.shape[1] if length is None else length) - chunk * torch.arange(chunks.shape[1], device=x.device)
            payload["scale"] = chunks.to(wide(x.dtype)).abs().sum(-1) / left.clamp(1, chunk)
        return payload

    def lengths(self, n: int, length: Tensor) -> dict[str, Tensor]:
        return {"scale": blocks_of(length, self.chunk, n)}

    def decode(self, payload: Payload, n: int) -> Tensor:
        negative = unpack_bits(payload["bits"], block_size(self.chunk, n))  # [rows, chunks, chunk]
        if self.scale == "none":
            return (1 - 2.0 * negative).flatten(1)[:, :n]
        scale = payload["scale"].unsqueeze(-1)
        return (negative.to(scale.dtype) * (-2 * scale) + scale).flatten(1)[:, :n]
