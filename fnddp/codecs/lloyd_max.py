"""Levels of a normal distribution: 1 to 4 bits for each element, and 8 for the scale of a block."""

from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fnddp.codecs.packing import block_size, in_blocks, inverse, is_negative, pack, unpack
from fnddp.core.codec import Carrying, Codec, Payload, wide
from fnddp.core.opaque import shortened
from fnddp.core.options import Limit
from fnddp.core.sync import transform
from fnddp.kernels.constants import on_device
from fnddp.kernels.operator import takes_operators
from fnddp.torch_private import reinterpreted

# Positive levels, by bits, of the quantizers with the least mean squared error for a standard normal distribution.
LEVELS = {
    1: (0.797885,),
    2: (0.45278, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.94234, 1.256231, 1.618046, 2.069017, 2.73259),
}
BETWEEN = {bits: [(lower + upper) / 2 for lower, upper in pairwise(levels)] for bits, levels in LEVELS.items()}
DROPPED = 20  # bits of a float32 after the first three of its fraction
SMALLEST = (127 << 3) - 255  # what is left of 1.0, the largest ratio of scales, becomes 255


@transform
class lloyd_max(Codec):
    """Round each element to the nearest of 2 ** bits levels, spaced for a normal distribution.

    For normal numbers 1 bit loses 0.363 of the variance, 2 bits 0.1175, 3 bits 0.0345 and 4 bits 0.0095. The evenly
    spaced levels of `quantize` lose about 0.59 (2 bits) and 0.014 (4 bits) in blocks of 128. It is biased, but
    its error is smaller than its input: wrap it in `error_feedback`. At 4 bits use `quantize` for gradients with few
    large elements, because these levels end below them, and for gradients with many zeros, because no level is 0: only
    blocks of zeros stay zeros.

    Each block is divided by its root mean square. The scale that multiplies its levels minimizes the squared error, and
    is sent in 8 bits (three of a fraction, five of an exponent), relative to the row's largest scale, a float32. A
    block with a scale of less than 2 ** -31.75 of the largest one becomes zeros.

    Args:
        inner: The carrier, or a codec for the largest scale of each row.
        bits: 1 to 4.
        block: Number of elements that share a scale, a multiple of 8. None for a row: a leaf, or a rank's part of it.

    Source: Max, "Quantizing for minimum distortion", IRE Transactions on Information Theory 6, 1960, table 1; Lloyd,
    "Least squares quantization in PCM", 1957 and 1982; for scales in 8 bits Dettmers et al., "QLoRA", arXiv 2305.14314,
    section 3. Deviation: the scale of a block is the factor that minimizes the error. For normal numbers it hardly
    differs from the root mean square.

    >>> from fnddp import allgather
    >>> lloyd_max(allgather, bits=2)({"w": torch.tensor([3.0, -3.0, 1.0, -1.0])}, ())[0]
    {'w': tensor([ 3.0277, -3.0277,  0.9076, -0.9076])}
    """

    inner: Carrying
    bits: Literal[1, 2, 3, 4] = 2
    block: int | None = 128

    limits: ClassVar = {"block": Limit(lambda block: block > 0 and block % 8 == 0, "a positive multiple of 8")}

    def encode(self, x: Tensor) -> Payload:
        blocks = in_blocks(x.to(wide(x.dtype)), self.block)
        count, size = blocks.shape[-2:]
        padding = (size * torch.arange(1, count + 1, device=x.device) - x.shape[-1]).clamp(min=0).to(blocks.dtype)
        # In float64: squares of float32 overflow and underflow. (torch 2.11 traces it wrongly without keepdim.)
        norm = torch.linalg.vector_norm(blocks, dim=-1, keepdim=True, dtype=torch.float64).squeeze(-1)
        rms = (norm / (size - padding).sqrt()).to(blocks.dtype)
        y = blocks * inverse(rms).unsqueeze(-1)
        levels, magnitude = LEVELS[self.bits], y.abs()
        q = torch.zeros_like(y, dtype=torch.int8)
        for end in BETWEEN[self.bits]:
            q = q + (magnitude > end)
        q = torch.bitwise_xor(q, is_negative(blocks))
        # Padding consists of zeros, is at the lowest level, and does not count.
        level = self._level(q, y.dtype)
        scale = rms * (y * level).sum(-1) / (level.square().sum(-1) - padding * levels[0] ** 2)
        largest = scale.amax(-1, keepdim=True)
        ratio = reinterpreted((scale * inverse(largest)).to(torch.float32), torch.int32)
        part = torch.bitwise_right_shift(ratio + (1 << DROPPED - 1), DROPPED) - SMALLEST
        return {"largest": largest, "scale": part.clamp(0, 255).to(torch.uint8), "q": pack(q, self.bits)}

    def unit(self, n: int) -> int:
        return n

    def decode(self, payload: Payload, n: int) -> Tensor:
        part = payload["scale"].to(torch.int32)
        ratio = reinterpreted((part + SMALLEST) * (1 << DROPPED), torch.float32)
        scale = torch.where(part == 0, 0, ratio) * payload["largest"]
        level = self._level(unpack(payload["q"], self.bits, block_size(self.block, n)), scale.dtype)
        return shortened((level * scale.unsqueeze(-1)).flatten(-2), n)

    def _level(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the levels of integers in two's complement: 0 is the lowest positive one, -1 its negative."""
        positive = LEVELS[self.bits]
        every = (*(-level for level in reversed(positive)), *positive)
        if type(q) is Tensor and takes_operators(q):  # not traced: torch.tensor would wait for the device
            levels = on_device(every, lambda: every, dtype, q.device)
        else:
            levels = torch.tensor(every, dtype=dtype, device=q.device)
        return levels.index_select(0, (q + len(positive)).flatten().to(torch.int32)).view(q.shape)
